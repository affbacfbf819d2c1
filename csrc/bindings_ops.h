// The ops of a backend, as Python calls them: accumulate_, scale_, cast_ and stats read and check
// their arguments in the same way on every device. The backend CHECKS_LISTS
// (fusedaccum/ops/backends.py).
#pragma once

#include <vector>

#include "tensor_list.h"

namespace fusedaccum {

// Where a call leaves its statistics: a fusedaccum.ops.Stats, or None.
struct Statistics {
  at::Tensor sq_norm, nonfinite;

  explicit Statistics(pybind11::handle stats) {
    if (stats.is_none()) return;
    sq_norm = stats.attr("sq_norm").cast<at::Tensor>();
    nonfinite = stats.attr("nonfinite").cast<at::Tensor>();
  }
  bool wanted() const { return sq_norm.defined(); }
};

// What a call asks for, its lists apart. Number: double, or pybind11::handle where it may be a 0-d
// tensor on the lists' device.
template <class Number>
struct Request {
  Op op;
  Statistics stats;
  Number scale{}, decay{};  // where the op has them
  bool overwrite = false;
  bool stochastic = false;
  uint64_t seed = 0;
  std::vector<uint64_t> counters;  // one per pair, when stochastic
};

// Gives a module its ops. They return the verdict on their lists; if that is kFlat, `run`, called
// with the GIL held, has done the work.
template <class Number>
void define_ops(pybind11::module_& m, void (*run)(const Lists& lists, const Request<Number>& request)) {
  namespace py = pybind11;
  const auto checked = [run](const Lists& lists, const Request<Number>& request) -> int {
    if (lists.verdict() != kFlat) return lists.verdict();
    run(lists, request);
    if (request.stats.wanted()) {
      bump_version(request.stats.sq_norm);
      bump_version(request.stats.nonfinite);
    }
    return kFlat;
  };
  const auto accumulate = [checked](py::handle buffers, py::handle grads, Number scale, bool overwrite, Number decay,
                                    py::handle rounding, py::handle stats, py::handle low) {
    Request<Number> request{Op::kAccumulate, Statistics(stats), scale, decay, overwrite};
    if (!rounding.is_none()) {
      request.stochastic = true;
      request.seed = rounding.attr("seed").cast<uint64_t>();
      request.counters = rounding.attr("counters").cast<std::vector<uint64_t>>();
    }
    return checked(Lists(buffers, grads, true, low, false), request);
  };
  const auto scale = [checked](py::handle tensors, Number scale, py::handle stats, py::handle low) {
    const Request<Number> request{low.is_none() ? Op::kCast : Op::kScale, Statistics(stats), scale};
    return checked(Lists(tensors, true, low), request);
  };
  const auto cast = [checked](py::handle outs, py::handle ins, Number scale, py::handle stats, py::handle low) {
    const Request<Number> request{Op::kCast, Statistics(stats), scale};
    return checked(Lists(outs, ins, true, low, true), request);
  };
  const auto measure = [checked](py::handle tensors, py::handle into, py::handle low) {
    const Request<Number> request{Op::kStats, Statistics(into)};
    return checked(Lists(tensors, false, low), request);
  };
  m.attr("CHECKS_LISTS") = true;
  m.def("accumulate_", accumulate, py::arg("buffers"), py::arg("grads"), py::arg("scale"), py::arg("overwrite"),
        py::arg("decay"), py::arg("rounding"), py::arg("stats"), py::arg("low") = py::none(),
        "buffer = buffer * decay + grad * scale, or grad * scale with overwrite");
  m.def("scale_", scale, py::arg("tensors"), py::arg("scale"), py::arg("stats"), py::arg("low") = py::none(),
        "x = x * scale");
  m.def("cast_", cast, py::arg("outs"), py::arg("ins"), py::arg("scale"), py::arg("stats"), py::arg("low") = py::none(),
        "out = cast(in * scale)");
  m.def("stats", measure, py::arg("tensors"), py::arg("into"), py::arg("low") = py::none(),
        "squared norm and non-finite count");
}

}  // namespace fusedaccum
