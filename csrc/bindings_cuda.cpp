// The extension fusedaccum._cuda whose kernels nvcc has compiled; CUDA's runtime launches them.
#include "bindings_cuda.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

namespace fusedaccum {
namespace cuda {
namespace {

class Launcher {
 public:
  explicit Launcher(c10::Device device) : guard_(device), stream_(c10::cuda::getCurrentCUDAStream()) {}
  void prepare(DType, DType, const Call&) {}
  void run(const std::vector<Pair>& pairs, DType out, DType in, const Call& call) {
    check(cuda::run(pairs.data(), pairs.size(), out, in, call, stream_));
  }
  void add_up(const AddUp& work) { check(cuda::add_up(work, stream_)); }

  static int driver() {
    int version = 0;
    return cudaDriverGetVersion(&version) == cudaSuccess ? version : 0;
  }

 private:
  static void check(int error) { C10_CUDA_CHECK(static_cast<cudaError_t>(error)); }

  c10::cuda::CUDAGuard guard_;
  cudaStream_t stream_;
};

}  // namespace
}  // namespace cuda
}  // namespace fusedaccum

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { fusedaccum::cuda::define<fusedaccum::cuda::Launcher>(m); }
