// A Python list or tuple of tensors as the bindings read it: no reference count a tensor, no copy.
#pragma once

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "predicate.h"

namespace fusedaccum {

// Points `tensors` at items [begin, end) of a list or tuple; false if one is no tensor. Runs no Python, on whatever thread: the items stay
// while the GIL is held by whoever waits for this.
inline bool read_items(PyObject** items, int64_t begin, int64_t end, Tensors* tensors) {
  for (int64_t k = begin; k < end; ++k) {
    __builtin_prefetch(items[std::min(k + 2 * kAhead, end - 1)]);
    if (!PyType_IsSubtype(Py_TYPE(items[k]), reinterpret_cast<PyTypeObject*>(THPVariableClass))) return false;
    (*tensors)[static_cast<std::size_t>(k)] = &THPVariable_Unpack(items[k]);
    prefetch((*tensors)[static_cast<std::size_t>(k)]->unsafeGetTensorImpl());
  }
  return true;
}

// All items, by several threads where they are many: whoever reads them first waits for memory.
inline bool read_tensors(pybind11::handle list, Tensors* tensors) {
  const int64_t count = PySequence_Fast_GET_SIZE(list.ptr());
  tensors->resize(static_cast<std::size_t>(count));
  PyObject** items = PySequence_Fast_ITEMS(list.ptr());
  const auto each = [&](int64_t begin, int64_t end, bool all) { return read_items(items, begin, end, tensors) && all; };
  return at::parallel_reduce(0, count, kGrain, true, each, [](bool a, bool b) { return a && b; });
}

// Keeps the tensors alive where the GIL is let go: its tuple holds the items, whatever becomes of the list meanwhile.
class TensorList {
 public:
  explicit TensorList(pybind11::handle list) : items_(pybind11::reinterpret_steal<pybind11::object>(PySequence_Tuple(list.ptr()))) {
    if (!items_) throw pybind11::error_already_set();
    const Py_ssize_t count = PyTuple_GET_SIZE(items_.ptr());
    tensors_.resize(static_cast<std::size_t>(count));
    read_items(PySequence_Fast_ITEMS(items_.ptr()), 0, count, &tensors_);
  }
  const Tensors& tensors() const { return tensors_; }

 private:
  pybind11::object items_;
  Tensors tensors_;
};

// What every op that writes tells autograd.
inline void bump_version(const at::Tensor& x) {
  if (!x.is_inference()) x.unsafeGetTensorImpl()->bump_version();
}

}  // namespace fusedaccum
