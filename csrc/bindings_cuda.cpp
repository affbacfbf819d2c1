// The extension fusedaccum._cuda: lists of tensors in, the CUDA launchers out. A backend that CHECKS_LISTS, as
// fusedaccum/ops/backends.py has them. Never waits for the device.
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <array>
#include <optional>
#include <vector>

#include "cuda/kernels.h"
#include "tensor_list.h"

namespace py = pybind11;

namespace {

using fusedaccum::DType;
using fusedaccum::dtype_of;
using fusedaccum::kDTypes;
using fusedaccum::Lists;
using fusedaccum::Op;
using fusedaccum::Partial;
using fusedaccum::Tensors;
using fusedaccum::cuda::Call;
using fusedaccum::cuda::Pair;
using fusedaccum::cuda::Scalar;

// A float, or a 0-d tensor on the device; `kept` keeps what the kernel reads alive until it is launched (after that, the stream does).
// It is a copy if the tensor is an element of an output: some blocks would read what others had written.
Scalar scalar_of(py::handle value, const Lists& lists, at::Tensor& kept) {
  Scalar scalar;
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

// Where a call leaves its statistics, and the blocks' partial ones, which are allocated before anything is launched.
struct Statistics {
  at::Tensor sq_norm, nonfinite, partials;
  int64_t blocks = 0;

  Statistics(py::handle stats, const Tensors& tensors)
      : sq_norm(stats.attr("sq_norm").cast<at::Tensor>()), nonfinite(stats.attr("nonfinite").cast<at::Tensor>()) {
    for (const at::Tensor* x : tensors) blocks += fusedaccum::cuda::blocks_of(x->numel());
    partials = at::empty({blocks * static_cast<int64_t>(sizeof(Partial))}, sq_norm.options().dtype(at::kByte));
  }
  Partial* first() const { return static_cast<Partial*>(partials.mutable_data_ptr()); }
};

// One launch (or a few, for thousands of tensors) for every combination of dtypes that occurs.
int run(const Lists& lists, Call call, const std::vector<uint64_t>& counters, py::handle stats) {
  if (lists.verdict() != fusedaccum::kFlat || lists.outs().empty()) return lists.verdict();
  const Tensors &outs = lists.outs(), &ins = lists.ins();
  const c10::cuda::CUDAGuard guard(outs[0]->device());
  std::optional<Statistics> statistics;
  if (!stats.is_none()) call.partials = statistics.emplace(stats, outs).first();

  std::array<std::array<std::vector<Pair>, kDTypes>, kDTypes> pairs;
  std::vector<Pair>* place = nullptr;  // of the pair before, whose dtypes are nearly always those of the next
  for (std::size_t k = 0; k < outs.size(); ++k) {
    const at::Tensor &out = *outs[k], &in = *ins[k];
    if (place == nullptr || out.dtype() != outs[k - 1]->dtype() || in.dtype() != ins[k - 1]->dtype()) {
      place = &pairs[dtype_of(out)][dtype_of(in)];
      if (place->empty()) place->reserve(outs.size() - k);
    }
    if (call.op != Op::kStats) fusedaccum::bump_version(out);
    place->push_back({lists.written(k), lists.read(k), out.numel(), counters.empty() ? 0 : counters[k]});
  }
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  {
    py::gil_scoped_release unlocked;
    for (int out = 0; out < kDTypes; ++out) {
      for (int in = 0; in < kDTypes; ++in) {
        const auto& group = pairs[out][in];
        if (group.empty()) continue;
        C10_CUDA_CHECK(fusedaccum::cuda::run(group.data(), group.size(), static_cast<DType>(out), static_cast<DType>(in), call, stream));
        if (!statistics) continue;
        for (const Pair& pair : group) call.partials += fusedaccum::cuda::blocks_of(pair.elements);
      }
    }
    if (!statistics) return fusedaccum::kFlat;
    C10_CUDA_CHECK(fusedaccum::cuda::add_up(statistics->first(), statistics->blocks, statistics->sq_norm.mutable_data_ptr<double>(),
                                            statistics->nonfinite.mutable_data_ptr<int64_t>(), stream));
  }
  fusedaccum::bump_version(statistics->sq_norm);
  fusedaccum::bump_version(statistics->nonfinite);
  return fusedaccum::kFlat;
}

int accumulate(py::handle buffers, py::handle grads, py::handle scale, bool overwrite, py::handle decay, py::handle rounding,
               py::handle stats) {
  at::Tensor kept_scale, kept_decay;
  Call call;
  call.overwrite = overwrite;
  std::vector<uint64_t> counters;
  if (!rounding.is_none()) {
    call.stochastic = true;
    call.seed = rounding.attr("seed").cast<uint64_t>();
    counters = rounding.attr("counters").cast<std::vector<uint64_t>>();
  }
  const Lists lists(buffers, grads, true);
  call.scale = scalar_of(scale, lists, kept_scale);
  call.decay = scalar_of(decay, lists, kept_decay);
  return run(lists, call, counters, stats);
}

int cast_lists(const Lists& lists, py::handle scale, py::handle stats) {
  at::Tensor kept;
  Call call;
  call.op = Op::kCast;
  call.scale = scalar_of(scale, lists, kept);
  return run(lists, call, {}, stats);
}

int cast(py::handle outs, py::handle ins, py::handle scale, py::handle stats) { return cast_lists(Lists(outs, ins, true), scale, stats); }

int scale(py::handle tensors, py::handle factor, py::handle stats) { return cast_lists(Lists(tensors, true), factor, stats); }

int measure(py::handle tensors, py::handle into) {
  Call call;
  call.op = Op::kStats;
  return run(Lists(tensors, false), call, {}, into);
}

int driver() {
  int version = 0;
  return cudaDriverGetVersion(&version) == cudaSuccess ? version : 0;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.attr("CHECKS_LISTS") = true;
  m.attr("NEEDS_DRIVER") = fusedaccum::cuda::kDriver;
  m.def("driver", &driver, "the CUDA version that the driver is for, 12010 for 12.1; 0 if there is none");
  m.def("accumulate_", &accumulate, py::arg("buffers"), py::arg("grads"), py::arg("scale"), py::arg("overwrite"), py::arg("decay"),
        py::arg("rounding"), py::arg("stats"), "buffer = buffer * decay + grad * scale, or grad * scale with overwrite");
  m.def("scale_", &scale, py::arg("tensors"), py::arg("scale"), py::arg("stats"), "x = x * scale");
  m.def("cast_", &cast, py::arg("outs"), py::arg("ins"), py::arg("scale"), py::arg("stats"), "out = cast(in * scale)");
  m.def("stats", &measure, py::arg("tensors"), py::arg("into"), "squared norm and non-finite count");
}
