// What the launchers of all kernels have in common. No torch.
#pragma once

#include <cstdint>

namespace fusedaccum {

enum DType : int { kF64, kF32, kBF16, kFP16, kDTypes };

enum class Op : int { kAccumulate, kCast, kStats };

// Statistics of a chunk, or of a call: the squares of what was written or, by kStats, read, and what among it is not finite (of
// kAccumulate: what is not finite among the contributions).
struct Partial {
  double sq_norm;
  int64_t nonfinite;
};

}  // namespace fusedaccum
