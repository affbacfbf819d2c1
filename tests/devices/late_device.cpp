// A device for tests without a GPU: memory of its own (the host's), and streams that copy late,
// from the bytes that are there by then.
//
// Ops run on the CPU once the current stream is empty. Copies within the device, and copies with
// non_blocking=True between it and pinned memory, are made some time later by the stream's thread.
// Freed memory is filled with NaNs at once, or as soon as the streams that it was recorded on are
// done with it. So a missing wait or a missing record_stream shows as a wrong number.
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

namespace {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
constexpr std::chrono::microseconds kDelay(700);

constexpr c10::DeviceIndex kDevices = 2;
thread_local c10::DeviceIndex current_device = 0;
thread_local c10::StreamId current_stream[kDevices] = {};  // 0 is each device's default

c10::Device here() { return {kDevice, current_device}; }
c10::Stream stream(c10::DeviceIndex device, c10::StreamId id) {
  return {c10::Stream(c10::Stream::UNSAFE, {kDevice, device}, id)};
}

// -- streams and events ---------------------------------------------------------------------------

// Runs jobs in order, on a thread that lives as long as the process.
class Queue {
 public:
  Queue() { std::thread(&Queue::work, this).detach(); }

  void add(std::function<void()> job) {
    const std::lock_guard<std::mutex> lock(mutex_);
    jobs_.push_back(std::move(job));
    changed_.notify_all();
  }
  void drain() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return jobs_.empty(); });
  }
  bool idle() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return jobs_.empty();
  }

 private:
  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return !jobs_.empty(); });
      {
        const std::function<void()> job = jobs_.front();
        lock.unlock();
        job();
      }
      lock.lock();
      jobs_.pop_front();
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> jobs_;  // the first is running
};

Queue& queue(c10::DeviceIndex device, c10::StreamId id) {
  static auto* queues = new std::map<std::pair<c10::DeviceIndex, c10::StreamId>, Queue*>();
  static auto* mutex = new std::mutex();
  const std::lock_guard<std::mutex> lock(*mutex);
  Queue*& found = (*queues)[{device, id}];
  if (found == nullptr) found = new Queue();
  return *found;
}
Queue& queue(const c10::Stream& stream) { return queue(stream.device_index(), stream.id()); }
Queue& current_queue(c10::DeviceIndex device) { return queue(device, current_stream[device]); }

void drain() {
  for (c10::DeviceIndex device = 0; device < kDevices; ++device) current_queue(device).drain();
}

struct Mark {
  std::mutex mutex;
  std::condition_variable passed;
  bool done = false;

  void set() {
    const std::lock_guard<std::mutex> lock(mutex);
    done = true;
    passed.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex);
    passed.wait(lock, [&] { return done; });
  }
};

