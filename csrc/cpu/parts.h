// Numbers in two parts: a BF16 tensor and integers beside it. Loads, stores and kernels, 32
// elements at a time.
//
//   accumulate: new = overwrite ? t : joined * decay + t, with t = in * scale
//   scale:      new = joined * scale
//   cast:       out = round(joined * scale)
//
// Bytes per element with 8-bit low parts and BF16 gradients: 8 to add, 5 to overwrite when
// streamed, 5 to cast to BF16 when streamed. In registers, elements are in the order of
// load_split().
#pragma once

#include "measures.h"
#include "stores.h"

namespace fusedaccum {
namespace cpu {
namespace FUSEDACCUM_ISA {

typedef int32_t Signed __attribute__((vector_size(kRegister)));
typedef int16_t SignedHalves __attribute__((vector_size(kRegister)));
typedef uint8_t Bytes __attribute__((vector_size(kRegister)));

template <class L>
constexpr int kShift = sizeof(L) == 1 ? 8 : 0;

// -- low parts, two bytes each in registers -------------------------------------------------------

// kRegister / 2 of them.
FUSEDACCUM_INLINE Halves load_low(const int16_t* p) { return (Halves) * reinterpret_cast<const UnalignedHalves*>(p); }
FUSEDACCUM_INLINE Halves load_low(const int8_t* p) {
#if defined(__AVX512F__)
  return (Halves)_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
  return (Halves)_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  typedef int8_t Narrow __attribute__((vector_size(kRegister / 2)));
  typedef int16_t Wide __attribute__((vector_size(kRegister)));
  Narrow x;
  memcpy(&x, p, sizeof(x));
  return (Halves) __builtin_convertvector(x, Wide);
#endif
}

// The words of elements of even index and of odd ones as their halves, each in the order of memory,
// and back.
FUSEDACCUM_INLINE void to_halves(F32::Vector even, F32::Vector odd, Halves& upper, Halves& lower) {
  upper = blended(bitcast<U32::Vector>(even) >> 16, bitcast<U32::Vector>(odd));
  lower = blended(bitcast<U32::Vector>(even), bitcast<U32::Vector>(odd) << 16);
}
FUSEDACCUM_INLINE void to_words(Halves upper, Halves lower, U32::Vector& even, U32::Vector& odd) {
  even = bitcast<U32::Vector>(blended(bitcast<U32::Vector>(lower), bitcast<U32::Vector>(upper) << 16));
  odd = bitcast<U32::Vector>(blended(bitcast<U32::Vector>(lower) >> 16, bitcast<U32::Vector>(upper)));
}

template <bool kStreamed>
FUSEDACCUM_INLINE void store_low(int16_t* p, const Halves (&low)[F32::kCount / 2]) {
  put<kStreamed>(p, low);
}
template <bool kStreamed>
FUSEDACCUM_INLINE void store_low(int8_t* p, const Halves (&low)[F32::kCount / 2]) {
#if defined(__AVX512F__)
  const __m256i bytes = _mm512_cvtepi16_epi8((__m512i)low[0]);
  if constexpr (kStreamed) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(p), bytes);
  } else {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), bytes);
  }
#elif defined(__AVX2__)
  const __m256i packed = _mm256_packus_epi16((__m256i)low[0], (__m256i)low[1]);
  const Bytes bytes[1] = {(Bytes)_mm256_permute4x64_epi64(packed, 0xd8)};
  put<kStreamed>(p, bytes);
#elif defined(__SSE2__)
  const Bytes bytes[2] = {(Bytes)_mm_packus_epi16((__m128i)low[0], (__m128i)low[1]),
                          (Bytes)_mm_packus_epi16((__m128i)low[2], (__m128i)low[3])};
  put<kStreamed>(p, bytes);
#else
  typedef uint8_t Narrow __attribute__((vector_size(kRegister / 2)));
  for (int i = 0; i < F32::kCount / 2; ++i) {
    const Narrow bytes = __builtin_convertvector(low[i], Narrow);
    memcpy(p + i * sizeof(bytes), &bytes, sizeof(bytes));
  }
#endif
}

// -- numbers --------------------------------------------------------------------------------------
//
// Infinities, NaNs, and zeros with low parts that other code has left there take a dozen operations
// that others do not need. So a step computes without them (kCareful false), on halves of words
// where it can, and once more with them if Special has seen one.

