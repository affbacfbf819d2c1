// Thirty-two elements at a time on every instruction set: loads and conversions. Everything else is
// operators on vectors.
//
// A Pack<T> holds 32 elements in as many registers as the instruction set needs. Included once per
// instruction set, within its namespace FUSEDACCUM_ISA; an architecture without intrinsics here
// runs the generic vectors of GCC and Clang.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "../formulas.h"
#include "kernels.h"

namespace fusedaccum {
namespace cpu {
namespace FUSEDACCUM_ISA {

#define FUSEDACCUM_INLINE inline __attribute__((always_inline))

struct BF16 {
  uint16_t bits;
};
struct FP16 {
  uint16_t bits;
};

constexpr int kLanes = 32;
#if defined(__AVX512F__)
constexpr int kRegister = 64;
#elif defined(__AVX2__)
constexpr int kRegister = 32;
#else
constexpr int kRegister = 16;
#endif

// Without this, GCC keeps short loops over registers as loops, and the registers on the stack.
#if defined(__clang__)
#define FUSEDACCUM_UNROLL _Pragma("unroll")
#else
#define FUSEDACCUM_UNROLL _Pragma("GCC unroll 16")
#endif

template <class T>
struct Pack {
  typedef T Vector __attribute__((vector_size(kRegister)));
  static constexpr int kWidth = kRegister / sizeof(T);
  static constexpr int kCount = kLanes / kWidth;
  Vector v[kCount];

  static FUSEDACCUM_INLINE Pack all(T x) {
    Pack p;
    FUSEDACCUM_UNROLL
    for (int i = 0; i < kCount; ++i) p.v[i] = x - Vector{};  // not a sum with 0, which would lose the sign of -0
    return p;
  }
};
typedef uint16_t Halves __attribute__((vector_size(kRegister)));
typedef uint16_t UnalignedHalves __attribute__((vector_size(kRegister), aligned(sizeof(uint16_t)), may_alias));
using F32 = Pack<float>;
using F64 = Pack<double>;
using U32 = Pack<uint32_t>;

// -- between FP32 and FP64 ------------------------------------------------------------------------

FUSEDACCUM_INLINE F64 widen(const F32& x) {
  F64 wide;
#if defined(__AVX512F__)
  FUSEDACCUM_UNROLL
  for (int i = 0; i < F32::kCount; ++i) {
    wide.v[2 * i] = (F64::Vector)_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)x.v[i]));
    wide.v[2 * i + 1] = (F64::Vector)_mm512_cvtps_pd(_mm512_extractf32x8_ps((__m512)x.v[i], 1));
  }
#elif defined(__AVX2__)
  FUSEDACCUM_UNROLL
  for (int i = 0; i < F32::kCount; ++i) {
    wide.v[2 * i] = (F64::Vector)_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)x.v[i]));
    wide.v[2 * i + 1] = (F64::Vector)_mm256_cvtps_pd(_mm256_extractf128_ps((__m256)x.v[i], 1));
  }
#else
  typedef float Half __attribute__((vector_size(kRegister / 2)));
  FUSEDACCUM_UNROLL
  for (int i = 0; i < F64::kCount; ++i) {
    Half half;
    memcpy(&half, reinterpret_cast<const char*>(&x) + i * sizeof(Half), sizeof(Half));
    wide.v[i] = __builtin_convertvector(half, F64::Vector);
  }
#endif
  return wide;
}
FUSEDACCUM_INLINE F64 widen(const F64& x) { return x; }

FUSEDACCUM_INLINE F32 narrow(const F64& x) {
  F32 narrowed;
#if defined(__AVX512F__)
  FUSEDACCUM_UNROLL
  for (int i = 0; i < F32::kCount; ++i) {
    const __m512 low = _mm512_castps256_ps512(_mm512_cvtpd_ps((__m512d)x.v[2 * i]));
    narrowed.v[i] = (F32::Vector)_mm512_insertf32x8(low, _mm512_cvtpd_ps((__m512d)x.v[2 * i + 1]), 1);
  }
#elif defined(__AVX2__)
  FUSEDACCUM_UNROLL
  for (int i = 0; i < F32::kCount; ++i) {
    narrowed.v[i] =
        (F32::Vector)_mm256_set_m128(_mm256_cvtpd_ps((__m256d)x.v[2 * i + 1]), _mm256_cvtpd_ps((__m256d)x.v[2 * i]));
  }
#else
  typedef float Half __attribute__((vector_size(kRegister / 2)));
  FUSEDACCUM_UNROLL
  for (int i = 0; i < F64::kCount; ++i) {
    const Half half = __builtin_convertvector(x.v[i], Half);
    memcpy(reinterpret_cast<char*>(&narrowed) + i * sizeof(Half), &half, sizeof(Half));
  }
#endif
  return narrowed;
}
FUSEDACCUM_INLINE F32 narrow(const F32& x) { return x; }

template <class C, class X>
FUSEDACCUM_INLINE Pack<C> as(const X& x) {
  if constexpr (sizeof(C) == sizeof(double)) {
    return widen(x);
  } else {
    return narrow(x);
  }
}

// -- loads: 32 elements as FP32, or FP64 ones as they are -----------------------------------------

template <class T>
FUSEDACCUM_INLINE Pack<T> load_plain(const T* p) {
  typedef T Unaligned __attribute__((vector_size(kRegister), aligned(sizeof(T)), may_alias));
  Pack<T> x;
  FUSEDACCUM_UNROLL
  for (int i = 0; i < Pack<T>::kCount; ++i) x.v[i] = *reinterpret_cast<const Unaligned*>(p + i * Pack<T>::kWidth);
  return x;
}
FUSEDACCUM_INLINE F64 load(const double* p) { return load_plain(p); }
FUSEDACCUM_INLINE F32 load(const float* p) { return load_plain(p); }