struct Event {
  std::shared_ptr<Mark> mark;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = here();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return here(); }
  void setDevice(c10::Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current_device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::Stream getStream(c10::Device device) const override {
    const c10::DeviceIndex index = device.has_index() ? device.index() : current_device;
    return stream(index, current_stream[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream(device.has_index() ? device.index() : current_device, 0);
  }
  c10::Stream getNewStream(c10::Device device, int = 0) const override {
    static std::atomic<c10::StreamId> last{0};
    return stream(device.has_index() ? device.index() : current_device, ++last);
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    const c10::Stream before = getStream(next.device());
    current_stream[next.device_index()] = next.id();
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override { return queue(stream).idle(); }
  void synchronizeStream(const c10::Stream& stream) const override { queue(stream).drain(); }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event();
    auto mark = std::make_shared<Mark>();
    static_cast<Event*>(*event)->mark = mark;
    queue(stream).add([mark] { mark->set(); });
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    queue(stream).add([mark = static_cast<Event*>(event)->mark] { mark->wait(); });
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    Mark& mark = *static_cast<Event*>(event)->mark;
    const std::lock_guard<std::mutex> lock(mark.mutex);
    return mark.done;
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) static_cast<Event*>(event)->mark->wait();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
};

// -- memory ---------------------------------------------------------------------------------------

std::atomic<int64_t> allocated{0}, peak{0};

struct Block {
  void* memory;
  std::size_t bytes;
  c10::DeviceIndex device = current_device;
  c10::StreamId stream = current_stream[current_device];
  std::vector<c10::Stream> used_on;

  explicit Block(std::size_t size) : memory(std::aligned_alloc(64, (size + 63) / 64 * 64 + 64)), bytes(size) {
    const int64_t now = allocated += static_cast<int64_t>(bytes);
    int64_t most = peak;
    while (most < now && !peak.compare_exchange_weak(most, now)) {
    }
  }
  ~Block() {
    std::memset(memory, 0xff, bytes);
    if (!used_on.empty()) allocated -= static_cast<int64_t>(bytes);
    std::free(memory);
  }
};

// Frees as PyTorch's allocators do: in the order of the stream that it was allocated on, for which
// the memory counts as free at once, and when other streams that use it are done.
void free_block(void* context) {
  const std::shared_ptr<Block> block(static_cast<Block*>(context));
  if (block->used_on.empty()) allocated -= static_cast<int64_t>(block->bytes);
  Queue& own = queue(block->device, block->stream);
  if (!own.idle()) own.add([block] {});
  for (const c10::Stream& stream : block->used_on) queue(stream).add([block] {});
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes == 0) return {nullptr, here()};
    auto* block = new Block(bytes);
    return {block->memory, block, &free_block, here()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};

std::mutex pinned_mutex;
std::map<const char*, std::size_t> pinned;

void free_pinned(void* memory) {
  const std::lock_guard<std::mutex> lock(pinned_mutex);
  pinned.erase(static_cast<const char*>(memory));
  std::free(memory);
}

bool is_pinned(const void* address) {
  const std::lock_guard<std::mutex> lock(pinned_mutex);
  const auto after = pinned.upper_bound(static_cast<const char*>(address));
  if (after == pinned.begin()) return false;
  const auto& [begin, bytes] = *std::prev(after);
  return static_cast<const char*>(address) < begin + bytes;
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes == 0) return {nullptr, c10::kCPU};
    void* memory = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    const std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned[static_cast<const char*>(memory)] = bytes;
    return {memory, memory, &free_pinned, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};

Memory memory;
PinnedMemory pinned_memory;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(c10::DeviceIndex device) const override { current_device = device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return std::exchange(current_device, device);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
};

// -- ops ------------------------------------------------------------------------------------------

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                 std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

// The same memory as a CPU tensor, which does not keep it alive.
at::Tensor bare(const at::Tensor& x) {
  return at::from_blob(const_cast<void*>(x.const_data_ptr()), x.sizes(), x.strides(),
                       at::device(c10::kCPU).dtype(x.dtype()));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  const at::Tensor &host = from.is_cpu() ? from : to, &device = from.is_cpu() ? to : from, source = bare(from),
                   target = bare(to);
  const bool over_the_link = host.is_cpu();
  const bool across = !over_the_link && from.device() != to.device();  // both devices' streams wait for such a copy
  if (!across && (!over_the_link || (non_blocking && is_pinned(host.const_data_ptr())))) {
    // PyTorch too does not reuse pinned memory before streams are done with it.
    current_queue(device.device().index())
        .add([source, target, held = over_the_link ? host.storage() : c10::Storage()] {
          std::this_thread::sleep_for(held ? kDelay : kDelay / 7);
          const at::NoGradGuard no_grad;
          target.copy_(source);
        });
    return to;
  }
  drain();
  target.copy_(source);
  return to;
}

const at::Tensor& resize_(const at::Tensor& x, c10::IntArrayRef size, std::optional<c10::MemoryFormat>) {
  const auto needed = static_cast<std::size_t>(c10::multiply_integers(size)) * x.element_size();
  if (x.storage().nbytes() < needed) {
    x.storage().set_data_ptr_noswap(memory.allocate(needed));
    x.storage().set_nbytes(needed);
  }
  x.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return x;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const at::Tensor& x) {
  drain();
  return bare(x).item();
}

void record_stream(at::Tensor& x, c10::Stream stream) {
  if (x.storage().nbytes() == 0) return;
  static_cast<Block*>(x.storage().data_ptr().get_context())->used_on.push_back(stream);
}

// As on a GPU, an op refuses tensors on several devices; 0-d tensors and indices may be on the CPU.
void check_devices(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  std::optional<c10::Device> seen;
  const auto check = [&](const at::Tensor& x) {
    if (!x.defined() || (x.is_cpu() && (x.dim() == 0 || !x.is_floating_point()))) return;
    TORCH_CHECK(!seen || *seen == x.device(), op.schema().name(), ": expected all tensors on one device, got ", *seen,
                " and ", x.device());
    seen = x.device();
  };
  for (auto value = stack.end() - static_cast<int64_t>(op.schema().arguments().size()); value != stack.end(); ++value) {
    if (value->isTensor()) check(value->toTensor());
    if (!value->isTensorList()) continue;
    for (const at::Tensor& x : value->toTensorVector()) check(x);
  }
}

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  check_devices(op, *stack);
  drain();
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", static_cast<at::Tensor (*)(const at::Tensor&, c10::IntArrayRef)>(&at::native::view));
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("resize_", &resize_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("record_stream", &record_stream);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &memory)

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  m.def("current_device", [] { return static_cast<int>(current_device); });
  m.def("allocated", [] { return allocated.load(); });
  m.def("peak", [] { return peak.load(); });
  m.def("reset_peak", [] { peak = allocated.load(); });
}
