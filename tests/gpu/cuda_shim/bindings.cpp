// The extension fusedaccum._cuda for CPU tensors: csrc/cuda/kernels.cu and csrc/bindings_cuda.cpp
// as they are, or BINDINGS with a fault.
#include "../../../csrc/cuda/kernels.cu"

inline cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

#include BINDINGS
