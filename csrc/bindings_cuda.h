// Lists of tensors in, launches of the CUDA kernels out: for both ways to launch them. Never waits
// for the device.
//
// Launcher(device): on the device, and its current stream, as long as it lives. prepare(out, in,
// call), which comes before anything is written and with the GIL held, makes the kernel for these
// dtypes ready; run(pairs, out, in, call) and add_up(work) launch.
#pragma once

#include <ATen/ops/empty.h>

#include <array>
#include <vector>

#include "bindings_ops.h"
#include "cuda/kernels.h"

namespace fusedaccum {
namespace cuda {

// A float, or a 0-d tensor on the device; `kept` keeps what the kernel reads alive until it is
// launched (after that, the stream does). It is a copy if the tensor is an element of an output:
// some blocks would read what others had written.
inline Scalar scalar_of(pybind11::handle value, const Lists& lists, at::Tensor& kept) {
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
template <class Launcher>
void run_lists(const Lists& lists, const Request<pybind11::handle>& request) {
  const Tensors &outs = lists.outs(), &ins = lists.ins();
  if (outs.empty()) return;
  at::Tensor kept_scale, kept_decay;
  const Scalar scale = scalar_of(request.scale, lists, kept_scale), decay = scalar_of(request.decay, lists, kept_decay);
  Call call{request.op, request.overwrite, request.stochastic, scale, decay, request.seed, nullptr, lists.low_parts()};
  Launcher launcher(outs[0]->device());
  const Statistics& stats = request.stats;
  at::Tensor partials;  // the blocks' statistics, allocated before anything is launched
  int64_t blocks = 0;
  if (stats.wanted()) {
    for (const at::Tensor* x : outs) blocks += blocks_of(x->numel());
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
      if (place->empty()) {
        launcher.prepare(dtype_of(out), dtype_of(in), call);
        place->reserve(outs.size() - k);
      }
    }
    if (call.op != Op::kStats) bump_version(out);
    uint64_t counter = request.counters.empty() ? 0 : request.counters[k];
    if (call.low != kNoLow) counter = reinterpret_cast<uintptr_t>(lists.low(k));
    place->push_back({lists.written(k), lists.read(k), out.numel(), counter});
  }
  lists.bump_low(call.op);
  pybind11::gil_scoped_release unlocked;
  for (int out = 0; out < kDTypes; ++out) {
    for (int in = 0; in < kDTypes; ++in) {
      const auto& group = pairs[out][in];
      if (group.empty()) continue;
      launcher.run(group, static_cast<DType>(out), static_cast<DType>(in), call);
      if (!stats.wanted()) continue;
      for (const Pair& pair : group) call.partials += blocks_of(pair.elements);
    }
  }
  if (!stats.wanted()) return;
  launcher.add_up(
      {first_partial, blocks, stats.sq_norm.mutable_data_ptr<double>(), stats.nonfinite.mutable_data_ptr<int64_t>()});
}

template <class Launcher>
void define(pybind11::module_& m) {
  define_ops(m, run_lists<Launcher>);
  m.attr("TAKES_LOW") = true;
  m.attr("NEEDS_DRIVER") = kDriver;
  m.def("driver", &Launcher::driver, "the CUDA version that the driver is for, 12010 for 12.1; 0 if there is none");
}

}  // namespace cuda
}  // namespace fusedaccum
