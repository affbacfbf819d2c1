// Stores: 32 elements rounded to a format and written, through the caches or past them; every store
// returns what it wrote.
#pragma once

#include "vectors.h"

namespace fusedaccum {
namespace cpu {
namespace FUSEDACCUM_ISA {

// Writes registers side by side.
template <bool kStreamed, int kCount, class Register>
FUSEDACCUM_INLINE void put(void* p, const Register (&x)[kCount]) {
#if defined(__AVX512F__)
  if constexpr (kStreamed) {
    FUSEDACCUM_UNROLL
    for (int i = 0; i < kCount; ++i) _mm512_stream_si512(static_cast<__m512i*>(p) + i, (__m512i)x[i]);
    return;
  }
#elif defined(__AVX2__)
  if constexpr (kStreamed) {
    FUSEDACCUM_UNROLL
    for (int i = 0; i < kCount; ++i) _mm256_stream_si256(static_cast<__m256i*>(p) + i, (__m256i)x[i]);
    return;
  }
#elif defined(__SSE2__)
  if constexpr (kStreamed) {
    for (int i = 0; i < kCount; ++i) _mm_stream_si128(static_cast<__m128i*>(p) + i, (__m128i)x[i]);
    return;
  }
#endif
  FUSEDACCUM_UNROLL
  for (int i = 0; i < kCount; ++i)
    memcpy(static_cast<char*>(p) + i * kRegister, &x[i], kRegister);  // bytes may be anywhere
}

// The upper halves of the words, or the lower ones.
template <bool kStreamed, bool kUpper>
FUSEDACCUM_INLINE void put_halves(void* p, const U32& words) {
  constexpr int kCount = U32::kCount / 2;
  Halves halves[kCount];
  FUSEDACCUM_UNROLL
  for (int i = 0; i < kCount; ++i) {
#if defined(__AVX512F__)
    static const uint16_t kPick[64] = {0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
                                       32, 34, 36, 38, 40, 42, 44, 46, 48, 50, 52, 54, 56, 58, 60, 62,
                                       1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                       33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
    const __m512i pick = _mm512_loadu_si512(kPick + (kUpper ? 32 : 0));
    halves[i] = (Halves)_mm512_permutex2var_epi16((__m512i)words.v[2 * i], pick, (__m512i)words.v[2 * i + 1]);
#else
    U32::Vector low = words.v[2 * i], high = words.v[2 * i + 1];
    if constexpr (kUpper) {
      low >>= 16;
      high >>= 16;
    }
#if defined(__AVX2__)
    halves[i] = (Halves)_mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)low, (__m256i)high), 0xd8);
#elif defined(__SSE2__)
    // Only a signed pack exists; sign-extended halves go through it unchanged.
    const __m128i a = _mm_srai_epi32(_mm_slli_epi32((__m128i)low, 16), 16),
                  b = _mm_srai_epi32(_mm_slli_epi32((__m128i)high, 16), 16);
    halves[i] = (Halves)_mm_packs_epi32(a, b);
#else
    typedef uint16_t Half __attribute__((vector_size(kRegister / 2)));
    const Half pair[2] = {__builtin_convertvector(low, Half), __builtin_convertvector(high, Half)};
    memcpy(&halves[i], pair, sizeof(pair));
#endif
#endif
  }
  put<kStreamed>(p, halves);
}

template <bool kStreamed>
FUSEDACCUM_INLINE F64 store(double* p, const F64& x) {
  put<kStreamed>(p, x.v);
  return x;
}

template <bool kStreamed, class C>
FUSEDACCUM_INLINE F32 store(float* p, const Pack<C>& x) {
  const F32 y = narrow(x);
  put<kStreamed>(p, y.v);
  return y;
}

FUSEDACCUM_INLINE F32 truncated(const U32& upper) {
  F32 x;
  FUSEDACCUM_UNROLL
  for (int i = 0; i < F32::kCount; ++i) x.v[i] = bitcast<F32::Vector>(upper.v[i] & 0xffff0000u);
  return x;
}

template <bool kStreamed, class C>
FUSEDACCUM_INLINE F32 store(BF16* p, const Pack<C>& x) {
  const F32 y = narrow(x);
  U32 upper;
  FUSEDACCUM_UNROLL
  for (int i = 0; i < F32::kCount; ++i) upper.v[i] = float_to_bf16_upper<F32::Vector, U32::Vector>(y.v[i]);
  put_halves<kStreamed, true>(p, upper);
  return truncated(upper);
}

// The lower halves of the first's words, and the upper ones of the second's.
FUSEDACCUM_INLINE Halves blended(U32::Vector lower, U32::Vector upper) {
#if defined(__AVX512F__)
  return (Halves)_mm512_mask_blend_epi16(0xaaaaaaaau, (__m512i)lower, (__m512i)upper);
#elif defined(__AVX2__)
  return (Halves)_mm256_blend_epi16((__m256i)lower, (__m256i)upper, 0xaa);
#else
  return bitcast<Halves>((lower & 0xffffu) | (upper & 0xffff0000u));
#endif
}

// For elements in the order of load_split().
template <bool kStreamed>
FUSEDACCUM_INLINE F32 store_split(BF16* p, const F32& x) {
  F32 stored;
  Halves halves[F32::kCount / 2];
  FUSEDACCUM_UNROLL
  for (int i = 0; i < F32::kCount / 2; ++i) {
    const U32::Vector even = float_to_bf16_upper<F32::Vector, U32::Vector>(x.v[2 * i]);
    const U32::Vector odd = float_to_bf16_upper<F32::Vector, U32::Vector>(x.v[2 * i + 1]) & 0xffff0000u;
    halves[i] = bitcast<Halves>((even >> 16) | odd);
    stored.v[2 * i] = bitcast<F32::Vector>(even & 0xffff0000u);
    stored.v[2 * i + 1] = bitcast<F32::Vector>(odd);
  }
  put<kStreamed>(p, halves);
  return stored;
}

template <bool kStreamed, class C>
FUSEDACCUM_INLINE F32 store(FP16* p, const Pack<C>& x) {
  const F32 y = narrow(x);
  F32 stored;
#if defined(__AVX512F__)
  Halves halves[1];
  const __m256i low = _mm512_cvtps_ph((__m512)y.v[0], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m256i high = _mm512_cvtps_ph((__m512)y.v[1], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  halves[0] = (Halves)_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
  stored.v[0] = (F32::Vector)_mm512_cvtph_ps(low);
  stored.v[1] = (F32::Vector)_mm512_cvtph_ps(high);
  put<kStreamed>(p, halves);
#elif defined(__AVX2__)
  Halves halves[2];
  FUSEDACCUM_UNROLL
  for (int i = 0; i < 2; ++i) {
    const __m128i low = _mm256_cvtps_ph((__m256)y.v[2 * i], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m128i high = _mm256_cvtps_ph((__m256)y.v[2 * i + 1], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    halves[i] = (Halves)_mm256_set_m128i(high, low);
    stored.v[2 * i] = (F32::Vector)_mm256_cvtph_ps(low);
    stored.v[2 * i + 1] = (F32::Vector)_mm256_cvtph_ps(high);
  }
  put<kStreamed>(p, halves);
#else
  U32 bits;
  FUSEDACCUM_UNROLL
  for (int i = 0; i < F32::kCount; ++i) {
    bits.v[i] = float_to_fp16<F32::Vector, U32::Vector>(y.v[i]);
    stored.v[i] = fp16_to_float<F32::Vector>(bits.v[i]);
  }
  put_halves<kStreamed, false>(p, bits);
#endif
  return stored;
}

template <class C>
FUSEDACCUM_INLINE F32 store_stochastic(BF16* p, const Pack<C>& x, const U32& r) {
  const F32 y = narrow(x);
  U32 upper;
  FUSEDACCUM_UNROLL
  for (int i = 0; i < F32::kCount; ++i)
    upper.v[i] = float_to_bf16_upper_stochastic<F32::Vector, U32::Vector>(y.v[i], r.v[i]);
  put_halves<false, true>(p, upper);
  return truncated(upper);
}

template <class C>
FUSEDACCUM_INLINE F32 store_stochastic(FP16* p, const Pack<C>& x, const U32& r) {
  const F32 y = narrow(x);
  const auto nearest_of = [](F32::Vector v) { return float_to_fp16<F32::Vector, U32::Vector>(v); };
  U32 bits;
  FUSEDACCUM_UNROLL
  for (int i = 0; i < F32::kCount; ++i)
    bits.v[i] = float_to_fp16_stochastic<F32::Vector, U32::Vector>(y.v[i], r.v[i], nearest_of);
  put_halves<false, false>(p, bits);
  return load(p);
}

FUSEDACCUM_INLINE void finish_streaming() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace FUSEDACCUM_ISA
}  // namespace cpu
}  // namespace fusedaccum
