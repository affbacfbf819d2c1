// csrc/cuda/kernels.cu itself, behind a C function that ctypes can call.
#include "../../../csrc/cuda/kernels.cu"

namespace cuda = fusedaccum::cuda;

// Runs an op, and adds up its statistics unless `sq_norm` is null. Returns the number of launches
// that wrote. With low parts (0: int8, 1: int16), a pair's counter is where they begin.
extern "C" int run_parts(int low, int op, const cuda::Pair* pairs, std::size_t count, int out, int in,
                         const double* scale, bool scale_on_device, double decay, bool overwrite, bool stochastic,
                         uint64_t seed, double* sq_norm, int64_t* nonfinite) {
  cuda::Call call;
  call.low = static_cast<fusedaccum::LowParts>(low);
  call.op = static_cast<fusedaccum::Op>(op);
  call.overwrite = overwrite;
  call.stochastic = stochastic;
  call.seed = seed;
  call.decay.host = decay;
  if (scale_on_device) {
    call.scale.device_f64 = scale;
  } else {
    call.scale.host = *scale;
  }
  int64_t blocks = 0;
  for (std::size_t k = 0; k < count; ++k) blocks += cuda::blocks_of(pairs[k].elements);
  std::vector<fusedaccum::Partial> partials(static_cast<std::size_t>(blocks), {__builtin_nan(""), -1});
  if (sq_norm != nullptr) call.partials = partials.data();
  launches = 0;
  cuda::run(pairs, count, static_cast<fusedaccum::DType>(out), static_cast<fusedaccum::DType>(in), call, nullptr);
  const int written = launches;
  if (sq_norm != nullptr) cuda::add_up({partials.data(), blocks, sq_norm, nonfinite}, nullptr);
  return written;
}

extern "C" int run(int op, const cuda::Pair* pairs, std::size_t count, int out, int in, const double* scale,
                   bool scale_on_device, double decay, bool overwrite, bool stochastic, uint64_t seed, double* sq_norm,
                   int64_t* nonfinite) {
  return run_parts(fusedaccum::kNoLow, op, pairs, count, out, in, scale, scale_on_device, decay, overwrite, stochastic,
                   seed, sq_norm, nonfinite);
}
