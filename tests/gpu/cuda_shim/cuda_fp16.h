// A stand-in for CUDA's header: the conversions that csrc/cuda uses, done by this machine's processor.
#pragma once

#include <cstdint>
#include <cstring>

struct __half {
  _Float16 value;
};

inline __half __ushort_as_half(uint16_t bits) {
  __half half;
  std::memcpy(&half, &bits, sizeof(half));
  return half;
}
inline uint16_t __half_as_ushort(__half half) {
  uint16_t bits;
  std::memcpy(&bits, &half, sizeof(bits));
  return bits;
}
inline float __half2float(__half half) { return static_cast<float>(half.value); }
inline __half __float2half_rn(float x) { return {static_cast<_Float16>(x)}; }
