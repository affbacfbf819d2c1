// The kernels' arguments, by value, and how a list of tensors becomes a few of them: for the
// kernels and for both launchers.
#pragma once

#include "kernels.h"

namespace fusedaccum {
namespace cuda {

// Threads of a block, of which a multiprocessor has room for so many at least: docs/decisions.md.
// Two tiles are a chunk then; stochastic rounding, which computes for as long as it moves, is
// faster with four.
template <bool kStochastic>
constexpr int kThreads = kStochastic ? 256 : 512;
template <bool kStochastic>
constexpr int kBlocks = kStochastic ? 3 : 2;

constexpr int kArgumentBytes = 32764;
constexpr int kTensors =
    (kArgumentBytes - static_cast<int>(sizeof(Call)) - 16) / static_cast<int>(sizeof(Pair) + sizeof(uint32_t));

struct Batch {
  Pair pairs[kTensors];
  Call call;
  uint32_t first_block[kTensors];  // number of the block that takes each tensor's first chunk
  int tensors;
};
static_assert(sizeof(Batch) <= kArgumentBytes, "the table must fit into the kernel's arguments");

constexpr int kAddUpThreads = 512;  // of its one block, which waits for memory and for little else

// launch(batch, blocks) until all tensors are in a launch, or one of them fails: returns its error,
// or 0.
template <class Launch>
int in_batches(const Pair* pairs, std::size_t count, const Call& call, Launch launch) {
  Batch batch;
  batch.call = call;
  batch.tensors = 0;
  uint32_t blocks = 0;  // a grid may have 2^31 - 1 blocks, 2^44 elements: more than any device holds
  for (std::size_t k = 0; k < count; ++k) {
    if (pairs[k].elements > 0) {
      batch.pairs[batch.tensors] = pairs[k];
      batch.first_block[batch.tensors++] = blocks;
      blocks += static_cast<uint32_t>(blocks_of(pairs[k].elements));
    }
    if (batch.tensors == kTensors || (k + 1 == count && batch.tensors > 0)) {
      const int error = launch(batch, blocks);
      if (error != 0) return error;
      if (batch.call.partials != nullptr) batch.call.partials += blocks;
      batch.tensors = 0;
      blocks = 0;
    }
  }
  return 0;
}

// Threads of a block of the kernel that works on these dtypes.
inline int threads_of(DType out, const Call& call) {
  return call.stochastic && (out == kBF16 || out == kFP16) ? kThreads<true> : kThreads<false>;
}

}  // namespace cuda
}  // namespace fusedaccum