// Whether one of some words may be special: infinite or NaN, or about to be rounded to infinity. A
// zero with a negative low part and an infinity with one make such words, too.
class Special {
 public:
  FUSEDACCUM_INLINE void see(Halves upper) {
    const auto magnitude = (SignedHalves)(upper & 0x7fff);
    largest_ = magnitude > largest_ ? magnitude : largest_;
  }
  FUSEDACCUM_INLINE bool any() const {
    const SignedHalves above = largest_ > 0x7f7e;
#if defined(__AVX512F__)
    return _mm512_test_epi16_mask((__m512i)above, (__m512i)above) != 0;
#elif defined(__AVX2__)
    return _mm256_movemask_epi8((__m256i)above) != 0;
#else
    uint64_t words[sizeof(above) / sizeof(uint64_t)], seen = 0;
    memcpy(words, &above, sizeof(above));
    for (const uint64_t word : words) seen |= word;
    return seen != 0;
#endif
  }

 private:
  SignedHalves largest_ = {};
};

template <bool kCareful, class L>
FUSEDACCUM_INLINE F32 load_parts(const BF16* h, const L* low, Special& special) {
  F32 x;
  FUSEDACCUM_UNROLL
  for (int i = 0; i < F32::kCount / 2; ++i) {
    const auto parts = (Halves) * reinterpret_cast<const UnalignedHalves*>(h + i * 2 * F32::kWidth);
    const Halves beside = load_low(low + i * 2 * F32::kWidth);
    U32::Vector even, odd;
    if constexpr (kCareful) {
      U32::Vector even_low, odd_low;
      to_words(parts, Halves{}, even, odd);
      to_words(beside, Halves{}, even_low, odd_low);
      const auto shifted = [](U32::Vector x) { return (U32::Vector)((Signed)x >> (16 - kShift<L>)); };
      even = parts_to_word<kShift<L>>(even, shifted(even_low));
      odd = parts_to_word<kShift<L>>(odd, shifted(odd_low));
    } else {
      Halves upper, lower;
      parts_to_halves<kShift<L>>(parts, beside, upper, lower);
      special.see(upper);
      to_words(upper, lower, even, odd);
    }
    x.v[2 * i] = bitcast<F32::Vector>(even);
    x.v[2 * i + 1] = bitcast<F32::Vector>(odd);
  }
  return x;
}

// Returns the numbers that it stored if kReturned, else anything. Those are rounded as words;
// without them, halves take fewer operations.
template <bool kCareful, bool kReturned, bool kStreamed, class L>
FUSEDACCUM_INLINE F32 store_parts(BF16* h, L* low, const F32& x) {
  constexpr bool kRounded = kCareful || kReturned;
  constexpr uint32_t kMeant = sizeof(L) == 1 ? 0xffffff00u : 0xffffffffu;
  F32 stored;
  FUSEDACCUM_UNROLL
  for (int i = 0; i < F32::kCount; ++i) {
    const auto word = kRounded ? float_to_parts<kShift<L>, kCareful, F32::Vector, U32::Vector>(x.v[i]) & kMeant
                               : bitcast<U32::Vector>(x.v[i]);
    stored.v[i] = bitcast<F32::Vector>(word);
  }
  Halves upper[F32::kCount / 2], lower[F32::kCount / 2];
  FUSEDACCUM_UNROLL
  for (int i = 0; i < F32::kCount / 2; ++i) {
    to_halves(stored.v[2 * i], stored.v[2 * i + 1], upper[i], lower[i]);
    upper[i] = halves_to_h<kRounded ? 0 : kShift<L>>(upper[i], lower[i]);
    lower[i] >>= kShift<L>;
  }
  put<kStreamed>(h, upper);
  store_low<kStreamed>(low, lower);
  return stored;
}

// FP32 between its order in memory and that of load_split(): the elements of two registers, in
// turns from one and from the other.
FUSEDACCUM_INLINE F32 load_split(const float* p) {
  const F32 x = load(p);
  F32 split;
  FUSEDACCUM_UNROLL
  for (int i = 0; i < F32::kCount; i += 2) unzip(x.v[i], x.v[i + 1], split.v[i], split.v[i + 1]);
  return split;
}

template <bool kStreamed>
FUSEDACCUM_INLINE F32 store_split(float* p, const F32& x) {
  F32 whole;
  FUSEDACCUM_UNROLL
  for (int i = 0; i < F32::kCount; i += 2) zip(x.v[i], x.v[i + 1], whole.v[i], whole.v[i + 1]);
  put<kStreamed>(p, whole.v);
  return x;
}

