// The random numbers of stochastic rounding, a register of Philox blocks at a time.
#pragma once

#include "vectors.h"

namespace fusedaccum {
namespace cpu {
namespace FUSEDACCUM_ISA {

struct MultiplyVectors {
  FUSEDACCUM_INLINE void operator()(const U32::Vector& a, uint32_t b, U32::Vector& high, U32::Vector& low) const {
#if defined(__AVX512F__)
    const __m512i factor = _mm512_set1_epi32(static_cast<int>(b));
    const __m512i even = _mm512_mul_epu32((__m512i)a, factor),
                  odd = _mm512_mul_epu32(_mm512_srli_epi64((__m512i)a, 32), factor);
    high = (U32::Vector)_mm512_mask_mov_epi32(_mm512_srli_epi64(even, 32), 0xaaaa, odd);
    low = (U32::Vector)_mm512_mask_mov_epi32(even, 0xaaaa, _mm512_slli_epi64(odd, 32));
#elif defined(__AVX2__)
    const __m256i factor = _mm256_set1_epi32(static_cast<int>(b));
    const __m256i even = _mm256_mul_epu32((__m256i)a, factor),
                  odd = _mm256_mul_epu32(_mm256_srli_epi64((__m256i)a, 32), factor);
    high = (U32::Vector)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
    low = (U32::Vector)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
#else
    for (int i = 0; i < U32::kWidth; ++i) {
      uint32_t h, l;
      Multiply32()(a[i], b, h, l);
      high[i] = h;
      low[i] = l;
    }
#endif
  }
};

// The 8 * kWidth numbers of the kWidth blocks from `block` on. A register's word vectors come out
// of Philox with a block in each position; transposed within 128 bits they are whole blocks, in the
// order of their numbers if blocks get their positions like this:
FUSEDACCUM_INLINE void draw(uint64_t block, uint64_t seed, uint16_t* numbers) {
  constexpr int kBlocks = U32::kWidth, kQuarters = kBlocks / 4;
  U32::Vector words[4] = {};
  FUSEDACCUM_UNROLL
  for (int i = 0; i < kBlocks; ++i) {
    const uint64_t b =
        (block + static_cast<uint64_t>(kQuarters * (i % 4) + i / 4)) & 0x1fffffffffffffffu;  // n is modulo 2^64
    words[0][i] = static_cast<uint32_t>(b);
    words[1][i] = static_cast<uint32_t>(b >> 32);
  }
  philox4x32<MultiplyVectors>(words, seed);
#if defined(__AVX512F__)
  const __m512i a = _mm512_unpacklo_epi32((__m512i)words[0], (__m512i)words[1]),
                b = _mm512_unpacklo_epi32((__m512i)words[2], (__m512i)words[3]);
  const __m512i c = _mm512_unpackhi_epi32((__m512i)words[0], (__m512i)words[1]),
                d = _mm512_unpackhi_epi32((__m512i)words[2], (__m512i)words[3]);
  const __m512i rows[4] = {_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b), _mm512_unpacklo_epi64(c, d),
                           _mm512_unpackhi_epi64(c, d)};
  memcpy(numbers, rows, sizeof(rows));
#elif defined(__AVX2__)
  const __m256i a = _mm256_unpacklo_epi32((__m256i)words[0], (__m256i)words[1]),
                b = _mm256_unpacklo_epi32((__m256i)words[2], (__m256i)words[3]);
  const __m256i c = _mm256_unpackhi_epi32((__m256i)words[0], (__m256i)words[1]),
                d = _mm256_unpackhi_epi32((__m256i)words[2], (__m256i)words[3]);
  const __m256i rows[4] = {_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b), _mm256_unpacklo_epi64(c, d),
                           _mm256_unpackhi_epi64(c, d)};
  memcpy(numbers, rows, sizeof(rows));
#else
  FUSEDACCUM_UNROLL
  for (int i = 0; i < kBlocks; ++i) {
    for (int word = 0; word < 4; ++word) {
      numbers[8 * i + 2 * word] = static_cast<uint16_t>(words[word][i]);
      numbers[8 * i + 2 * word + 1] = static_cast<uint16_t>(words[word][i] >> 16);
    }
  }
#endif
}

// Random numbers for the elements of a call, in order.
struct Draws {
  static constexpr int kDrawn = 256;
  static constexpr int kEnd = kLanes + kDrawn;
  uint64_t seed;
  uint64_t block;  // the next to be drawn
  int at = kEnd;   // the next number to be used
  alignas(64) uint16_t numbers[kEnd];

  FUSEDACCUM_INLINE Draws(uint64_t seed_, uint64_t counter) : seed(seed_), block(counter >> 3) {
    refill();
    at += static_cast<int>(counter & 7);
  }
  FUSEDACCUM_INLINE void refill() {
    const int left = kEnd - at;  // < kLanes
    for (int i = 0; i < left; ++i) numbers[kLanes - left + i] = numbers[at + i];
    for (int i = 0; i < kDrawn; i += 8 * U32::kWidth, block += U32::kWidth) draw(block, seed, numbers + kLanes + i);
    at = kLanes - left;
  }
  FUSEDACCUM_INLINE U32 next() {
    if (kEnd - at < kLanes) refill();
    at += kLanes;
    return load_halves(numbers + at - kLanes);
  }
};

}  // namespace FUSEDACCUM_ISA
}  // namespace cpu
}  // namespace fusedaccum
