// Statistics of what a block reads or writes: squares added in FP64, elements that are not finite
// counted.
//
// No atomics: a block leaves one Partial, and add_up_kernel adds these up. Which thread sees which
// element, and the order of every sum, depend on the tensors' sizes alone, so that the same call
// gives the same bits.
#pragma once

#include "elements.h"
#include "kernels.h"

namespace fusedaccum {
namespace cuda {

constexpr int kWarp = 32;

template <class Count>  // no wider than it must be: registers are short
struct Tally {
  double squares = 0.0;
  Count bad = 0;

  FUSEDACCUM_DEVICE void square(double x) { squares += x * x; }

  // If not, all that was squared is finite, and none of it needs to be judged.
  FUSEDACCUM_DEVICE bool poisoned() const { return squares - squares != 0.0; }
  template <class T>
  FUSEDACCUM_DEVICE void judge(T x) {
    bad += x - x == T(0) ? 0 : 1;
  }

  FUSEDACCUM_DEVICE void add_warp() {
#pragma unroll
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
      squares += __shfl_down_sync(0xffffffffu, squares, distance);
      bad += __shfl_down_sync(0xffffffffu, bad, distance);
    }
  }

  // The sum over all kThreads threads of the block, all of which must call it; only thread 0 gets
  // it.
  template <int kThreads>
  FUSEDACCUM_DEVICE Partial add_block() {
    static_assert(kThreads % kWarp == 0 && kThreads <= kWarp * kWarp, "the first warp adds up the sums of all");
    __shared__ double warp_squares[kThreads / kWarp];
    __shared__ Count warp_bad[kThreads / kWarp];
    add_warp();
    if (threadIdx.x % kWarp == 0) {
      warp_squares[threadIdx.x / kWarp] = squares;
      warp_bad[threadIdx.x / kWarp] = bad;
    }
    __syncthreads();
    if (threadIdx.x < kWarp) {
      squares = threadIdx.x < kThreads / kWarp ? warp_squares[threadIdx.x] : 0.0;
      bad = threadIdx.x < kThreads / kWarp ? warp_bad[threadIdx.x] : 0;
      add_warp();
    }
    return {squares, static_cast<int64_t>(bad)};
  }
};

}  // namespace cuda
}  // namespace fusedaccum