// For a cast of numbers of which none is NaN, if its output is BF16.
template <bool kStreamed>
FUSEDACCUM_INLINE F32 store_numbers(BF16* p, const F32& x) {
  F32 stored;
  Halves halves[F32::kCount / 2];
  FUSEDACCUM_UNROLL
  for (int i = 0; i < F32::kCount / 2; ++i) {
    Halves upper, lower;
    to_halves(x.v[2 * i], x.v[2 * i + 1], upper, lower);
    halves[i] = halves_to_bf16(upper, lower);
    stored.v[2 * i] = bitcast<F32::Vector>(bitcast<U32::Vector>(halves[i]) << 16);
    stored.v[2 * i + 1] = bitcast<F32::Vector>(bitcast<U32::Vector>(halves[i]) & 0xffff0000u);
  }
  put<kStreamed>(p, halves);
  return stored;
}
template <bool kStreamed>
FUSEDACCUM_INLINE F32 store_numbers(float* p, const F32& x) {
  return store_split<kStreamed>(p, x);
}

// -- kernels --------------------------------------------------------------------------------------

template <class L>
__attribute__((noinline)) int64_t count_nonfinite_parts(const BF16* h, const L* low, int64_t n) {
  int64_t count = 0;
  Special special;
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t here = n - i < kLanes ? n - i : kLanes;
    alignas(64) BF16 padded_h[kLanes] = {};
    alignas(64) L padded_low[kLanes] = {};
    memcpy(static_cast<void*>(padded_h), h + i, static_cast<size_t>(here) * sizeof(BF16));
    memcpy(padded_low, low + i, static_cast<size_t>(here) * sizeof(L));
    const F32 x = load_parts<true>(padded_h, padded_low, special);
    float numbers[kLanes];
    memcpy(numbers, &x, sizeof(numbers));
    for (const float number : numbers) count += !finite(number);
  }
  return count;
}

// T: gradients, or the output of a cast; anything where there is neither.
template <Op kOp, int kMode, class L, class T>
struct PartsStep {
  static constexpr bool kWritesParts = kOp == Op::kAccumulate || kOp == Op::kScale;
  static constexpr bool kReadsParts = kOp != Op::kAccumulate || (kMode & kOverwrite) == 0;
  static constexpr bool kCastsToHalves = kOp == Op::kCast && sizeof(T) == sizeof(BF16);
  static constexpr bool kStreamed = (kMode & kStream) != 0;
  F32::Vector scale, decay;

  // False, and nothing is written, if one of the elements may be special. `done` is what it wrote
  // or, for stats, read.
  FUSEDACCUM_INLINE bool operator()(BF16* h, L* low, T* other, F32& done) const {
    Special special;
    const F32 x = computed<false>(h, low, other, special);
    if constexpr (kWritesParts || kCastsToHalves) {
      FUSEDACCUM_UNROLL
      for (int i = 0; i < F32::kCount; i += 2) {
        Halves upper, lower;
        to_halves(x.v[i], x.v[i + 1], upper, lower);
        special.see(upper);
      }
    }
    if (__builtin_expect(special.any(), false)) return false;
    done = stored<false>(h, low, other, x);
    return true;
  }

  // The same, whatever the elements are.
  __attribute__((noinline)) F32 carefully(BF16* h, L* low, T* other) const {
    Special special;
    return stored<true>(h, low, other, computed<true>(h, low, other, special));
  }

 private:
  template <bool kCareful>
  FUSEDACCUM_INLINE F32 computed(const BF16* h, const L* low, const T* other, Special& special) const {
    F32 x;
    if constexpr (kOp == Op::kAccumulate) {
      x = load_split(other);
    } else {
      x = load_parts<kCareful>(h, low, special);
    }
    if constexpr (kOp == Op::kStats) return x;
    FUSEDACCUM_UNROLL
    for (int i = 0; i < F32::kCount; ++i) x.v[i] = contribution(x.v[i], scale);
    if constexpr (kOp == Op::kAccumulate && kReadsParts) {
      const F32 sum = load_parts<kCareful>(h, low, special);
      FUSEDACCUM_UNROLL
      for (int i = 0; i < F32::kCount; ++i) x.v[i] = accumulated(sum.v[i], decay, x.v[i]);
    }
    return x;
  }

  template <bool kCareful>
  FUSEDACCUM_INLINE F32 stored(BF16* h, L* low, T* other, const F32& x) const {
    if constexpr (kOp == Op::kStats) {
      return x;
    } else if constexpr (kOp == Op::kCast) {
      return kCareful ? store_split<kStreamed>(other, x) : store_numbers<kStreamed>(other, x);
    } else {
      return store_parts<kCareful, (kMode & kStats) != 0, kStreamed>(h, low, x);
    }
  }
};

