// What a caller of the CUDA kernels knows of them. No torch.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../types.h"

namespace fusedaccum {
namespace cuda {

// A number that the host has, or that a kernel finds in device memory (so that no one waits for
// it).
struct Scalar {
  double host = 0.0;
  const float* device_f32 = nullptr;
  const double* device_f64 = nullptr;
};

struct Pair {
  void* out;
  const void* in;  // equal to out for scale; what stats reads
  int64_t elements;
  uint64_t
      counter;  // index of the output's first random number or, of numbers in two parts, where their low parts begin
};

struct Call {
  Op op = Op::kAccumulate;
  bool overwrite = false;   // of kAccumulate
  bool stochastic = false;  // round 16-bit outputs of kAccumulate stochastically; wider ones are never
  Scalar scale;
  Scalar decay;
  uint64_t seed = 0;
  Partial* partials = nullptr;  // device memory, one per block of the pairs; null for no statistics
  LowParts low = kNoLow;        // of the outputs or, for kCast, of the inputs
};

// Where add_up_kernel finds the partials, and leaves their sum.
struct AddUp {
  const Partial* partials;
  int64_t count;
  double* sq_norm;
  int64_t* nonfinite;
};

// The CUDA version, of toolkit and driver, since which a kernel's arguments may take 32,764 bytes;
// before, 4,096.
constexpr int kDriver = 12010;

constexpr int64_t kChunk = 8192;  // elements per block: docs/performance.md

inline int64_t blocks_of(int64_t elements) { return (elements + kChunk - 1) / kChunk; }

// With the kernels of nvcc, on the current device, and a cudaStream_t; they only start the work,
// and return a cudaError_t. The op over pairs of one dtype combination (kStats: of `in`'s).
int run(const Pair* pairs, std::size_t count, DType out, DType in, const Call& call, void* stream);

// Adds up partials, in an order that depends on their number alone.
int add_up(AddUp work, void* stream);

}  // namespace cuda
}  // namespace fusedaccum
