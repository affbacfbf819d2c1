// The extension fusedaccum._cpu: lists of tensors in, raw pointers to the launcher. Holds the GIL
// only while it reads the lists.
#include <ATen/Parallel.h>

#include <functional>
#include <string>
#include <vector>

#include "bindings_lists.h"
#include "bindings_ops.h"
#include "cpu/dispatch.h"
#include "cpu/launch.h"

namespace py = pybind11;

namespace {

using fusedaccum::dtype_of;
using fusedaccum::Lists;
using fusedaccum::Op;
using fusedaccum::Partial;
using fusedaccum::Request;
using fusedaccum::Statistics;
using fusedaccum::Tensors;
using fusedaccum::cpu::Call;
using fusedaccum::cpu::Pair;

void in_parallel(int64_t count, const std::function<void(int64_t)>& work) {
  at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) work(i);
  });
}

void run(const Lists& lists, const Request<double>& request) {
  const Tensors &outs = lists.outs(), &ins = lists.ins();
  std::vector<Pair> pairs;
  pairs.reserve(outs.size());
  for (std::size_t k = 0; k < outs.size(); ++k) {
    const at::Tensor& out = *outs[k];
    const at::Tensor& in = *ins[k];
    if (request.op != Op::kStats) fusedaccum::bump_version(out);
    pairs.push_back({lists.written(k), lists.read(k), out.numel(), dtype_of(out), dtype_of(in), lists.low(k)});
  }
  lists.bump_low(request.op);
  const Call call{request.op,         request.overwrite, request.scale,    request.decay,
                  request.stochastic, request.seed,      request.counters, lists.low_parts()};
  const Statistics& stats = request.stats;
  Partial total{0.0, 0};
  {
    py::gil_scoped_release unlocked;
    fusedaccum::cpu::launch(pairs, call, at::get_num_threads(), in_parallel, stats.wanted() ? &total : nullptr);
  }
  if (!stats.wanted()) return;
  *stats.sq_norm.mutable_data_ptr<double>() = total.sq_norm;
  *stats.nonfinite.mutable_data_ptr<int64_t>() = total.nonfinite;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  fusedaccum::define_ops(m, run);
  m.attr("TAKES_LOW") = true;
  fusedaccum::define_lists(m);
  m.def(
      "capability", [] { return std::string(fusedaccum::cpu::kernels().name); },
      "The instruction set whose kernels are in use");
  m.def("capabilities", &fusedaccum::cpu::capabilities, "What this CPU can run, the best last");
  m.def("set_capability", &fusedaccum::cpu::set_capability, py::arg("name"),
        "Use other kernels from now on; for tests");
}
