// How elements lie in memory, and how they move: dtypes, their way into and out of the type that is
// computed in, packs of 16 bytes.
#pragma once

#include "../formulas.h"

namespace fusedaccum {
namespace cuda {

#define FUSEDACCUM_DEVICE __device__ __forceinline__

struct BF16 {
  uint16_t bits;
};
struct FP16 {
  uint16_t bits;
};

// The processor's conversions, to nearest even. NVRTC has no header with them. The text is that of
// nvcc's headers, braces and all: nvcc judges by it how long a loop is, and unrolls fewer
// otherwise.
#if defined(__CUDACC__)
FUSEDACCUM_DEVICE float fp16_to_fp32(uint16_t x) {
  float y;
  asm("{  cvt.f32.f16 %0, %1;}\n" : "=f"(y) : "h"(x));
  return y;
}
FUSEDACCUM_DEVICE uint16_t fp32_to_fp16(float x) {
  uint16_t y;
  asm("{  cvt.rn.f16.f32 %0, %1;}\n" : "=h"(y) : "f"(x));
  return y;
}
FUSEDACCUM_DEVICE uint16_t fp32_to_bf16(float x) {
#if __CUDA_ARCH__ >= 800
  uint16_t y;
  asm("{  cvt.rn.bf16.f32 %0, %1;}\n" : "=h"(y) : "f"(x));
  return y;
#else
  return static_cast<uint16_t>(float_to_bf16_upper<float, uint32_t>(x) >> 16);
#endif
}
#endif

FUSEDACCUM_DEVICE double widened(double x) { return x; }
FUSEDACCUM_DEVICE float widened(float x) { return x; }
FUSEDACCUM_DEVICE float widened(BF16 x) { return bitcast<float>(uint32_t{x.bits} << 16); }
FUSEDACCUM_DEVICE float widened(FP16 x) { return fp16_to_fp32(x.bits); }

// To nearest even and to FP32 as the processor does it. formulas.h gives the same bits (of NaNs,
// too, only that they are NaNs), but in so many integer operations that they, not memory, would set
// the pace.
template <class Out>
struct Rounded {  // to FP64 and FP32
  static FUSEDACCUM_DEVICE Out nearest(double x) { return static_cast<Out>(x); }
  static FUSEDACCUM_DEVICE Out nearest(float x) { return static_cast<Out>(x); }
};
template <>
struct Rounded<BF16> {  // from FP64 by way of FP32
  static FUSEDACCUM_DEVICE BF16 nearest(float x) { return {fp32_to_bf16(x)}; }
  static FUSEDACCUM_DEVICE BF16 stochastic(float x, uint32_t r) {
    return {static_cast<uint16_t>(float_to_bf16_upper_stochastic(x, r) >> 16)};
  }
};
template <>
struct Rounded<FP16> {
  static FUSEDACCUM_DEVICE FP16 nearest(float x) { return {fp32_to_fp16(x)}; }
  static FUSEDACCUM_DEVICE FP16 stochastic(float x, uint32_t r) {
    const auto nearest_of = [](float y) { return uint32_t{nearest(y).bits}; };
    return {static_cast<uint16_t>(float_to_fp16_stochastic(x, r, nearest_of))};
  }
};

// A number in two parts, and back. formulas.h says what they are.
template <class Low>
constexpr int kShift = sizeof(Low) == 1 ? 8 : 0;
template <class Low>
FUSEDACCUM_DEVICE float joined(BF16 h, Low low) {
  const auto part = static_cast<uint32_t>(static_cast<int32_t>(low)) << kShift<Low>;
  return bitcast<float>(parts_to_word<kShift<Low>>(uint32_t{h.bits} << 16, part));
}
// Returns the number that the parts make.
template <class Low>
FUSEDACCUM_DEVICE float split(float x, BF16& h, Low& low) {
  const auto word = float_to_parts<kShift<Low>, true, float, uint32_t>(x);
  h.bits = static_cast<uint16_t>((word + 0x8000u) >> 16);
  low = static_cast<Low>(word >> kShift<Low>);
  return bitcast<float>(sizeof(Low) == 1 ? word & 0xffffff00u : word);
}

// What a thread moves at a time: 16 bytes of the wider side, and as many elements of the other.
// Neighbouring threads then touch neighbouring memory on both sides. With 16 bytes of the narrower
// one, the wider would be stored half a 32-byte sector at a time.
template <class Out, class In>
constexpr int kPack = 16 / static_cast<int>(sizeof(Out) > sizeof(In) ? sizeof(Out) : sizeof(In));

template <int kBytes>
struct Word;
template <>
struct Word<16> {
  using type = uint4;
};
template <>
struct Word<8> {
  using type = uint2;
};
template <>
struct Word<4> {
  using type = uint32_t;
};

// A plain store, which the compiler would take apart where it has computed the elements one by one.
// (__stwb() is stronger than a plain one: its stores are ordered within the multiprocessor.)
#if defined(__CUDACC__)
FUSEDACCUM_DEVICE void store_whole(uint4* to, uint4 x) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}
FUSEDACCUM_DEVICE void store_whole(uint2* to, uint2 x) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(x.x), "r"(x.y) : "memory");
}
FUSEDACCUM_DEVICE void store_whole(uint32_t* to, uint32_t x) {
  asm volatile("st.global.b32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}
#endif

template <class T, int kCount>
struct alignas(kCount * sizeof(T)) Pack {
  using Whole = typename Word<kCount * sizeof(T)>::type;
  T x[kCount];

  FUSEDACCUM_DEVICE void load(const T* from) { *reinterpret_cast<Whole*>(x) = *reinterpret_cast<const Whole*>(from); }
  FUSEDACCUM_DEVICE void store(T* to) const {
    store_whole(reinterpret_cast<Whole*>(to), *reinterpret_cast<const Whole*>(x));
  }

  // The first `valid` elements, one by one; the others become 0.
  FUSEDACCUM_DEVICE void load(const T* from, int valid) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = i < valid ? from[i] : T{};
  }
  FUSEDACCUM_DEVICE void store(T* to, int valid) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i < valid) to[i] = x[i];
    }
  }
};

template <int kCount, class T>
FUSEDACCUM_DEVICE bool is_aligned(const T* p) {
  return reinterpret_cast<uintptr_t>(p) % sizeof(Pack<T, kCount>) == 0;
}

// The random numbers n to n + kCount - 1, n being a multiple of kCount: they lie in one block of 8,
// as one half or quarter of it, or all. That part is taken by halving the block, because words[n /
// 2 % 4] would put the words into local memory.
template <int kCount>
FUSEDACCUM_DEVICE void draw(uint64_t n, uint64_t seed, uint32_t (&numbers)[kCount]) {
  uint32_t words[4];
  random_block(n >> 3, seed, words);
#pragma unroll
  for (int half = 4; half >= kCount; half /= 2) {  // numbers in a half of what is left, which may be the upper one
#pragma unroll
    for (int i = 0; i < half / 2; ++i) words[i] = (n & half) != 0 ? words[i + half / 2] : words[i];
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) numbers[i] = (words[i / 2] >> (16 * (i % 2))) & 0xffffu;
}

}  // namespace cuda
}  // namespace fusedaccum
