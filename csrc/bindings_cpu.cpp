// The extension fusedaccum._cpu: lists of tensors in, raw pointers to the launcher. Holds the GIL only while it reads the lists.
//
// accumulate_, scale_, cast_ and stats are a backend, as fusedaccum/backends.py has them: they get checked arguments. predicate() is the
// check.
#include <ATen/Parallel.h>

#include <functional>

#include "cpu/dispatch.h"
#include "cpu/launch.h"
#include "tensor_list.h"

namespace py = pybind11;

namespace {

using fusedaccum::TensorList;
using fusedaccum::Tensors;
using fusedaccum::cpu::Call;
using fusedaccum::cpu::DType;
using fusedaccum::cpu::Op;
using fusedaccum::cpu::Pair;
using fusedaccum::cpu::Partial;

bool is_list(py::handle value) { return PyList_Check(value.ptr()) || PyTuple_Check(value.ptr()); }

int predicate(py::handle outs, py::handle ins, bool written) {
  if (!is_list(outs) || (!ins.is_none() && !is_list(ins))) return fusedaccum::kRefused;
  Tensors out_tensors, in_tensors;
  if (!fusedaccum::read_tensors(outs, &out_tensors)) return fusedaccum::kRefused;
  if (!ins.is_none() && !fusedaccum::read_tensors(ins, &in_tensors)) return fusedaccum::kRefused;
  if (!ins.is_none() && out_tensors.size() != in_tensors.size()) return fusedaccum::kRefused;
  return fusedaccum::judge(out_tensors, in_tensors, written);
}

DType dtype_of(const at::Tensor& x) {
  switch (x.scalar_type()) {
    case at::kDouble:
      return fusedaccum::cpu::kF64;
    case at::kFloat:
      return fusedaccum::cpu::kF32;
    case at::kBFloat16:
      return fusedaccum::cpu::kBF16;
    default:
      return fusedaccum::cpu::kFP16;
  }
}

void in_parallel(int64_t count, const std::function<void(int64_t)>& work) {
  at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) work(i);
  });
}

void run(const Tensors& outs, const Tensors& ins, const Call& call, py::handle stats) {
  std::vector<Pair> pairs;
  pairs.reserve(outs.size());
  for (std::size_t k = 0; k < outs.size(); ++k) {
    const at::Tensor& out = *outs[k];
    const at::Tensor& in = *ins[k];
    void* written = nullptr;
    if (call.op != Op::kStats) {
      written = out.mutable_data_ptr();
      fusedaccum::bump_version(out);
    }
    pairs.push_back({written, in.const_data_ptr(), out.numel(), dtype_of(out), dtype_of(in)});
  }
  Partial total{0.0, 0};
  {
    py::gil_scoped_release unlocked;
    fusedaccum::cpu::launch(pairs, call, at::get_num_threads(), in_parallel, stats.is_none() ? nullptr : &total);
  }
  if (!stats.is_none()) {
    const auto sq_norm = stats.attr("sq_norm").cast<at::Tensor>(), nonfinite = stats.attr("nonfinite").cast<at::Tensor>();
    *sq_norm.mutable_data_ptr<double>() = total.sq_norm;
    *nonfinite.mutable_data_ptr<int64_t>() = total.nonfinite;
    fusedaccum::bump_version(sq_norm);
    fusedaccum::bump_version(nonfinite);
  }
}

void accumulate(py::handle buffers, py::handle grads, double scale, bool overwrite, double decay, py::handle rounding, py::handle stats) {
  Call call;
  call.scale = scale;
  call.decay = decay;
  call.overwrite = overwrite;
  if (!rounding.is_none()) {
    call.stochastic = true;
    call.seed = rounding.attr("seed").cast<uint64_t>();
    call.counters = rounding.attr("counters").cast<std::vector<uint64_t>>();
  }
  const TensorList outs(buffers), ins(grads);
  run(outs.tensors(), ins.tensors(), call, stats);
}

void cast(py::handle outs, py::handle ins, double scale, py::handle stats) {
  Call call;
  call.op = Op::kCast;
  call.scale = scale;
  const TensorList out_list(outs), in_list(ins);
  run(out_list.tensors(), in_list.tensors(), call, stats);
}

void scale(py::handle tensors, double factor, py::handle stats) { cast(tensors, tensors, factor, stats); }

void measure(py::handle tensors, py::handle into) {
  Call call;
  call.op = Op::kStats;
  const TensorList list(tensors);
  run(list.tensors(), list.tensors(), call, into);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("accumulate_", &accumulate, py::arg("buffers"), py::arg("grads"), py::arg("scale"), py::arg("overwrite"), py::arg("decay"),
        py::arg("rounding"), py::arg("stats"), "buffer = buffer * decay + grad * scale, or grad * scale with overwrite");
  m.def("scale_", &scale, py::arg("tensors"), py::arg("scale"), py::arg("stats"), "x = x * scale");
  m.def("cast_", &cast, py::arg("outs"), py::arg("ins"), py::arg("scale"), py::arg("stats"), "out = cast(in * scale)");
  m.def("stats", &measure, py::arg("tensors"), py::arg("into"), "squared norm and non-finite count");
  m.def("predicate", &predicate, py::arg("outs"), py::arg("ins"), py::arg("written"),
        "0: kernels can run on these lists; 1: after copies; 2: fusedaccum.arguments knows why not");
  m.def("capability", [] { return std::string(fusedaccum::cpu::kernels().name); }, "The instruction set whose kernels are in use");
  m.def("capabilities", &fusedaccum::cpu::capabilities, "What this CPU can run, the best last");
  m.def("set_capability", &fusedaccum::cpu::set_capability, py::arg("name"), "Use other kernels from now on; for tests");
}
