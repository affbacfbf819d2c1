// What the launcher knows about kernels: their table by dtypes and mode, one table per instruction
// set. No torch.
#pragma once

#include <cstdint>

#include "../types.h"

namespace fusedaccum {
namespace cpu {

constexpr int64_t kItemSize[kDTypes] = {8, 4, 2, 2};

// Bits of a kernel's mode.
enum Mode : int {
  kOverwrite = 1,    // the output is not read
  kStats = 2,        // sum squares of the output, count non-finite contributions
  kCountOutput = 4,  // with kOverwrite | kStats: count non-finite outputs instead
  kStream = 8,       // with kOverwrite: store past the caches; the output must be aligned to 64 bytes
  kStochastic = 16,  // 16-bit outputs only: round stochastically
  kModes = 32,
};

struct Parameters {
  double scale;
  double decay;
  uint64_t seed;
  uint64_t counter;  // index of the random number of the first element
  bool prefetch;     // even where that does not always pay
  void* low;         // low parts, of kernels that have them
};

// out[0..n) from in[0..n). Pointers need no alignment beyond their dtype's; nothing outside of
// [0, n) is touched. `partial` is written by kStats modes only.
using Kernel = void (*)(void* out, const void* in, int64_t n, const Parameters& parameters, Partial* partial);
// The squares and the non-finite count of in[0..n). `prefetch`: as in Parameters.
using StatsKernel = void (*)(const void* in, int64_t n, bool prefetch, Partial* partial);

constexpr int kPartsModes = 16;

struct KernelTable {
  const char* name;
  Kernel kernel[kModes][kDTypes][kDTypes];  // [mode][out][in], null where the mode makes no sense
  StatsKernel stats[kDTypes];
  // [op][mode][low parts][the other tensor (gradient, or output of a cast) is FP32]; kStream needs
  // low parts aligned to 32 bytes.
  Kernel parts[static_cast<int>(Op::kOps)][kPartsModes][kLowParts][2];
};

extern const KernelTable kernels_default;
#if defined(__x86_64__)
extern const KernelTable kernels_avx2;
extern const KernelTable kernels_avx512;
#endif

}  // namespace cpu
}  // namespace fusedaccum
