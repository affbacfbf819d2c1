// The extension fusedaccum._cuda for CPU tensors: csrc/bindings_nvrtc.cpp as it is, on a stream of
// the test's.
#include <cstdint>

extern "C" int aoti_torch_get_current_cuda_stream(int32_t device, void** stream) {
  *stream = reinterpret_cast<void*>(static_cast<intptr_t>(device < 0 ? 0 : 7000 + device));
  return device == 9;
}

#include "../../../csrc/bindings_nvrtc.cpp"

// x += x, on the CUDA device of this number. With the GIL held.
extern "C" __attribute__((visibility("default"))) void add_on(int device, float* x, int64_t elements) {
  namespace cuda = fusedaccum::cuda;
  cuda::Call call;
  call.scale.host = call.decay.host = 1.0;
  cuda::Launcher launcher(c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device)));
  launcher.prepare(fusedaccum::kF32, fusedaccum::kF32, call);
  launcher.run({{x, x, elements, 0}}, fusedaccum::kF32, fusedaccum::kF32, call);
}
