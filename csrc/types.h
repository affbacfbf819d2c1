// What the launchers of all kernels have in common. No torch.
#pragma once

#include <cstdint>

namespace fusedaccum {

enum DType : int { kF64, kF32, kBF16, kFP16, kDTypes };

// What a number has beside a BF16.
enum LowParts : int { kInt8, kInt16, kLowParts, kNoLow = kLowParts };

enum class Op : int {
  kAccumulate,
  kCast,
  kStats,
  kScale,
  kOps
};  // kScale: of numbers in two parts; others are cast in place

// Statistics of a chunk, or of a call: the squares of what was written or, by kStats, read, and
// what among it is not finite (of kAccumulate: what is not finite among the contributions).
struct Partial {
  double sq_norm;
  int64_t nonfinite;
};

}  // namespace fusedaccum
