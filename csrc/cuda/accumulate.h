// What a caller of the CUDA accumulate knows of it. No torch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace fusedaccum {
namespace cuda {

enum DType : int { kF64, kF32, kBF16, kFP16, kDTypes };

// A number that the host has, or that a kernel finds in device memory (so that no one waits for it).
struct Scalar {
  double host = 0.0;
  const float* device_f32 = nullptr;
  const double* device_f64 = nullptr;
};

struct Pair {
  void* buffer;
  const void* grad;
  int64_t elements;
  uint64_t counter;  // index of the buffer's first random number
};

struct Call {
  Scalar scale;
  Scalar decay;
  bool overwrite = false;
  bool stochastic = false;  // round 16-bit buffers stochastically; wider ones are never
  uint64_t seed = 0;
};

// buffer = buffer * decay + grad * scale over pairs of one dtype combination, on the current device. Only starts the work.
cudaError_t accumulate(const Pair* pairs, std::size_t count, DType buffer, DType grad, const Call& call, cudaStream_t stream);

}  // namespace cuda
}  // namespace fusedaccum
