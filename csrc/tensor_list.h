// A Python list or tuple of tensors as the bindings read it: no reference count a tensor, no copy.
#pragma once

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "predicate.h"

namespace fusedaccum {

// Keeps the tensors alive: its tuple holds the items, whatever becomes of the list meanwhile.
class TensorList {
 public:
  explicit TensorList(pybind11::handle list) : items_(pybind11::reinterpret_steal<pybind11::object>(PySequence_Tuple(list.ptr()))) {
    if (!items_) throw pybind11::error_already_set();
    const Py_ssize_t count = PyTuple_GET_SIZE(items_.ptr());
    tensors_.reserve(static_cast<std::size_t>(count));
    for (Py_ssize_t k = 0; k < count; ++k) {
      PyObject* item = PyTuple_GET_ITEM(items_.ptr(), k);
      if (!THPVariable_Check(item)) {
        all_tensors_ = false;
        return;
      }
      tensors_.push_back(&THPVariable_Unpack(item));
      prefetch(tensors_.back()->unsafeGetTensorImpl());
    }
  }
  bool all_tensors() const { return all_tensors_; }
  const Tensors& tensors() const { return tensors_; }

 private:
  pybind11::object items_;
  Tensors tensors_;
  bool all_tensors_ = true;
};

// What every op that writes tells autograd.
inline void bump_version(const at::Tensor& x) {
  if (!x.is_inference()) x.unsafeGetTensorImpl()->bump_version();
}

}  // namespace fusedaccum
