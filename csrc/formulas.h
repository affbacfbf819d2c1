// Every formula of fusedaccum, once. Plain C++17, for host and device; knows neither torch nor
// dtype dispatch.
//
// Templates take scalars and, on the host, GCC/Clang vectors alike: V is float or double or a
// vector of them, U is uint32_t or a vector of it. Compile with -ffp-contract=off (device:
// -fmad=false): a product is rounded before it is added, so that every backend gives the same bits.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__CUDACC__)
#define FUSEDACCUM_HD __host__ __device__ __forceinline__
#else
#define FUSEDACCUM_HD inline __attribute__((always_inline))
#endif

namespace fusedaccum {

template <class To, class From>
FUSEDACCUM_HD To bitcast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bitcast needs equal sizes");
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

// The type that an op computes in: FP64 if one of its sides is, else FP32.
template <class Out, class In>
using Compute = std::conditional_t<std::is_same_v<Out, double> || std::is_same_v<In, double>, double, float>;

// -- the ops --------------------------------------------------------------------------------------

// t = grad * scale. If scale == 0, the caller passes zeros for grad: then nothing is added,
// whatever the gradient holds.
template <class V>
FUSEDACCUM_HD V contribution(V grad, V scale) {
  return grad * scale;
}

// new = buffer * decay + t
template <class V>
FUSEDACCUM_HD V accumulated(V buffer, V decay, V t) {
  return buffer * decay + t;
}

// -- 16-bit formats -------------------------------------------------------------------------------
//
// FP16 is in the low half of a 32-bit word, BF16 in its upper half (its float, to be truncated).

// Nearest even; NaN becomes the quiet NaN 0x7fc0. The bits stay in the upper half: that is where
// some vectors pack them from.
template <class V, class U>
FUSEDACCUM_HD U float_to_bf16_upper(V x) {
  const U f = bitcast<U>(x);
  return x != x ? (f & 0u) + 0x7fc00000u : f + (0x7fffu + ((f >> 16) & 1u));
}

// After M. Dukhan's FP16 library, as PyTorch's own software conversion.
template <class V, class U>
FUSEDACCUM_HD V fp16_to_float(U h) {
  const U w = h << 16;
  const U twice = w + w;  // without the sign
  const V normal = bitcast<V>((twice >> 4) + 0x70000000u) * 0x1.0p-112f;
  const V subnormal = bitcast<V>((twice >> 17) | 0x3f000000u) - 0.5f;
  return bitcast<V>((w & 0x80000000u) | (twice < 0x08000000u ? bitcast<U>(subnormal) : bitcast<U>(normal)));
}

// Nearest even; NaN becomes the quiet NaN 0x7e00. Rounds by adding a power of two that pushes the
// bits to drop off the end.
template <class V, class U>
FUSEDACCUM_HD U float_to_fp16(V x) {
  const U w = bitcast<U>(x);
  const U twice = w + w;
  const V base = (bitcast<V>(w & 0x7fffffffu) * 0x1.0p+112f) * 0x1.0p-110f;  // overflows to infinity where fp16 does
  const U exponent = twice & 0xff000000u;
  const U bias = exponent < 0x71000000u ? (w & 0u) + 0x71000000u : exponent;
  const U bits = bitcast<U>(bitcast<V>((bias >> 1) + 0x07800000u) + base);
  const U magnitude = ((bits >> 13) & 0x7c00u) + (bits & 0x0fffu);
  return ((w & 0x80000000u) >> 16) | (twice > 0xff000000u ? (w & 0u) + 0x7e00u : magnitude);
}

// -- numbers in two parts -------------------------------------------------------------------------
//
// A number's word W is (h << 16) + (low << kShift): h has the bits of a BF16, low is an integer of
// 8 bits (kShift 8, numbers of 24 bits) or of 16 (kShift 0, FP32 numbers). h is the upper half of W
// + 0x8000, low begins at bit kShift of W. In 24-bit words, bits 0 to 7 mean nothing.

// The sum of both parts of a word, `upper` being h << 16, `part` the low part, sign-extended, <<
// kShift. Where other code has written 0 or, beside 8 bits, infinity to h alone, a low part that
// was left there must not make that a NaN or a number: if negative, it is 0.
template <int kShift, class U>
FUSEDACCUM_HD U parts_to_word(U upper, U part) {
  const U twice = upper + upper;  // without the sign
  const U clamped = part & ((part >> 31) - 1u);
  if constexpr (kShift == 8) {
    return upper + (twice + 0x01000000u <= 0x01000000u ? clamped : part);  // also where h is NaN, and stays that
  } else {
    return upper + (twice == 0u ? clamped : part);
  }
}

// The word of a number: of 24 bits, the nearest, ties to even, and infinity where h would be
// infinite. NaN becomes 0x7fc00000. Without kCareful, x is neither NaN nor as large as that.
template <int kShift, bool kCareful, class V, class U>
FUSEDACCUM_HD U float_to_parts(V x) {
  const U f = bitcast<U>(x);
  U word = f;
  if constexpr (kShift == 8) word = f + (0x7fu + ((f >> 8) & 1u));
  if constexpr (kShift == 8 && kCareful) word = f + f >= 0xfefeff00u ? (f & 0x80000000u) | 0x7f800000u : word;
  if constexpr (kCareful) word = x != x ? (f & 0u) + 0x7fc00000u : word;
  return word;
}

// The same on halves of words, side by side in vectors H of uint16_t, of numbers of which none is
// NaN, infinite, about to be rounded to infinity, or a zero with a negative low part.
template <int kShift, class H>
FUSEDACCUM_HD void parts_to_halves(H h, H low, H& upper, H& lower) {
  lower = low << kShift;
  upper = h - (lower >> 15);
}

// The h of a word, whose lower half is rounded at bit kShift. If that carries into the upper half,
// bit 15 was set before, and is not after.
template <int kShift, class H>
FUSEDACCUM_HD H halves_to_h(H upper, H& lower) {
  const H unrounded = lower;
  if constexpr (kShift == 8) lower = lower + (0x7f + ((lower >> 8) & 1));
  return upper + ((unrounded | lower) >> 15);
}

// The nearest BF16, ties to even.
template <class H>
FUSEDACCUM_HD H halves_to_bf16(H upper, H lower) {
  const H up = (lower | (upper & 1)) > 0x8000;  // 0 or -1
  return upper - up;
}

// -- stochastic rounding --------------------------------------------------------------------------
// r is a 16-bit random number; only the two neighbours of x can come out, the upper with
// probability = distance to the lower. nearest_of(x) is x as FP16 in whatever way is the cheapest
// where this runs.

template <class V, class U>
FUSEDACCUM_HD U float_to_bf16_upper_stochastic(V x, U r) {
  const U f = bitcast<U>(x);
  return (f & 0x7f800000u) == 0x7f800000u ? float_to_bf16_upper<V, U>(x) : f + r;
}

template <class V, class U, class Nearest>
FUSEDACCUM_HD U float_to_fp16_stochastic(V x, U r, Nearest nearest_of) {
  const U f = bitcast<U>(x);
  const U magnitude = f & 0x7fffffffu;
  // Normal range: 13 bits fall away. What is left has an fp16 of its own, or is 65536, which
  // becomes infinity.
  const U truncated = magnitude >= 0x7f800000u ? f : (f + (r >> 3)) & ~0x1fffu;
  const U normal = nearest_of(bitcast<V>(truncated));
  // Below 2^-14: the grid of the subnormals, steps of 2^-24. Adding 2^23 rounds to an integer and
  // leaves it in the low bits.
  const V y = bitcast<V>(magnitude) * 0x1.0p+24f;
  const V nearest = (y + 0x1.0p+23f) - 0x1.0p+23f;
  const V floor = nearest > y ? nearest - 1.0f : nearest;
  const V draw = bitcast<V>(r | 0x4b000000u) - 0x1.0p+23f;
  const V grid = draw < (y - floor) * 65536.0f ? floor + 1.0f : floor;
  const U subnormal = ((f & 0x80000000u) >> 16) | (bitcast<U>(grid + 0x1.0p+23f) & 0x7ffu);
  return magnitude < 0x38800000u ? subnormal : normal;
}

// Both words of a 32 x 32 bit product; vectors bring their own.
struct Multiply32 {
  FUSEDACCUM_HD void operator()(uint32_t a, uint32_t b, uint32_t& high, uint32_t& low) const {
    const uint64_t product = uint64_t{a} * b;
    high = static_cast<uint32_t>(product >> 32);
    low = static_cast<uint32_t>(product);
  }
};

// Philox4x32-10 (Salmon et al. 2011): four counter words in, four random words out.
template <class Multiply, class U>
FUSEDACCUM_HD void philox4x32(U (&words)[4], uint64_t key) {
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    U high0, low0, high2, low2;
    Multiply()(words[0], 0xD2511F53u, high0, low0);
    Multiply()(words[2], 0xCD9E8D57u, high2, low2);
    words[0] = high2 ^ words[1] ^ k0;
    words[1] = low2;
    words[2] = high0 ^ words[3] ^ k1;
    words[3] = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
}

// Block `block` of 8 random numbers: its counter is (low word of block, high word of block, 0, 0),
// its key the seed.
FUSEDACCUM_HD void random_block(uint64_t block, uint64_t seed, uint32_t (&words)[4]) {
  words[0] = static_cast<uint32_t>(block);
  words[1] = static_cast<uint32_t>(block >> 32);
  words[2] = words[3] = 0;
  philox4x32<Multiply32>(words, seed);
}

// 16-bit random number n, counting modulo 2^64, is in block n >> 3: word (n & 7) >> 1 of it, low
// half first.
FUSEDACCUM_HD uint32_t random16(uint64_t n, uint64_t seed) {
  uint32_t words[4];
  random_block(n >> 3, seed, words);
  return (words[(n & 7) >> 1] >> (16 * (n & 1))) & 0xffffu;
}

}  // namespace fusedaccum
