// A stand-in for CUDA's driver, libcuda.so.1, with what csrc/cuda/driver.h calls. It records the
// calls, fails where a test wants, and runs kernels on the CPU: which one, the name says that NVRTC
// gave it. A stream of every thread is being captured in the global mode.
#include <cxxabi.h>
#include <elf.h>

#include <map>
#include <regex>
#include <string>
#include <typeinfo>
#include <utility>

#include "../cuda_shim/cuda_runtime_api.h"
// The kernels, after what they are made of here.
#include "../../../csrc/cuda/kernels.inc.h"

namespace {

using namespace fusedaccum;
using namespace fusedaccum::cuda;

enum Result {
  kSuccess,
  kInvalidValue,
  kOutOfMemory,
  kInvalidImage = 200,
  kInvalidContext = 201,
  kNotFound = 500,
  kCapturing = 900
};

struct Context {
  int device;
};
struct Module {
  Context* context;
  std::string image;
};
using Run = std::function<void(void*)>;
struct Function {
  Context* context;
  std::string name;
  Run run;
};

std::string calls;
std::map<std::string, int> planned;
thread_local std::vector<Context*> current;
thread_local int capture_mode = 0;

int called(const char* call, const std::string& with = "") {
  calls += call + with + "\n";
  const auto error = planned.find(call);
  return error == planned.end() ? kSuccess : error->second;
}

// A symbol, without what is in front of the kernel's name and behind its template arguments.
std::string plain(const char* symbol) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> name(abi::__cxa_demangle(symbol, nullptr, nullptr, &status), std::free);
  std::smatch found;
  const std::string text = name ? name.get() : symbol;
  return std::regex_search(text, found, std::regex("\\w+_kernel.*(?=\\(fusedaccum::cuda::)")) ? found[0].str() : text;
}

std::map<std::string, Run> kernels;

template <auto kernel>
struct Named {};
template <auto kernel>
void add() {
  kernels[plain(typeid(Named<kernel>).name())] = [](void* argument) { kernel(*static_cast<Batch*>(argument)); };
}
template <class Out, class In, bool kOverwrite, bool kStats>
void add_writes() {
  add<write_kernel<Out, In, kOverwrite, false, kStats>>();
  if constexpr (sizeof(Out) == 2) add<write_kernel<Out, In, kOverwrite, true, kStats>>();
}
template <class Out, class In>
void add_pair() {
  add_writes<Out, In, false, false>(), add_writes<Out, In, false, true>(), add_writes<Out, In, true, false>(),
      add_writes<Out, In, true, true>();
}
template <class Out>
void add_dtype() {
  add_pair<Out, double>(), add_pair<Out, float>(), add_pair<Out, BF16>(), add_pair<Out, FP16>(),
      add<stats_kernel<Out>>();
}
template <class Low, bool kStats>
void add_parts() {
  add<parts_kernel<Op::kAccumulate, Low, float, false, kStats>>(),
      add<parts_kernel<Op::kAccumulate, Low, BF16, false, kStats>>();
  add<parts_kernel<Op::kAccumulate, Low, float, true, kStats>>(),
      add<parts_kernel<Op::kAccumulate, Low, BF16, true, kStats>>();
  add<parts_kernel<Op::kCast, Low, float, true, kStats>>(), add<parts_kernel<Op::kCast, Low, BF16, true, kStats>>();
  add<parts_kernel<Op::kScale, Low, BF16, true, kStats>>(), add<parts_kernel<Op::kStats, Low, BF16, true, true>>();
}

const bool all_added = [] {
  add_dtype<double>(), add_dtype<float>(), add_dtype<BF16>(), add_dtype<FP16>();
  add_parts<int8_t, false>(), add_parts<int8_t, true>(), add_parts<int16_t, false>(), add_parts<int16_t, true>();
  kernels["add_up_kernel"] = [](void* argument) { add_up_kernel(*static_cast<AddUp*>(argument)); };
  return true;
}();

Context contexts[2] = {{0}, {1}};

}  // namespace

