// The extension fusedaccum._cuda: lists of tensors in, the CUDA launchers out. A backend, as fusedaccum/backends.py has them: it gets
// checked arguments. Never waits for the device.
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <vector>

#include "cuda/accumulate.h"

namespace py = pybind11;

namespace {

using fusedaccum::cuda::Call;
using fusedaccum::cuda::DType;
using fusedaccum::cuda::Pair;
using fusedaccum::cuda::Scalar;

DType dtype_of(const at::Tensor& x) {
  switch (x.scalar_type()) {
    case at::kDouble:
      return fusedaccum::cuda::kF64;
    case at::kFloat:
      return fusedaccum::cuda::kF32;
    case at::kBFloat16:
      return fusedaccum::cuda::kBF16;
    default:
      return fusedaccum::cuda::kFP16;
  }
}

// A float, or a 0-d tensor on the device; `kept` keeps what the kernel reads alive until it is launched (after that, the stream does).
Scalar scalar_of(py::handle value, at::Tensor& kept) {
  Scalar scalar;
  if (!THPVariable_Check(value.ptr())) {
    scalar.host = value.cast<double>();
    return scalar;
  }
  kept = THPVariable_Unpack(value.ptr());
  if (kept.scalar_type() == at::kFloat) {
    scalar.device_f32 = kept.const_data_ptr<float>();
  } else {
    kept = kept.to(at::kDouble);
    scalar.device_f64 = kept.const_data_ptr<double>();
  }
  return scalar;
}

void accumulate(const std::vector<at::Tensor>& buffers, const std::vector<at::Tensor>& grads, py::handle scale, bool overwrite,
                py::handle decay, py::handle rounding, py::handle stats) {
  TORCH_CHECK(stats.is_none(), "backend='cuda' has no stats yet; use 'auto' or 'reference'");
  if (buffers.empty()) return;
  const c10::cuda::CUDAGuard guard(buffers[0].device());
  at::Tensor kept_scale, kept_decay;
  Call call;
  call.scale = scalar_of(scale, kept_scale);
  call.decay = scalar_of(decay, kept_decay);
  call.overwrite = overwrite;
  std::vector<uint64_t> counters(buffers.size());
  if (!rounding.is_none()) {
    call.stochastic = true;
    call.seed = rounding.attr("seed").cast<uint64_t>();
    counters = rounding.attr("counters").cast<std::vector<uint64_t>>();
  }

  // One launch (or a few, for thousands of tensors) for every combination of dtypes that occurs.
  std::array<std::array<std::vector<Pair>, fusedaccum::cuda::kDTypes>, fusedaccum::cuda::kDTypes> pairs;
  for (std::size_t k = 0; k < buffers.size(); ++k) {
    const at::Tensor &buffer = buffers[k], &grad = grads[k];
    pairs[dtype_of(buffer)][dtype_of(grad)].push_back({buffer.mutable_data_ptr(), grad.const_data_ptr(), buffer.numel(), counters[k]});
    if (!buffer.is_inference()) buffer.unsafeGetTensorImpl()->bump_version();
  }
  py::gil_scoped_release unlocked;
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  for (int buffer = 0; buffer < fusedaccum::cuda::kDTypes; ++buffer) {
    for (int grad = 0; grad < fusedaccum::cuda::kDTypes; ++grad) {
      const auto& group = pairs[buffer][grad];
      if (group.empty()) continue;
      C10_CUDA_CHECK(
          fusedaccum::cuda::accumulate(group.data(), group.size(), static_cast<DType>(buffer), static_cast<DType>(grad), call, stream));
    }
  }
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("accumulate_", &accumulate, py::arg("buffers"), py::arg("grads"), py::arg("scale"), py::arg("overwrite"), py::arg("decay"),
        py::arg("rounding"), py::arg("stats"), "buffer = buffer * decay + grad * scale, or grad * scale with overwrite");
}
