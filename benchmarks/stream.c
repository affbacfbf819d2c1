/* Memory traffic with the mix of an accumulation, and as little arithmetic as keeps the compiler from dropping it.
 *
 * Compiled at run time by bandwidth.py for the machine it runs on. Sizes are in bytes, multiples of BLOCK; pointers are
 * aligned to 64 bytes. Each function is called from as many threads as are measured, each on its own part.
 */
#include <stddef.h>
#include <stdint.h>

#define BLOCK 256
#define WORDS (BLOCK / 8)
#define AHEAD 1024 /* bytes to prefetch ahead */

typedef uint64_t words __attribute__((vector_size(64)));

/* A store that bypasses the caches, where the compiler offers one. */
static inline void store_past_caches(words *to, words value) {
#if defined(__clang__)
    __builtin_nontemporal_store(value, to);
#elif defined(__AVX512F__)
    __builtin_ia32_movntdq512((__attribute__((vector_size(64))) long long *)to, (__attribute__((vector_size(64))) long long)value);
#elif defined(__SSE2__)
    for (int i = 0; i < 4; ++i) {
        __attribute__((vector_size(16))) long long part = {(long long)value[2 * i], (long long)value[2 * i + 1]};
        __builtin_ia32_movntdq((__attribute__((vector_size(16))) long long *)to + i, part);
    }
#else
    *to = value;
#endif
}

/* destination += f(source), block by block: reads the source, reads and writes the destination.
 * `parts` blocks of source go with `wholes` blocks of destination. */
void stream_update(uint64_t *destination, const uint64_t *source, size_t bytes, size_t parts, size_t wholes) {
    for (size_t done = 0; done < bytes; done += wholes * BLOCK) {
        words sum = {0};
        for (size_t i = 0; i < parts * WORDS; i += 8) {
            __builtin_prefetch((const char *)(source + i) + AHEAD);
            sum ^= *(const words *)(source + i);
        }
        for (size_t i = 0; i < wholes * WORDS; i += 8) {
            __builtin_prefetch((const char *)(destination + i) + AHEAD, 1);
            *(words *)(destination + i) += sum;
        }
        source += parts * WORDS;
        destination += wholes * WORDS;
    }
}

/* As above, without reading the destination first. */
void stream_overwrite(uint64_t *destination, const uint64_t *source, size_t bytes, size_t parts, size_t wholes) {
    for (size_t done = 0; done < bytes; done += wholes * BLOCK) {
        words sum = {0};
        for (size_t i = 0; i < parts * WORDS; i += 8) {
            __builtin_prefetch((const char *)(source + i) + AHEAD);
            sum ^= *(const words *)(source + i);
        }
        for (size_t i = 0; i < wholes * WORDS; i += 8) {
            store_past_caches((words *)(destination + i), sum);
        }
        source += parts * WORDS;
        destination += wholes * WORDS;
    }
}