extern "C" {

// -- for tests: a call that fails from now on (0: no more), and what was called since the last time
void plan(const char* call, int error) {
  if (error == 0) {
    planned.erase(call);
  } else {
    planned[call] = error;
  }
}
extern const std::size_t layout[] = {sizeof(Batch), offsetof(Batch, call), offsetof(Batch, first_block),
                                     offsetof(Batch, tensors), sizeof(AddUp)};
const char* record() {
  static std::string told;
  told = std::exchange(calls, "");
  return told.c_str();
}

// -- the driver's: device 1 is of compute capability 8.0, all others are of 9.0
int cuInit(unsigned) { return called("cuInit"); }
int cuGetExportTable(const void**, const void*) { return kNotFound; }  // NVRTC asks for one, and goes without
int cuDriverGetVersion(int* version) {
  *version = 13000;
  return called("cuDriverGetVersion");
}
int cuGetErrorString(int error, const char** meaning) {
  *meaning = error == kOutOfMemory ? "out of memory" : nullptr;
  return error == kOutOfMemory ? kSuccess : kInvalidValue;
}
int cuDeviceGet(int* device, int ordinal) {
  *device = 40 + (ordinal == 1);
  return called("cuDeviceGet");
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  *value = attribute == 75 ? (device == 41 ? 8 : 9) : attribute == 76 ? 0 : -1;
  return called("cuDeviceGetAttribute");
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = &contexts[device - 40];
  return called("cuDevicePrimaryCtxRetain");
}
int cuCtxPushCurrent_v2(void* context) {
  if (const int error = called("cuCtxPushCurrent")) return error;
  current.push_back(static_cast<Context*>(context));
  return kSuccess;
}
int cuCtxPopCurrent_v2(void** context) {
  if (current.empty()) return kInvalidContext;
  *context = current.back();
  current.pop_back();
  return called("cuCtxPopCurrent");
}
int cuThreadExchangeStreamCaptureMode(int* mode) {
  if (const int error = called("cuThreadExchangeStreamCaptureMode")) return error;
  std::swap(*mode, capture_mode);
  return kSuccess;
}
int cuModuleLoadData(void** module, const void* image) {
  if (const int error = called("cuModuleLoadData")) return error;
  if (current.empty()) return kInvalidContext;
  if (capture_mode != 2) return kCapturing;
  const auto* header = static_cast<const Elf64_Ehdr*>(image);
  if (std::memcmp(header->e_ident, ELFMAG, SELFMAG) != 0) return kInvalidImage;
  const unsigned arch = header->e_flags >> 8 & 0xff;
  if (arch != (current.back()->device == 1 ? 80 : 90)) return kInvalidImage;
  const std::size_t size = header->e_shoff + header->e_shnum * header->e_shentsize;
  *module = new Module{current.back(), {static_cast<const char*>(image), size}};
  return kSuccess;
}
int cuModuleGetFunction(void** function, void* from, const char* name) {
  if (const int error = called("cuModuleGetFunction")) return error;
  const auto* module = static_cast<Module*>(from);
  const auto kernel = kernels.find(plain(name));
  if (kernel == kernels.end() || module->image.find(std::string(".text.") + name + '\0') == std::string::npos)
    return kNotFound;
  *function = new Function{module->context, kernel->first, kernel->second};
  return kSuccess;
}
int cuLaunchKernel(void* function, unsigned grid, unsigned grid_y, unsigned grid_z, unsigned block, unsigned block_y,
                   unsigned block_z, unsigned shared, void* stream, void** arguments, void** extra) {
  const auto* kernel = static_cast<Function*>(function);
  const std::string on = " device " + std::to_string(kernel->context->device) + " stream " +
                         std::to_string(reinterpret_cast<uintptr_t>(stream));
  if (const int error = called("cuLaunchKernel", " " + kernel->name + on)) return error;
  if (current.empty() || current.back() != kernel->context) return kInvalidContext;
  if (grid_y * grid_z * block_y * block_z != 1 || shared != 0 || extra != nullptr) return kInvalidValue;
  shim::body = [=] { kernel->run(arguments[0]); };
  for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) shim::run_block(block);
  return kSuccess;
}
}
