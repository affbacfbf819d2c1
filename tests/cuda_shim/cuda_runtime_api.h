// A stand-in for CUDA's header: enough of it to run csrc/cuda/accumulate.cu on the CPU, one thread after the other. For tests only.
#pragma once

#include <cstddef>

#define CUDART_VERSION 13000
#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(threads)

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct dim3 {
  explicit dim3(unsigned count = 0) : x(count) {}
  unsigned x;
};
using cudaStream_t = void*;
enum cudaError_t { cudaSuccess };

inline dim3 blockIdx, threadIdx;
inline int launches = 0;

template <class Batch>
cudaError_t cudaLaunchKernel(void (*kernel)(Batch), dim3 grid, dim3 block, void** arguments, std::size_t, cudaStream_t) {
  ++launches;
  for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) {
    for (threadIdx.x = 0; threadIdx.x < block.x; ++threadIdx.x) kernel(*static_cast<Batch*>(arguments[0]));
  }
  return cudaSuccess;
}
