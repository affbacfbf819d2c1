// A Python list or tuple of tensors as the bindings read it: no reference count a tensor, no copy.
#pragma once

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "predicate.h"

namespace fusedaccum {

// Points `tensors` at the items of a list or tuple; false if one is no tensor. Runs no Python, so the items stay while the GIL is held.
inline bool read_tensors(pybind11::handle list, Tensors* tensors) {
  PyObject** items = PySequence_Fast_ITEMS(list.ptr());
  const auto count = static_cast<std::size_t>(PySequence_Fast_GET_SIZE(list.ptr()));
  tensors->reserve(count);
  PyTypeObject* known = nullptr;  // a type of tensors
  for (std::size_t k = 0; k < count; ++k) {
    __builtin_prefetch(items[std::min(k + 2 * kAhead, count - 1)]);
    PyTypeObject* type = Py_TYPE(items[k]);
    if (type != known && !PyType_IsSubtype(type, reinterpret_cast<PyTypeObject*>(THPVariableClass))) return false;
    known = type;
    tensors->push_back(&THPVariable_Unpack(items[k]));
    prefetch(tensors->back()->unsafeGetTensorImpl());
  }
  return true;
}

// Keeps the tensors alive where the GIL is let go: its tuple holds the items, whatever becomes of the list meanwhile.
class TensorList {
 public:
  explicit TensorList(pybind11::handle list) : items_(pybind11::reinterpret_steal<pybind11::object>(PySequence_Tuple(list.ptr()))) {
    if (!items_) throw pybind11::error_already_set();
    read_tensors(items_, &tensors_);
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
