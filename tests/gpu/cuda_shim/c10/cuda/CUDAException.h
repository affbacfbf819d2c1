// Stands in for PyTorch's header, as all in this folder: for tests of csrc/bindings_cuda.cpp on CPU
// tensors.
#pragma once

#include <c10/util/Exception.h>

#define C10_CUDA_CHECK(result) TORCH_CHECK((result) == cudaSuccess, "CUDA error")
