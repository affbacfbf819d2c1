// The extension fusedaccum._cpu: lists of tensors in, raw pointers to the launcher. Holds the GIL only while it reads the lists.
//
// Besides the ops: predicate() is the check of their lists alone. It, traits(), increment_version() and launches() read no tensor's memory,
// so they serve tensors of every device.
#include <ATen/Parallel.h>

#include <array>
#include <functional>
#include <optional>
#include <string>
#include <vector>

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
    pairs.push_back({lists.written(k), lists.read(k), out.numel(), dtype_of(out), dtype_of(in)});
  }
  const Call call{request.op, request.overwrite, request.scale, request.decay, request.stochastic, request.seed, request.counters};
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

// Where each tensor's memory begins (0 if it has none), its size and its dtype.
py::bytes traits(const std::vector<at::Tensor>& tensors) {
  std::vector<int64_t> numbers;
  for (const at::Tensor& x : tensors) {
    const int64_t from = x.has_storage() ? reinterpret_cast<int64_t>(x.storage().data()) + x.storage_offset() * x.element_size() : 0;
    numbers.insert(numbers.end(), {from, x.numel(), static_cast<int64_t>(x.scalar_type())});
  }
  return {reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(int64_t)};
}

// The launches of a call of the Triton kernels: launches() in triton_kernels/backend.py, which says what they consist of.
py::list launches(const std::vector<at::Tensor>& outs, const std::vector<at::Tensor>& ins,
                  const std::optional<std::vector<uint64_t>>& counters, int64_t block) {
  constexpr int kRows = 5;  // outputs, inputs, elements, first blocks, counters
  struct Launch {
    at::ScalarType out, in;
    bool aligned;
    int64_t blocks = 0;
    std::array<std::vector<int64_t>, kRows> rows;
  };
  std::vector<Launch> found;
  const auto launch_of = [&found](at::ScalarType out, at::ScalarType in, bool aligned) -> Launch& {
    for (Launch& launch : found) {
      if (launch.out == out && launch.in == in && launch.aligned == aligned) return launch;
    }
    return found.emplace_back(Launch{out, in, aligned});
  };
  for (std::size_t k = 0; k < outs.size(); ++k) {
    const int64_t elements = outs[k].numel();
    if (elements == 0) continue;
    const auto out = reinterpret_cast<int64_t>(outs[k].mutable_data_ptr()), in = reinterpret_cast<int64_t>(ins[k].const_data_ptr());
    Launch& launch = launch_of(outs[k].scalar_type(), ins[k].scalar_type(), (out | in) % 16 == 0);
    const int64_t counter = counters ? static_cast<int64_t>((*counters)[k]) : 0;
    const std::array<int64_t, kRows> row{out, in, elements, launch.blocks, counter};
    for (int r = 0; r < kRows; ++r) launch.rows[r].push_back(row[r]);
    launch.blocks += (elements + block - 1) / block;
  }
  py::list plan;
  for (const Launch& launch : found) {
    std::string bytes;
    for (const auto& row : launch.rows) bytes.append(reinterpret_cast<const char*>(row.data()), row.size() * sizeof(int64_t));
    plan.append(py::make_tuple(launch.out, launch.in, launch.aligned, launch.rows[0].size(), launch.blocks, py::bytes(bytes)));
  }
  return plan;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  fusedaccum::define_ops(m, run);
  const char* verdicts = "0: kernels can run on these lists; 1: after copies; 2: fusedaccum.ops.arguments knows why not";
  m.def(
      "predicate", [](py::handle outs, bool written) -> int { return Lists(outs, written).verdict(); }, py::arg("outs"), py::arg("written"),
      verdicts);
  m.def(
      "predicate", [](py::handle outs, py::handle ins, bool written) -> int { return Lists(outs, ins, written).verdict(); },
      py::arg("outs"), py::arg("ins"), py::arg("written"), verdicts);
  m.def(
      "increment_version",
      [](const std::vector<at::Tensor>& tensors) {
        for (const at::Tensor& x : tensors) fusedaccum::bump_version(x);
      },
      py::arg("tensors"), "as fusedaccum.ops.memory.increment_version()");
  m.def("traits", &traits, py::arg("tensors"), "as fusedaccum.ops.memory.traits()");
  m.def("launches", &launches, py::arg("outs"), py::arg("ins"), py::arg("counters"), py::arg("block"),
        "as launches() of the Triton kernels' backend");
  m.def("capability", [] { return std::string(fusedaccum::cpu::kernels().name); }, "The instruction set whose kernels are in use");
  m.def("capabilities", &fusedaccum::cpu::capabilities, "What this CPU can run, the best last");
  m.def("set_capability", &fusedaccum::cpu::set_capability, py::arg("name"), "Use other kernels from now on; for tests");
}
