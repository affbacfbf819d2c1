// The extension fusedaccum._cuda without nvcc: fusedaccum.nvrtc compiles a kernel when it is first
// used; CUDA's driver launches it.
#include <map>
#include <string>

#include "bindings_cuda.h"
#include "cuda/batch.h"
#include "cuda/driver.h"

// Of libtorch_cuda's C interface, whose header is for all of it.
extern "C" int aoti_torch_get_current_cuda_stream(int32_t device, void** stream);

namespace fusedaccum {
namespace cuda {
namespace {

// The kernel that a call needs, as NVRTC knows it.
std::string kernel_of(DType out, DType in, const Call& call) {
  static constexpr const char* kTypes[kDTypes] = {"double", "float", "BF16", "FP16"};
  const auto flag = [](bool on) { return on ? ", true" : ", false"; };
  const bool overwrite = call.op != Op::kAccumulate || call.overwrite, stats = call.partials != nullptr;
  if (call.low != kNoLow) {
    const char* const other = out == kF32 || in == kF32 ? "float" : "BF16";
    const std::string op = "parts_kernel<static_cast<Op>(" + std::to_string(static_cast<int>(call.op)) + ")";
    return op + (call.low == kInt8 ? ", int8_t, " : ", int16_t, ") + other + flag(overwrite) + flag(stats) + ">";
  }
  if (call.op == Op::kStats) return std::string("stats_kernel<") + kTypes[in] + ">";
  const bool stochastic = threads_of(out, call) == kThreads<true>;
  return std::string("write_kernel<") + kTypes[out] + ", " + kTypes[in] + flag(overwrite) + flag(stochastic) +
         flag(stats) + ">";
}

struct Kernels : Device {
  using Device::Device;
  std::map<std::string, void*> loaded;
};

class Launcher {
 public:
  explicit Launcher(c10::Device device) : kernels_(kernels_on(device.index())), current_(kernels_) {
    TORCH_CHECK(aoti_torch_get_current_cuda_stream(device.index(), &stream_) == 0, "torch has no current stream on ",
                device);
  }
  void prepare(DType out, DType in, const Call& call) {
    kernel_[out][in] = kernel(kernel_of(out, in, call));
    add_up_ = kernel("add_up_kernel");
  }
  void run(const std::vector<Pair>& pairs, DType out, DType in, const Call& call) {
    const unsigned threads = threads_of(out, call);
    in_batches(pairs.data(), pairs.size(), call,
               [&](Batch& batch, uint32_t blocks) { return launch(kernel_[out][in], blocks, threads, &batch); });
  }
  void add_up(AddUp work) { launch(add_up_, 1, kAddUpThreads, &work); }

  static int driver() try {
    int version = 0;
    return cuda::driver().version(&version) == 0 ? version : 0;
  } catch (const std::runtime_error&) {
    return 0;
  }

 private:
  static Kernels& kernels_on(int index) {
    static std::map<int, Kernels> devices;
    return devices.try_emplace(index, index).first->second;
  }

  void* kernel(const std::string& name) {
    const auto known = kernels_.loaded.find(name);
    if (known != kernels_.loaded.end()) return known->second;
    const pybind11::object compiled =
        pybind11::module_::import("fusedaccum.nvrtc").attr("compiled")(name, kernels_.arch);
    const auto [symbol, code] = compiled.cast<std::pair<std::string, std::string>>();
    return kernels_.loaded.try_emplace(name, load(code.c_str(), symbol.c_str())).first->second;
  }

  int launch(void* kernel, unsigned blocks, unsigned threads, void* argument) {
    const Driver& driver = cuda::driver();
    driver.check(driver.launch(kernel, blocks, 1, 1, threads, 1, 1, 0, stream_, &argument, nullptr), "cuLaunchKernel");
    return 0;
  }

  Kernels& kernels_;
  Current current_;
  void* stream_ = nullptr;
  void* kernel_[kDTypes][kDTypes] = {};
  void* add_up_ = nullptr;
};

}  // namespace
}  // namespace cuda
}  // namespace fusedaccum

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { fusedaccum::cuda::define<fusedaccum::cuda::Launcher>(m); }
