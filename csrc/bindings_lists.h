// What serves the lists of every device, because it reads no tensor's memory:
// fusedaccum.ops.memory.native_lists() has it in Python.
//
// It is in the extension fusedaccum._cpu; one of its own would lengthen the build
// (docs/decisions.md).
#pragma once

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "tensor_list.h"

namespace fusedaccum {

// Where each tensor's memory begins (0 if it has none), its size and its dtype.
inline pybind11::bytes traits(const std::vector<at::Tensor>& tensors) {
  std::vector<int64_t> numbers;
  for (const at::Tensor& x : tensors) {
    const int64_t from =
        x.has_storage() ? reinterpret_cast<int64_t>(x.storage().data()) + x.storage_offset() * x.element_size() : 0;
    numbers.insert(numbers.end(), {from, x.numel(), static_cast<int64_t>(x.scalar_type())});
  }
  return {reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(int64_t)};
}

// Parts of the storage of `base`, laid out like these tensors.
inline std::vector<at::Tensor> views_like(const at::Tensor& base, const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> views;
  views.reserve(tensors.size());
  for (const at::Tensor& x : tensors) views.push_back(at::as_strided(base, x.sizes(), x.strides(), x.storage_offset()));
  return views;
}

// The launches of a call of the Triton kernels: launches() in triton_kernels/backend.py, which says
// what they consist of.
inline pybind11::list launches(const std::vector<at::Tensor>& outs, const std::vector<at::Tensor>& ins,
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
    const auto out = reinterpret_cast<int64_t>(outs[k].mutable_data_ptr()),
               in = reinterpret_cast<int64_t>(ins[k].const_data_ptr());
    Launch& launch = launch_of(outs[k].scalar_type(), ins[k].scalar_type(), (out | in) % 16 == 0);
    const int64_t counter = counters ? static_cast<int64_t>((*counters)[k]) : 0;
    const std::array<int64_t, kRows> row{out, in, elements, launch.blocks, counter};
    for (int r = 0; r < kRows; ++r) launch.rows[r].push_back(row[r]);
    launch.blocks += (elements + block - 1) / block;
  }
  pybind11::list plan;
  for (const Launch& launch : found) {
    std::string bytes;
    for (const auto& row : launch.rows)
      bytes.append(reinterpret_cast<const char*>(row.data()), row.size() * sizeof(int64_t));
    plan.append(pybind11::make_tuple(launch.out, launch.in, launch.aligned, launch.rows[0].size(), launch.blocks,
                                     pybind11::bytes(bytes)));
  }
  return plan;
}

inline void define_lists(pybind11::module_& m) {
  namespace py = pybind11;
  const char* verdicts =
      "0: kernels can run on these lists; 1: after copies; 2: fusedaccum.ops.arguments knows why not";
  m.def(
      "predicate",
      [](py::handle outs, bool written, py::handle low, bool) -> int { return Lists(outs, written, low).verdict(); },
      py::arg("outs"), py::arg("written"), py::arg("low") = py::none(), py::arg("of_ins") = false, verdicts);
  m.def(
      "predicate",
      [](py::handle outs, py::handle ins, bool written, py::handle low, bool of_ins) -> int {
        return Lists(outs, ins, written, low, of_ins).verdict();
      },
      py::arg("outs"), py::arg("ins"), py::arg("written"), py::arg("low") = py::none(), py::arg("of_ins") = false,
      verdicts);
  m.def(
      "increment_version",
      [](const std::vector<at::Tensor>& tensors) {
        for (const at::Tensor& x : tensors) bump_version(x);
      },
      py::arg("tensors"), "as fusedaccum.ops.memory.increment_version()");
  m.def("traits", &traits, py::arg("tensors"), "as fusedaccum.ops.memory.traits()");
  m.def("views_like", &views_like, py::arg("base"), py::arg("tensors"), "as fusedaccum.ops.memory.views_like()");
  m.def("launches", &launches, py::arg("outs"), py::arg("ins"), py::arg("counters"), py::arg("block"),
        "as launches() of the Triton kernels' backend");
}

}  // namespace fusedaccum
