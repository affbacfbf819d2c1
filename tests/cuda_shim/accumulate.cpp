// csrc/cuda/accumulate.cu as it stands, behind a C function that ctypes can call. Returns the number of launches.
#include "../../csrc/cuda/accumulate.cu"

namespace cuda = fusedaccum::cuda;

extern "C" int accumulate(const cuda::Pair* pairs, std::size_t count, int buffer, int grad, const double* scale, bool scale_on_device,
                          double decay, bool overwrite, bool stochastic, uint64_t seed) {
  cuda::Call call;
  if (scale_on_device) {
    call.scale.device_f64 = scale;
  } else {
    call.scale.host = *scale;
  }
  call.decay.host = decay;
  call.overwrite = overwrite;
  call.stochastic = stochastic;
  call.seed = seed;
  launches = 0;
  cuda::accumulate(pairs, count, static_cast<cuda::DType>(buffer), static_cast<cuda::DType>(grad), call, nullptr);
  return launches;
}
