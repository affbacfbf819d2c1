// The lists of tensors of a call, as the bindings read them: once, for the check and for the
// kernels.
#pragma once

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "predicate.h"
#include "types.h"

namespace fusedaccum {

// What every op that writes tells autograd.
inline void bump_version(const at::Tensor& x) {
  if (!x.is_inference()) x.unsafeGetTensorImpl()->bump_version();
}

// One or two Python lists or tuples of tensors, and their low parts or None, judged, and held so
// that the GIL may be released, whatever happens to the lists meanwhile.
class Lists {
 public:
  Lists(pybind11::handle outs, bool written, pybind11::handle low) : one_(true) {
    if (outs_.read(outs) && read_low(low, false)) judged_ = judge(outs_.tensors, {}, written, low_);
  }
  Lists(pybind11::handle outs, pybind11::handle ins, bool written, pybind11::handle low, bool of_ins) : one_(false) {
    if (!outs_.read(outs) || !ins_.read(ins) || outs_.tensors.size() != ins_.tensors.size() || !read_low(low, of_ins))
      return;
    judged_ = judge(outs_.tensors, ins_.tensors, written, low_);
  }
  Verdict verdict() const { return judged_.verdict; }
  const Tensors& outs() const { return outs_.tensors; }
  const Tensors& ins() const { return one_ ? outs_.tensors : ins_.tensors; }
  // Where the elements of tensor k begin; null if there are none.
  void* written(std::size_t k) const { return const_cast<char*>(judged_.outs[k].begin); }
  // True if this is the address of an output's element.
  bool writes(const void* address) const {
    const auto within = [at = static_cast<const char*>(address)](const Stretch& x) {
      return x.begin <= at && at < x.end;
    };
    return std::any_of(judged_.outs.begin(), judged_.outs.end(), within);
  }
  // Tells autograd, if the op writes the low parts.
  void bump_low(Op op) const {
    if (op == Op::kStats || low_.of_ins) return;
    for (const at::Tensor* x : low_.tensors) bump_version(*x);
  }
  void* low(std::size_t k) const { return low_.given ? const_cast<char*>(judged_.low[k].begin) : nullptr; }
  LowParts low_parts() const {
    if (!low_.given || low_.tensors.empty()) return kNoLow;
    return low_.tensors[0]->scalar_type() == at::kChar ? kInt8 : kInt16;
  }
  const void* read(std::size_t k) const { return one_ ? judged_.outs[k].begin : judged_.ins[k].begin; }

 private:
  struct List {
    pybind11::object items;
    Tensors tensors;

    // False for anything but a list or tuple, and for one with an item that is not a tensor.
    bool read(pybind11::handle list) {
      if (!PyList_Check(list.ptr()) && !PyTuple_Check(list.ptr())) return false;
      auto count = PySequence_Fast_GET_SIZE(list.ptr());
      items = pybind11::reinterpret_steal<pybind11::object>(PyTuple_New(count));
      if (!items) throw pybind11::error_already_set();
      // The allocation may collect garbage, whose finalizers may do anything to a list. From here
      // on no other code runs.
      if (PySequence_Fast_GET_SIZE(list.ptr()) != count) return false;
      PyObject** given = PySequence_Fast_ITEMS(list.ptr());
      tensors.reserve(static_cast<std::size_t>(count));
      PyTypeObject* known = nullptr;  // known to be a type of tensors
      for (Py_ssize_t k = 0; k < count; ++k) {
        __builtin_prefetch(given[std::min<Py_ssize_t>(k + 2 * kAhead, count - 1)]);
        PyTypeObject* type = Py_TYPE(given[k]);
        if (type != known && !PyType_IsSubtype(type, reinterpret_cast<PyTypeObject*>(THPVariableClass))) return false;
        known = type;
        Py_INCREF(given[k]);
        PyTuple_SET_ITEM(items.ptr(), k, given[k]);
        tensors.push_back(&THPVariable_Unpack(given[k]));
        prefetch(tensors.back()->unsafeGetTensorImpl());
      }
      return true;
    }
  };

  bool read_low(pybind11::handle low, bool of_ins) {
    if (low.is_none()) return true;
    if (!low_list_.read(low)) return false;
    low_ = {true, of_ins, low_list_.tensors};
    return true;
  }

  List outs_, ins_, low_list_;
  Low low_;
  bool one_;
  Judgement judged_{kRefused, {}, {}, {}};
};

// Of a tensor whose dtype is supported.
inline DType dtype_of(const at::Tensor& x) {
  switch (x.scalar_type()) {
    case at::kDouble:
      return kF64;
    case at::kFloat:
      return kF32;
    case at::kBFloat16:
      return kBF16;
    default:
      return kFP16;
  }
}

}  // namespace fusedaccum
