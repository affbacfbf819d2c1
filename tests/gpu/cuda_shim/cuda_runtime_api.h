// A stand-in for CUDA's header: enough of it to run csrc/cuda on the CPU, block after block. For
// tests only.
//
// The threads of a block are fibers on one CPU thread. Each runs up to its next barrier or shuffle,
// in an order that is drawn afresh every time, so that a missing barrier shows as a wrong result. A
// barrier that not all threads reach aborts.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

#define CUDART_VERSION 13000
#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct dim3 {
  explicit dim3(unsigned count = 0) : x(count) {}
  unsigned x;
};
using cudaStream_t = void*;
enum cudaError_t { cudaSuccess };

inline dim3 blockIdx, threadIdx;
inline int launches = 0;

namespace shim {

constexpr unsigned kWarp = 32;
constexpr std::size_t kStack = 256 << 10;  // a kernel's arguments alone take 32 KB

enum class State { kReady, kAtWarp, kAtBlock, kDone };

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[kStack]};  // not filled: most of it is never touched
  State state = State::kReady;
  uint64_t exchanged = 0;
  void* fake_stack = nullptr;
};

inline std::vector<Fiber> fibers;
inline ucontext_t scheduler;
inline void* scheduler_fake_stack = nullptr;
inline const void* scheduler_stack = nullptr;
inline std::size_t scheduler_size = 0;
inline std::function<void()> body;
inline std::mt19937 order(12345);

// Tell AddressSanitizer about a switch of stacks.
inline void leaving([[maybe_unused]] void** fake, [[maybe_unused]] const void* to, [[maybe_unused]] std::size_t size) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(fake, to, size);
#endif
}
inline void arrived([[maybe_unused]] void* fake, [[maybe_unused]] const void** from,
                    [[maybe_unused]] std::size_t* size) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake, from, size);
#endif
}

inline void wait(State state) {
  Fiber& self = fibers[threadIdx.x];
  self.state = state;
  leaving(state == State::kDone ? nullptr : &self.fake_stack, scheduler_stack, scheduler_size);
  swapcontext(&self.context, &scheduler);
  arrived(self.fake_stack, &scheduler_stack, &scheduler_size);
}

inline void thread_main() {
  arrived(nullptr, &scheduler_stack, &scheduler_size);
  body();
  wait(State::kDone);
}

inline void resume(unsigned thread) {
  Fiber& fiber = fibers[thread];
  threadIdx.x = thread;
  leaving(&scheduler_fake_stack, fiber.stack.get(), kStack);
  swapcontext(&scheduler, &fiber.context);
  arrived(scheduler_fake_stack, nullptr, nullptr);
}

// Lets threads [begin, end) go on if all that have not ended wait in `state`; returns whether any
// did.
inline bool release(unsigned begin, unsigned end, State state) {
  const auto waits = [&](unsigned t) { return fibers[t].state == state; };
  const auto ended = [&](unsigned t) { return fibers[t].state == State::kDone; };
  bool any = false;
  for (unsigned t = begin; t < end; ++t) {
    if (!waits(t) && !ended(t)) return false;
    any = any || waits(t);
  }
  for (unsigned t = begin; t < end; ++t) {
    if (waits(t)) fibers[t].state = State::kReady;
  }
  return any;
}

inline void run_block(unsigned threads) {
  fibers.resize(threads);
  for (Fiber& fiber : fibers) {
    fiber.state = State::kReady;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStack;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, thread_main, 0);
  }
  std::vector<unsigned> turns(threads);
  for (unsigned t = 0; t < threads; ++t) turns[t] = t;
  for (;;) {
    std::shuffle(turns.begin(), turns.end(), order);
    for (unsigned t : turns) {
      if (fibers[t].state == State::kReady) resume(t);
    }
    if (std::all_of(fibers.begin(), fibers.end(), [](const Fiber& f) { return f.state == State::kDone; })) return;
    bool released = false;
    for (unsigned t = 0; t < threads; t += kWarp) released |= release(t, std::min(t + kWarp, threads), State::kAtWarp);
    if (!released && !release(0, threads, State::kAtBlock)) {
      std::fprintf(stderr, "shim: a barrier that not all threads reach\n");
      std::abort();
    }
  }
}

}  // namespace shim

#if defined(SHIM_WITHOUT_BARRIERS)  // a planted fault: the tests must notice
inline void __syncthreads() {}
#else
inline void __syncthreads() { shim::wait(shim::State::kAtBlock); }
#endif

// These stand in for what csrc/cuda/elements.h has in assembly.
template <class T>
void store_whole(T* to, T value) {
  *to = value;
}
inline float fp16_to_fp32(uint16_t bits) {
  _Float16 value;
  std::memcpy(&value, &bits, sizeof(value));
  return static_cast<float>(value);
}
inline uint16_t fp32_to_fp16(float x) {
  const auto value = static_cast<_Float16>(x);
  uint16_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}
inline uint16_t fp32_to_bf16(float x) {  // by the definition; a NaN's bits are those of CUDA
  if (std::isnan(x)) return 0x7fff;
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const uint32_t below = bits >> 16,
                 lost = bits & 0xffff;  // the neighbour towards zero, and the distance to it: 0x8000 is half way
  const bool up = lost > 0x8000 || (lost == 0x8000 && below % 2 == 1);
  return static_cast<uint16_t>(below + up);
}

template <class T>
T __shfl_down_sync(unsigned, T value, unsigned distance) {
  static_assert(sizeof(T) <= sizeof(uint64_t), "a word or two");
  const unsigned self = threadIdx.x, other = self % shim::kWarp + distance < shim::kWarp ? self + distance : self;
  std::memcpy(&shim::fibers[self].exchanged, &value, sizeof(T));
  shim::wait(shim::State::kAtWarp);
  T theirs;
  std::memcpy(&theirs, &shim::fibers[other].exchanged, sizeof(T));
  shim::wait(shim::State::kAtWarp);
  return theirs;
}

template <class Arguments>
cudaError_t cudaLaunchKernel(void (*kernel)(Arguments), dim3 grid, dim3 block, void** arguments, std::size_t,
                             cudaStream_t) {
  ++launches;
  shim::body = [=] { kernel(*static_cast<Arguments*>(arguments[0])); };
  for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) shim::run_block(block.x);
  return cudaSuccess;
}