template <Op kOp, int kMode, class L, class T>
void run_parts(void* out, const void* in, int64_t n, const Parameters& parameters, Partial* partial) {
  using Step = PartsStep<kOp, kMode, L, T>;
  void* const read = const_cast<void*>(in);  // steps write what their op does
  BF16* const h = static_cast<BF16*>(Step::kWritesParts ? out : read);
  T* const other = static_cast<T*>(kOp == Op::kCast ? out : read);
  L* const low = static_cast<L*>(parameters.low);
  const Step step{F32::all(static_cast<float>(parameters.scale)).v[0],
                  F32::all(static_cast<float>(parameters.decay)).v[0]};
  Tally tally;
  int64_t i = 0;
  while (i + kLanes <= n) {
    F32 x;
    for (; i + kLanes <= n; i += kLanes) {  // a call within this loop would keep registers in memory
      if (Step::kReadsParts) {
        prefetch(h + i);
        __builtin_prefetch(low + i + kAhead / sizeof(L));
      }
      if (kOp == Op::kAccumulate) prefetch(other + i);
      if (!step(h + i, low + i, other + i, x)) break;
      if constexpr ((kMode & kStats) != 0) tally.add<true>(x);
    }
    if (i + kLanes > n) break;
    x = step.carefully(h + i, low + i, other + i);
    if constexpr ((kMode & kStats) != 0) tally.add<true>(x);
    i += kLanes;
  }
  if (i < n) {
    const auto rest = static_cast<size_t>(n - i);
    alignas(64) BF16 last_h[kLanes] = {};
    alignas(64) L last_low[kLanes] = {};
    alignas(64) T last_other[kLanes] = {};
    if (Step::kReadsParts) memcpy(static_cast<void*>(last_h), h + i, rest * sizeof(BF16));
    if (Step::kReadsParts) memcpy(last_low, low + i, rest * sizeof(L));
    if (kOp == Op::kAccumulate) memcpy(static_cast<void*>(last_other), other + i, rest * sizeof(T));
    F32 x = step.carefully(last_h, last_low, last_other);
    if constexpr (Step::kWritesParts) {
      memcpy(static_cast<void*>(h + i), last_h, rest * sizeof(BF16));
      memcpy(low + i, last_low, rest * sizeof(L));
    }
    if constexpr (kOp == Op::kCast) memcpy(static_cast<void*>(other + i), last_other, rest * sizeof(T));
    if constexpr ((kMode & kStats) != 0) {
      // Without what follows the last element, where 0 * infinity may have left NaNs.
      memset(static_cast<void*>(last_h + rest), 0, sizeof(last_h) - rest * sizeof(BF16));
      memset(last_low + rest, 0, sizeof(last_low) - rest * sizeof(L));
      memset(static_cast<void*>(last_other + rest), 0, sizeof(last_other) - rest * sizeof(T));
      if constexpr (kOp == Op::kCast) {
        x = load_split(last_other);
      } else {
        Special special;
        x = load_parts<true>(last_h, last_low, special);
      }
      tally.add<true>(x);
    }
  }
  if constexpr (Step::kStreamed) finish_streaming();
  if constexpr ((kMode & kStats) != 0) {
    *partial = {tally.total(), 0};
    if (finite(partial->sq_norm)) return;
    if constexpr (kOp == Op::kAccumulate) {
      partial->nonfinite = count_nonfinite<T, float>(other, n, static_cast<float>(parameters.scale));
    } else if constexpr (kOp == Op::kCast) {
      partial->nonfinite = count_nonfinite<T, float>(other, n, 1.0f);
    } else {
      partial->nonfinite = count_nonfinite_parts(h, low, n);
    }
  }
}

// The kernel of an op and a mode; null where the mode makes no sense.
template <Op kOp, int kMode, class L, class T>
constexpr Kernel parts_kernel_for() {
  constexpr bool kStreams = (kMode & kStream) != 0, kOverwrites = (kMode & kOverwrite) != 0;
  constexpr bool kMeant = kOp == Op::kAccumulate ? (kMode & kCountOutput) == 0 && (!kStreams || kOverwrites)
                          : kOp == Op::kCast  ? kOverwrites && ((kMode & kStats) != 0) == ((kMode & kCountOutput) != 0)
                          : kOp == Op::kScale ? (kMode & ~kStats) == 0 && sizeof(T) == sizeof(BF16)
                                              : kMode == kStats && sizeof(T) == sizeof(BF16);
  if constexpr (kMeant) return &run_parts<kOp, kMode, L, T>;
  return nullptr;
}

}  // namespace FUSEDACCUM_ISA
}  // namespace cpu
}  // namespace fusedaccum
