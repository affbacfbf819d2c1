// Thirty-two elements at a time on every instruction set: loads, stores and conversions. Everything else is operators on vectors.
//
// A Pack<T> holds 32 elements in as many registers as the instruction set needs. Included once an instruction set, within its namespace
// FUSEDACCUM_ISA; without intrinsics of its own, an architecture runs the generic vectors of GCC and Clang.
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

// Without it GCC keeps short loops over registers as loops, and the registers on the stack.
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

// -- between FP32 and FP64 ---------------------------------------------------------------------------------------------

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
    narrowed.v[i] = (F32::Vector)_mm256_set_m128(_mm256_cvtpd_ps((__m256d)x.v[2 * i + 1]), _mm256_cvtpd_ps((__m256d)x.v[2 * i]));
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

// -- loads: 32 elements as FP32, or FP64 ones as they are --------------------------------------------------------------

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
  for (int i = 0; i < U32::kCount; ++i) bits.v[i] = (U32::Vector)_mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p) + i));
#elif defined(__AVX2__)
  FUSEDACCUM_UNROLL
  for (int i = 0; i < U32::kCount; ++i) bits.v[i] = (U32::Vector)_mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p) + i));
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

// The same with the elements of even index in registers 0, 2 … and those of odd index in 1, 3 …: cheaper where they are stored so, too.
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

FUSEDACCUM_INLINE F32 load(const FP16* p) {
  F32 x;
#if defined(__AVX512F__)
  FUSEDACCUM_UNROLL
  for (int i = 0; i < F32::kCount; ++i) x.v[i] = (F32::Vector)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p) + i));
#elif defined(__AVX2__)
  FUSEDACCUM_UNROLL
  for (int i = 0; i < F32::kCount; ++i) x.v[i] = (F32::Vector)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p) + i));
#else
  const U32 bits = load_halves(p);
  FUSEDACCUM_UNROLL
  for (int i = 0; i < F32::kCount; ++i) x.v[i] = fp16_to_float<F32::Vector>(bits.v[i]);
#endif
  return x;
}

// -- stores: round to the format, write, and return what was written ---------------------------------------------------

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
  for (int i = 0; i < kCount; ++i) static_cast<UnalignedHalves*>(p)[i] = (UnalignedHalves)x[i];
}

// The upper halves of the words, or the lower ones.
template <bool kStreamed, bool kUpper>
FUSEDACCUM_INLINE void put_halves(void* p, const U32& words) {
  constexpr int kCount = U32::kCount / 2;
  Halves halves[kCount];
  FUSEDACCUM_UNROLL
  for (int i = 0; i < kCount; ++i) {
#if defined(__AVX512F__)
    static const uint16_t kPick[64] = {0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 34, 36, 38, 40, 42,
                                       44, 46, 48, 50, 52, 54, 56, 58, 60, 62, 1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23,
                                       25, 27, 29, 31, 33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
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
    const __m128i a = _mm_srai_epi32(_mm_slli_epi32((__m128i)low, 16), 16), b = _mm_srai_epi32(_mm_slli_epi32((__m128i)high, 16), 16);
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

// Of elements in the order of load_split().
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
  for (int i = 0; i < F32::kCount; ++i) upper.v[i] = float_to_bf16_upper_stochastic<F32::Vector, U32::Vector>(y.v[i], r.v[i]);
  put_halves<false, true>(p, upper);
  return truncated(upper);
}

template <class C>
FUSEDACCUM_INLINE F32 store_stochastic(FP16* p, const Pack<C>& x, const U32& r) {
  const F32 y = narrow(x);
  U32 bits;
  FUSEDACCUM_UNROLL
  for (int i = 0; i < F32::kCount; ++i) bits.v[i] = float_to_fp16_stochastic<F32::Vector, U32::Vector>(y.v[i], r.v[i]);
  put_halves<false, false>(p, bits);
  return load(p);
}

FUSEDACCUM_INLINE void finish_streaming() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// -- random numbers ----------------------------------------------------------------------------------------------------

struct MultiplyVectors {
  FUSEDACCUM_INLINE void operator()(const U32::Vector& a, uint32_t b, U32::Vector& high, U32::Vector& low) const {
#if defined(__AVX512F__)
    const __m512i factor = _mm512_set1_epi32(static_cast<int>(b));
    const __m512i even = _mm512_mul_epu32((__m512i)a, factor), odd = _mm512_mul_epu32(_mm512_srli_epi64((__m512i)a, 32), factor);
    high = (U32::Vector)_mm512_mask_mov_epi32(_mm512_srli_epi64(even, 32), 0xaaaa, odd);
    low = (U32::Vector)_mm512_mask_mov_epi32(even, 0xaaaa, _mm512_slli_epi64(odd, 32));
#elif defined(__AVX2__)
    const __m256i factor = _mm256_set1_epi32(static_cast<int>(b));
    const __m256i even = _mm256_mul_epu32((__m256i)a, factor), odd = _mm256_mul_epu32(_mm256_srli_epi64((__m256i)a, 32), factor);
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

// The 8 * kWidth numbers of the kWidth blocks from `block` on. A register's word vectors come out of Philox with a block in each
// position; transposed within 128 bits they are whole blocks, in the order of their numbers if the positions are dealt out so:
FUSEDACCUM_INLINE void draw(uint64_t block, uint64_t seed, uint16_t* numbers) {
  constexpr int kBlocks = U32::kWidth, kQuarters = kBlocks / 4;
  U32::Vector words[4] = {};
  FUSEDACCUM_UNROLL
  for (int i = 0; i < kBlocks; ++i) {
    const uint64_t b = (block + static_cast<uint64_t>(kQuarters * (i % 4) + i / 4)) & 0x1fffffffffffffffu;  // n is modulo 2^64
    words[0][i] = static_cast<uint32_t>(b);
    words[1][i] = static_cast<uint32_t>(b >> 32);
  }
  philox4x32<MultiplyVectors>(words, seed);
#if defined(__AVX512F__)
  const __m512i a = _mm512_unpacklo_epi32((__m512i)words[0], (__m512i)words[1]), b = _mm512_unpacklo_epi32((__m512i)words[2], (__m512i)words[3]);
  const __m512i c = _mm512_unpackhi_epi32((__m512i)words[0], (__m512i)words[1]), d = _mm512_unpackhi_epi32((__m512i)words[2], (__m512i)words[3]);
  const __m512i rows[4] = {_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b), _mm512_unpacklo_epi64(c, d), _mm512_unpackhi_epi64(c, d)};
  memcpy(numbers, rows, sizeof(rows));
#elif defined(__AVX2__)
  const __m256i a = _mm256_unpacklo_epi32((__m256i)words[0], (__m256i)words[1]), b = _mm256_unpacklo_epi32((__m256i)words[2], (__m256i)words[3]);
  const __m256i c = _mm256_unpackhi_epi32((__m256i)words[0], (__m256i)words[1]), d = _mm256_unpackhi_epi32((__m256i)words[2], (__m256i)words[3]);
  const __m256i rows[4] = {_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b), _mm256_unpacklo_epi64(c, d), _mm256_unpackhi_epi64(c, d)};
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

}  // namespace FUSEDACCUM_ISA
}  // namespace cpu
}  // namespace fusedaccum
