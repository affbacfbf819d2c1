// The extension fusedaccum._cuda: lists of tensors in, the CUDA launchers out. Never waits for the device.
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <array>
#include <vector>

#include "bindings_ops.h"
#include "cuda/kernels.h"

namespace py = pybind11;

namespace {

using fusedaccum::DType;
using fusedaccum::dtype_of;
using fusedaccum::kDTypes;
using fusedaccum::Lists;
using fusedaccum::Op;
using fusedaccum::Partial;
using fusedaccum::Request;
using fusedaccum::Statistics;
using fusedaccum::Tensors;
using fusedaccum::cuda::Call;
using fusedaccum::cuda::Pair;
using fusedaccum::cuda::Scalar;

// A float, or a 0-d tensor on the device; `kept` keeps what the kernel reads alive until it is launched (after that, the stream does).
// It is a copy if the tensor is an element of an output: some blocks would read what others had written.
Scalar scalar_of(py::handle value, const Lists& lists, at::Tensor& kept) {
  Scalar scalar;
  if (!value) return scalar;  // the op has no such number
  if (!THPVariable_Check(value.ptr())) {
    scalar.host = value.cast<double>();
    return scalar;
  }
  kept = THPVariable_Unpack(value.ptr());
  if (kept.scalar_type() == at::kFloat && !lists.writes(kept.const_data_ptr())) {
    scalar.device_f32 = kept.const_data_ptr<float>();
  } else {
    kept = kept.to(at::kDouble, /*non_blocking=*/false, /*copy=*/lists.writes(kept.const_data_ptr()));
    scalar.device_f64 = kept.const_data_ptr<double>();
  }
  return scalar;
}

// One launch (or a few, for thousands of tensors) for every combination of dtypes that occurs.
void run(const Lists& lists, const Request<py::handle>& request) {
  const Tensors &outs = lists.outs(), &ins = lists.ins();
  if (outs.empty()) return;
  at::Tensor kept_scale, kept_decay;
  const Scalar scale = scalar_of(request.scale, lists, kept_scale), decay = scalar_of(request.decay, lists, kept_decay);
  Call call{request.op, request.overwrite, request.stochastic, scale, decay, request.seed, nullptr, lists.low_parts()};
  const c10::cuda::CUDAGuard guard(outs[0]->device());
  const Statistics& stats = request.stats;
  at::Tensor partials;  // the blocks' statistics, allocated before anything is launched
  int64_t blocks = 0;
  if (stats.wanted()) {
    for (const at::Tensor* x : outs) blocks += fusedaccum::cuda::blocks_of(x->numel());
    partials = at::empty({blocks * static_cast<int64_t>(sizeof(Partial))}, stats.sq_norm.options().dtype(at::kByte));
    call.partials = static_cast<Partial*>(partials.mutable_data_ptr());
  }
  const Partial* first_partial = call.partials;

  std::array<std::array<std::vector<Pair>, kDTypes>, kDTypes> pairs;
  std::vector<Pair>* place = nullptr;  // of the pair before, whose dtypes are nearly always those of the next
  for (std::size_t k = 0; k < outs.size(); ++k) {
    const at::Tensor &out = *outs[k], &in = *ins[k];
    if (place == nullptr || out.dtype() != outs[k - 1]->dtype() || in.dtype() != ins[k - 1]->dtype()) {
      place = &pairs[dtype_of(out)][dtype_of(in)];
      if (place->empty()) place->reserve(outs.size() - k);
    }
    if (call.op != Op::kStats) fusedaccum::bump_version(out);
    uint64_t counter = request.counters.empty() ? 0 : request.counters[k];
    if (call.low != fusedaccum::kNoLow) counter = reinterpret_cast<uintptr_t>(lists.low(k));
    place->push_back({lists.written(k), lists.read(k), out.numel(), counter});
  }
  lists.bump_low(call.op);
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  py::gil_scoped_release unlocked;
  for (int out = 0; out < kDTypes; ++out) {
    for (int in = 0; in < kDTypes; ++in) {
      const auto& group = pairs[out][in];
      if (group.empty()) continue;
      C10_CUDA_CHECK(fusedaccum::cuda::run(group.data(), group.size(), static_cast<DType>(out), static_cast<DType>(in), call, stream));
      if (!stats.wanted()) continue;
      for (const Pair& pair : group) call.partials += fusedaccum::cuda::blocks_of(pair.elements);
    }
  }
  if (!stats.wanted()) return;
  C10_CUDA_CHECK(fusedaccum::cuda::add_up(first_partial, blocks, stats.sq_norm.mutable_data_ptr<double>(),
                                          stats.nonfinite.mutable_data_ptr<int64_t>(), stream));
}

int driver() {
  int version = 0;
  return cudaDriverGetVersion(&version) == cudaSuccess ? version : 0;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  fusedaccum::define_ops(m, run);
  m.attr("TAKES_LOW") = true;
  m.attr("NEEDS_DRIVER") = fusedaccum::cuda::kDriver;
  m.def("driver", &driver, "the CUDA version that the driver is for, 12010 for 12.1; 0 if there is none");
}
