// What the kernels have in common beside their steps: sums of squares, counts of what is not
// finite, and prefetching.
#pragma once

#include "vectors.h"

namespace fusedaccum {
namespace cpu {
namespace FUSEDACCUM_ISA {

// Sums of squares in 16 lanes. Every instruction set puts an element of a chunk into the same lane:
// i % 16 for element i, or (i % 32) / 2 where even and odd elements come in separate registers.
struct Tally {
  static constexpr int kSums = 16;
  static constexpr int kRegisters = kSums / F64::kWidth;
  F64::Vector sums[kRegisters] = {};

  // The sum to which register i of a step goes. Split, four in a row are two of even elements, and
  // two of the odd ones between these.
  template <bool kSplit>
  static constexpr int sum_of(int i) {
    return kSplit ? i / 4 * 2 + i % 2 : i % kRegisters;
  }

  template <bool kSplit>
  FUSEDACCUM_INLINE void add(const F64& x) {
    FUSEDACCUM_UNROLL
    for (int i = 0; i < F64::kCount; ++i) {
      F64::Vector& sum = sums[sum_of<kSplit>(i)];
      sum += x.v[i] * x.v[i];
    }
  }
  // The square of a float has at most 48 bits: exact in FP64, so that here, and only here, an FMA
  // gives the same bits.
  template <bool kSplit>
  FUSEDACCUM_INLINE void add(const F32& x) {
    const F64 wide = widen(x);
#if defined(__AVX512F__)
    FUSEDACCUM_UNROLL
    for (int i = 0; i < F64::kCount; ++i) {
      F64::Vector& sum = sums[sum_of<kSplit>(i)];
      sum = (F64::Vector)_mm512_fmadd_pd((__m512d)wide.v[i], (__m512d)wide.v[i], (__m512d)sum);
    }
#else
    add<kSplit>(wide);
#endif
  }

  FUSEDACCUM_INLINE double total() const {
    double lanes[kSums];
    memcpy(lanes, sums, sizeof(lanes));
    for (int half = kSums / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    }
    return lanes[0];
  }
};

template <bool kSplit, class T>
FUSEDACCUM_INLINE auto read(const T* p) {
  if constexpr (kSplit) {
    return load_split(p);
  } else {
    return load(p);
  }
}

FUSEDACCUM_INLINE bool finite(double x) { return x - x == 0.0; }

// How many of in[i] * scale are not finite. Rarely called: if one is not, the outputs' sum of
// squares is not either, and shows it.
template <class In, class C>
__attribute__((noinline)) int64_t count_nonfinite(const In* in, int64_t n, C scale) {
  int64_t count = 0;
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t here = n - i < kLanes ? n - i : kLanes;
    alignas(64) In padded[kLanes] = {};
    C t[kLanes];
    memcpy(static_cast<void*>(padded), in + i, static_cast<size_t>(here) * sizeof(In));
    const Pack<C> x = as<C>(load(padded));
    memcpy(t, &x, sizeof(t));
    for (int64_t k = 0; k < here; ++k) count += !finite(contribution(t[k], scale));
  }
  return count;
}

// How many bytes ahead of a step lines are prefetched: the hardware stops at the end of a page, and
// the more a step computes, the fewer loads of later steps are under way with it. Whether that pays
// for steps that compute little (an add into FP32 or FP64) depends on the processor
// (Parameters::prefetch).
constexpr int kAhead = 3072;

template <class T>
FUSEDACCUM_INLINE void prefetch(const T* p) {
  for (size_t line = 0; line < kLanes * sizeof(T); line += 64)
    __builtin_prefetch(reinterpret_cast<const char*>(p) + kAhead + line);
}

}  // namespace FUSEDACCUM_ISA
}  // namespace cpu
}  // namespace fusedaccum
