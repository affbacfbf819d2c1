// CUDA's driver, for launches of kernels that are data: libcuda.so.1, without a header of CUDA's.
#pragma once

#include <dlfcn.h>

#include <stdexcept>
#include <string>

namespace fusedaccum {
namespace cuda {

// What it exports, in the types of cuda.h's ABI: results, devices and modes are ints, handles are
// pointers.
struct Driver {
  struct Symbol {
    const char* name;
    template <class Function>
    operator Function*() const {
      void* const library = dlopen("libcuda.so.1", RTLD_NOW);
      void* const found = library != nullptr ? dlsym(library, name) : nullptr;
      if (found == nullptr) throw std::runtime_error(std::string("CUDA's driver cannot be called: ") + dlerror());
      return reinterpret_cast<Function*>(found);
    }
  };
  int (*error_string)(int, const char**) = Symbol{"cuGetErrorString"};
  int (*init)(unsigned) = Symbol{"cuInit"};
  int (*version)(int*) = Symbol{"cuDriverGetVersion"};
  int (*device)(int*, int) = Symbol{"cuDeviceGet"};
  int (*attribute)(int*, int, int) = Symbol{"cuDeviceGetAttribute"};
  int (*primary_context)(void**, int) = Symbol{"cuDevicePrimaryCtxRetain"};
  int (*push)(void*) = Symbol{"cuCtxPushCurrent_v2"};
  int (*pop)(void**) = Symbol{"cuCtxPopCurrent_v2"};
  int (*exchange_capture_mode)(int*) = Symbol{"cuThreadExchangeStreamCaptureMode"};
  int (*load)(void**, const void*) = Symbol{"cuModuleLoadData"};
  int (*function)(void**, void*, const char*) = Symbol{"cuModuleGetFunction"};
  int (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**,
                void**) = Symbol{"cuLaunchKernel"};

  void check(int error, const char* call) const {
    if (error == 0) return;
    const char* meaning = nullptr;
    error_string(error, &meaning);
    throw std::runtime_error(std::string("CUDA error in ") + call + ": " +
                             (meaning != nullptr ? meaning : std::to_string(error)));
  }
};

inline const Driver& driver() {
  static const Driver driver;
  return driver;
}

// A GPU, and the context on it that all libraries of a process share.
struct Device {
  void* context = nullptr;
  int arch = 0;  // 90 for compute capability 9.0

  explicit Device(int index) {
    constexpr int kMajor = 75, kMinor = 76;
    int device = 0, major = 0, minor = 0;
    driver().check(driver().init(0), "cuInit");
    driver().check(driver().device(&device, index), "cuDeviceGet");
    driver().check(driver().attribute(&major, kMajor, device), "cuDeviceGetAttribute");
    driver().check(driver().attribute(&minor, kMinor, device), "cuDeviceGetAttribute");
    driver().check(driver().primary_context(&context, device), "cuDevicePrimaryCtxRetain");
    arch = 10 * major + minor;
  }
};

// Makes a device's context current as long as it lives: a thread may have none, and setting
// PyTorch's device does not give it one.
class Current {
 public:
  explicit Current(const Device& device) { driver().check(driver().push(device.context), "cuCtxPushCurrent"); }
  ~Current() {
    void* popped;
    driver().pop(&popped);
  }
  Current(const Current&) = delete;
};

// The kernel of this name in a module of machine code, in the current context. Also while a stream
// is captured as a graph: loading allocates, which a thread may do then only in this mode.
inline void* load(const char* code, const char* name) {
  int mode = 2;  // CU_STREAM_CAPTURE_MODE_RELAXED
  void *module = nullptr, *kernel = nullptr;
  driver().check(driver().exchange_capture_mode(&mode), "cuThreadExchangeStreamCaptureMode");
  const int loaded = driver().load(&module, code);
  const int found = loaded == 0 ? driver().function(&kernel, module, name) : 0;
  driver().exchange_capture_mode(&mode);
  driver().check(loaded, "cuModuleLoadData");
  driver().check(found, "cuModuleGetFunction");
  return kernel;
}

}  // namespace cuda
}  // namespace fusedaccum
