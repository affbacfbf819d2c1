// From lists of raw pointers to kernel calls on chunks, on as many threads as the caller offers. No
// torch, no formula.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "kernels.h"

namespace fusedaccum {
namespace cpu {

struct Pair {
  void* out;
  const void* in;  // equal to out for scale
  int64_t n;
  DType out_type;
  DType in_type;
  void* low = nullptr;  // low parts of the output or, for a cast and stats, of the input
};

struct Call {
  Op op = Op::kAccumulate;
  bool overwrite = false;
  double scale = 1.0;
  double decay = 1.0;
  bool stochastic = false;
  uint64_t seed = 0;
  std::vector<uint64_t> counters;  // one per pair, when stochastic
  LowParts low = kNoLow;
};

// Calls `work` with each of 0 .. count - 1, perhaps concurrently, and returns when all are done.
using Parallel = std::function<void(int64_t count, const std::function<void(int64_t)>& work)>;

// Runs a call over all pairs. Adds up `total`, in an order that does not depend on `threads`,
// unless it is null.
void launch(const std::vector<Pair>& pairs, const Call& call, int threads, const Parallel& parallel, Partial* total);

}  // namespace cpu
}  // namespace fusedaccum
