// A stand-in for CUDA's header: rounding to BF16, nearest even, by the definition. A NaN's bits are those of CUDA.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

struct __nv_bfloat16 {
  uint16_t bits;
};

inline uint16_t __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }

inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  if (std::isnan(x)) return {0x7fff};
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const uint32_t below = bits >> 16, lost = bits & 0xffff;  // the neighbour towards zero, and the distance to it: 0x8000 is half way
  const bool up = lost > 0x8000 || (lost == 0x8000 && below % 2 == 1);
  return {static_cast<uint16_t>(below + up)};
}
