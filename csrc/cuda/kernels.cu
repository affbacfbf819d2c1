// Launches the kernels, which nvcc compiles here, through CUDA's runtime.
#include <cuda_runtime_api.h>

#include "kernels.inc.h"

namespace fusedaccum {
namespace cuda {
namespace {

static_assert(CUDART_VERSION >= kDriver, "the kernels' arguments need a newer toolkit");

using Kernel = void (*)(Batch);

template <class Out, class In, bool kOverwrite>
Kernel write_kernel_for(bool stochastic, bool stats) {
  if constexpr (sizeof(Out) == 2) {
    if (stochastic)
      return stats ? write_kernel<Out, In, kOverwrite, true, true> : write_kernel<Out, In, kOverwrite, true, false>;
  }
  return stats ? write_kernel<Out, In, kOverwrite, false, true> : write_kernel<Out, In, kOverwrite, false, false>;
}

template <class Out, class In>
Kernel write_kernel_for(const Call& call) {
  const bool overwrite = call.op == Op::kCast || call.overwrite, stats = call.partials != nullptr;
  return overwrite ? write_kernel_for<Out, In, true>(call.stochastic, stats)
                   : write_kernel_for<Out, In, false>(call.stochastic, stats);
}

template <class Low, class Other>
Kernel parts_kernel_for(const Call& call) {
  const bool stats = call.partials != nullptr;
  switch (call.op) {
    case Op::kAccumulate:
      if (call.overwrite) {
        return stats ? parts_kernel<Op::kAccumulate, Low, Other, true, true>
                     : parts_kernel<Op::kAccumulate, Low, Other, true, false>;
      }
      return stats ? parts_kernel<Op::kAccumulate, Low, Other, false, true>
                   : parts_kernel<Op::kAccumulate, Low, Other, false, false>;
    case Op::kCast:
      return stats ? parts_kernel<Op::kCast, Low, Other, true, true> : parts_kernel<Op::kCast, Low, Other, true, false>;
    case Op::kScale:
      return stats ? parts_kernel<Op::kScale, Low, BF16, true, true> : parts_kernel<Op::kScale, Low, BF16, true, false>;
    default:
      return parts_kernel<Op::kStats, Low, BF16, true, true>;
  }
}

template <class Low>
Kernel parts_kernel_for(const Call& call, bool beside_fp32) {
  return beside_fp32 ? parts_kernel_for<Low, float>(call) : parts_kernel_for<Low, BF16>(call);
}

Kernel kernel_for(DType out, DType in, const Call& call) {
  if (call.low != kNoLow) {
    const bool beside_fp32 = out == kF32 || in == kF32;
    return call.low == kInt8 ? parts_kernel_for<int8_t>(call, beside_fp32)
                             : parts_kernel_for<int16_t>(call, beside_fp32);
  }
  using KernelFor = Kernel (*)(const Call&);
  static constexpr KernelFor kWrite[kDTypes][kDTypes] = {
      // [out][in]
      {write_kernel_for<double, double>, write_kernel_for<double, float>, write_kernel_for<double, BF16>,
       write_kernel_for<double, FP16>},
      {write_kernel_for<float, double>, write_kernel_for<float, float>, write_kernel_for<float, BF16>,
       write_kernel_for<float, FP16>},
      {write_kernel_for<BF16, double>, write_kernel_for<BF16, float>, write_kernel_for<BF16, BF16>,
       write_kernel_for<BF16, FP16>},
      {write_kernel_for<FP16, double>, write_kernel_for<FP16, float>, write_kernel_for<FP16, BF16>,
       write_kernel_for<FP16, FP16>},
  };
  static constexpr Kernel kStats[kDTypes] = {stats_kernel<double>, stats_kernel<float>, stats_kernel<BF16>,
                                             stats_kernel<FP16>};
  if (call.op == Op::kStats) return kStats[in];
  return kWrite[out][in](call);
}

}  // namespace

int run(const Pair* pairs, std::size_t count, DType out, DType in, const Call& call, void* stream) {
  const Kernel kernel = kernel_for(out, in, call);
  return in_batches(pairs, count, call, [&](Batch& batch, uint32_t blocks) {
    void* arguments[] = {&batch};
    return cudaLaunchKernel(kernel, dim3(blocks), dim3(threads_of(out, call)), arguments, 0,
                            static_cast<cudaStream_t>(stream));
  });
}

int add_up(AddUp work, void* stream) {
  void* arguments[] = {&work};
  return cudaLaunchKernel(add_up_kernel, dim3(1), dim3(kAddUpThreads), arguments, 0, static_cast<cudaStream_t>(stream));
}

}  // namespace cuda
}  // namespace fusedaccum