FUSEDACCUM_INLINE U32 load_halves(const void* p) {
  U32 bits;
#if defined(__AVX512F__)
  FUSEDACCUM_UNROLL
  for (int i = 0; i < U32::kCount; ++i)
    bits.v[i] = (U32::Vector)_mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p) + i));
#elif defined(__AVX2__)
  FUSEDACCUM_UNROLL
  for (int i = 0; i < U32::kCount; ++i)
    bits.v[i] = (U32::Vector)_mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p) + i));
#else
  typedef uint16_t Half __attribute__((vector_size(kRegister / 2)));
  FUSEDACCUM_UNROLL
  for (int i = 0; i < U32::kCount; ++i) {
    Half half;
    memcpy(&half, static_cast<const char*>(p) + i * sizeof(Half), sizeof(Half));
    bits.v[i] = __builtin_convertvector(half, U32::Vector);
  }
#endif
  return bits;
}

FUSEDACCUM_INLINE F32 load(const BF16* p) {
  const U32 bits = load_halves(p);
  F32 x;
  FUSEDACCUM_UNROLL
  for (int i = 0; i < F32::kCount; ++i) x.v[i] = bitcast<F32::Vector>(bits.v[i] << 16);
  return x;
}

// The same with the elements of even index in registers 0, 2 … and those of odd index in 1, 3 …:
// cheaper if they are stored that way too.
FUSEDACCUM_INLINE F32 load_split(const BF16* p) {
  F32 x;
  FUSEDACCUM_UNROLL
  for (int i = 0; i < F32::kCount / 2; ++i) {
    const auto two = *reinterpret_cast<const UnalignedHalves*>(p + i * 2 * F32::kWidth);
    x.v[2 * i] = bitcast<F32::Vector>(bitcast<U32::Vector>(two) << 16);
    x.v[2 * i + 1] = bitcast<F32::Vector>(bitcast<U32::Vector>(two) & 0xffff0000u);
  }
  return x;
}

// Two registers of elements side by side as one of those of even index and one of the odd ones, and
// back.
FUSEDACCUM_INLINE void unzip(F32::Vector a, F32::Vector b, F32::Vector& even, F32::Vector& odd) {
#if defined(__AVX512F__)
  const __m512i pick = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  even = (F32::Vector)_mm512_permutex2var_ps((__m512)a, pick, (__m512)b);
  odd = (F32::Vector)_mm512_permutex2var_ps((__m512)a, _mm512_add_epi32(pick, _mm512_set1_epi32(1)), (__m512)b);
#elif defined(__AVX2__)
  const auto in_order = [](__m256 x) { return (F32::Vector)_mm256_permute4x64_pd(_mm256_castps_pd(x), 0xd8); };
  even = in_order(_mm256_shuffle_ps((__m256)a, (__m256)b, 0x88));
  odd = in_order(_mm256_shuffle_ps((__m256)a, (__m256)b, 0xdd));
#elif defined(__SSE2__)
  even = (F32::Vector)_mm_shuffle_ps((__m128)a, (__m128)b, 0x88);
  odd = (F32::Vector)_mm_shuffle_ps((__m128)a, (__m128)b, 0xdd);
#else
  for (int i = 0; i < F32::kWidth; ++i) {
    even[i] = 2 * i < F32::kWidth ? a[2 * i] : b[2 * i - F32::kWidth];
    odd[i] = 2 * i < F32::kWidth ? a[2 * i + 1] : b[2 * i + 1 - F32::kWidth];
  }
#endif
}
FUSEDACCUM_INLINE void zip(F32::Vector even, F32::Vector odd, F32::Vector& a, F32::Vector& b) {
#if defined(__AVX512F__)
  const __m512i pick = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  a = (F32::Vector)_mm512_permutex2var_ps((__m512)even, pick, (__m512)odd);
  b = (F32::Vector)_mm512_permutex2var_ps((__m512)even, _mm512_add_epi32(pick, _mm512_set1_epi32(8)), (__m512)odd);
#elif defined(__AVX2__)
  const __m256 low = _mm256_unpacklo_ps((__m256)even, (__m256)odd),
               high = _mm256_unpackhi_ps((__m256)even, (__m256)odd);
  a = (F32::Vector)_mm256_permute2f128_ps(low, high, 0x20);
  b = (F32::Vector)_mm256_permute2f128_ps(low, high, 0x31);
#elif defined(__SSE2__)
  a = (F32::Vector)_mm_unpacklo_ps((__m128)even, (__m128)odd);
  b = (F32::Vector)_mm_unpackhi_ps((__m128)even, (__m128)odd);
#else
  for (int i = 0; i < F32::kWidth; ++i) {
    (2 * i < F32::kWidth ? a : b)[2 * i % F32::kWidth] = even[i];
    (2 * i < F32::kWidth ? a : b)[2 * i % F32::kWidth + 1] = odd[i];
  }
#endif
}

FUSEDACCUM_INLINE F32 load(const FP16* p) {
  F32 x;
#if defined(__AVX512F__)
  FUSEDACCUM_UNROLL
  for (int i = 0; i < F32::kCount; ++i)
    x.v[i] = (F32::Vector)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p) + i));
#elif defined(__AVX2__)
  FUSEDACCUM_UNROLL
  for (int i = 0; i < F32::kCount; ++i)
    x.v[i] = (F32::Vector)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p) + i));
#else
  const U32 bits = load_halves(p);
  FUSEDACCUM_UNROLL
  for (int i = 0; i < F32::kCount; ++i) x.v[i] = fp16_to_float<F32::Vector>(bits.v[i]);
#endif
  return x;
}

}  // namespace FUSEDACCUM_ISA
}  // namespace cpu
}  // namespace fusedaccum
