// Every op over many tensors in one launch. Both accumulate and cast are modes of one kernel:
//
//   t = in * scale;  new = overwrite or cast ? t : out * decay + t;  out = round(new)
//
// Bytes an element: in + 2 * out to add, in + out to overwrite or cast. Where output and input start at 16 bytes, all full packs move
// in 16-byte loads and stores; elsewhere, and in a tensor's last pack, the same body moves single elements. The tensors' table is a
// kernel argument, by value: nothing to copy to the device, nothing to keep alive. Offsets are 64 bits wide. Compile with -fmad=false.
#include "elements.h"
#include "kernels.h"
#include "tally.h"

namespace fusedaccum {
namespace cuda {
namespace {

// Kernel arguments may hold 32,764 bytes from CUDA 12.1 on, 4,096 before.
constexpr int kArgumentBytes = CUDART_VERSION >= 12010 ? 32764 : 4096;
constexpr int kTensors = (kArgumentBytes - static_cast<int>(sizeof(Call)) - 16) / static_cast<int>(sizeof(Pair) + sizeof(uint32_t));

struct Batch {
  Pair pairs[kTensors];
  Call call;
  uint32_t first_block[kTensors];  // number of the block that takes each tensor's first chunk
  int tensors;
};
static_assert(sizeof(Batch) <= kArgumentBytes, "the table must fit into the kernel's arguments");

FUSEDACCUM_DEVICE double value_of(const Scalar& scalar) {
  if (scalar.device_f64 != nullptr) return *scalar.device_f64;
  return scalar.device_f32 != nullptr ? static_cast<double>(*scalar.device_f32) : scalar.host;
}

// The tensor of a block: the last one whose first block is not after it.
FUSEDACCUM_DEVICE int tensor_of(const Batch& batch, uint32_t block) {
  int low = 0, high = batch.tensors;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (batch.first_block[middle] <= block) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// The stretch of its tensor that a block works on, a pack a thread and round.
struct Stretch {
  const Pair& pair;
  int64_t begin, end;

  FUSEDACCUM_DEVICE explicit Stretch(const Batch& batch, int tensor) : pair(batch.pairs[tensor]) {
    begin = static_cast<int64_t>(blockIdx.x - batch.first_block[tensor]) * kChunk;
    end = begin + kChunk < pair.elements ? begin + kChunk : pair.elements;
  }
  template <int kCount>
  FUSEDACCUM_DEVICE int valid(int64_t at) const {
    return end - at < kCount ? static_cast<int>(end - at) : kCount;
  }
};

template <class Out, class In, bool kStochastic, bool kStats>
__global__ void __launch_bounds__(kThreads) write_kernel(const __grid_constant__ Batch batch) {
  using C = typename Compute<Out, In>::type;
  constexpr int kCount = kPack<Out, In>;

  const Stretch stretch(batch, tensor_of(batch, blockIdx.x));
  Out* const output = static_cast<Out*>(stretch.pair.out);
  const In* const input = static_cast<const In*>(stretch.pair.in);
  const bool aligned = is_aligned(output) && is_aligned(input);

  const bool cast = batch.call.op == Op::kCast;
  const bool overwrite = cast || batch.call.overwrite;
  const double exact_scale = value_of(batch.call.scale);
  const bool reads = cast || exact_scale != 0.0;  // an accumulate with scale 0 lets nothing of the gradient in
  const C scale = static_cast<C>(reads ? exact_scale : 0.0), decay = static_cast<C>(value_of(batch.call.decay));

  [[maybe_unused]] Tally<int> tally;
  for (int64_t at = stretch.begin + threadIdx.x * kCount; at < stretch.end; at += kThreads * kCount) {
    const int valid = stretch.valid<kCount>(at);
    Pack<In, kCount> in = {};
    Pack<Out, kCount> out = {};
    if (reads) in.load(input + at, valid, aligned);
    if (!overwrite) out.load(output + at, valid, aligned);

    [[maybe_unused]] uint32_t numbers[16];
    if constexpr (kStochastic) draw(stretch.pair.counter + static_cast<uint64_t>(at), batch.call.seed, numbers);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const C t = contribution(static_cast<C>(widened(in.x[i])), scale);
      const C next = overwrite ? t : accumulated(static_cast<C>(widened(out.x[i])), decay, t);
      if constexpr (kStochastic) {
        out.x[i] = Rounded<Out>::stochastic(static_cast<float>(next), numbers[i]);
      } else {
        out.x[i] = Rounded<Out>::nearest(next);
      }
      if constexpr (kStats) {
        if (i < valid) tally.judge(cast ? static_cast<C>(widened(out.x[i])) : t);
      }
    }
    if constexpr (kStats) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) tally.square(i < valid ? static_cast<double>(widened(out.x[i])) : 0.0);
    }
    out.store(output + at, valid, aligned);
  }
  if constexpr (kStats) {
    const Partial sum = tally.add_block();
    if (threadIdx.x == 0) batch.call.partials[blockIdx.x] = sum;
  }
}

template <class In>
__global__ void __launch_bounds__(kThreads) stats_kernel(const __grid_constant__ Batch batch) {
  constexpr int kCount = kPack<In, In>;
  const Stretch stretch(batch, tensor_of(batch, blockIdx.x));
  const In* const input = static_cast<const In*>(stretch.pair.in);
  const bool aligned = is_aligned(input);
  Tally<int> tally;
  for (int64_t at = stretch.begin + threadIdx.x * kCount; at < stretch.end; at += kThreads * kCount) {
    Pack<In, kCount> in;
    in.load(input + at, stretch.valid<kCount>(at), aligned);  // zeros where there is nothing: they add nothing
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      tally.square(static_cast<double>(widened(in.x[i])));
      tally.judge(widened(in.x[i]));
    }
  }
  const Partial sum = tally.add_block();
  if (threadIdx.x == 0) batch.call.partials[blockIdx.x] = sum;
}

struct AddUp {
  const Partial* partials;
  int64_t count;
  double* sq_norm;
  int64_t* nonfinite;
};

__global__ void __launch_bounds__(kThreads) add_up_kernel(const __grid_constant__ AddUp work) {
  Tally<int64_t> tally;
  for (int64_t i = threadIdx.x; i < work.count; i += kThreads) {
    tally.squares += work.partials[i].sq_norm;
    tally.bad += work.partials[i].nonfinite;
  }
  const Partial sum = tally.add_block();
  if (threadIdx.x != 0) return;
  *work.sq_norm = sum.sq_norm;
  *work.nonfinite = sum.nonfinite;
}

// -- launch ---------------------------------------------------------------------------------------------------------------

using Kernel = void (*)(Batch);

template <class Out, class In>
Kernel write_kernel_for(bool stochastic, bool stats) {
  if constexpr (sizeof(Out) == 2) {
    if (stochastic) return stats ? write_kernel<Out, In, true, true> : write_kernel<Out, In, true, false>;
  }
  return stats ? write_kernel<Out, In, false, true> : write_kernel<Out, In, false, false>;
}

Kernel kernel_for(DType out, DType in, const Call& call) {
  using KernelFor = Kernel (*)(bool, bool);
  static constexpr KernelFor kWrite[kDTypes][kDTypes] = {
      // [out][in]
      {write_kernel_for<double, double>, write_kernel_for<double, float>, write_kernel_for<double, BF16>, write_kernel_for<double, FP16>},
      {write_kernel_for<float, double>, write_kernel_for<float, float>, write_kernel_for<float, BF16>, write_kernel_for<float, FP16>},
      {write_kernel_for<BF16, double>, write_kernel_for<BF16, float>, write_kernel_for<BF16, BF16>, write_kernel_for<BF16, FP16>},
      {write_kernel_for<FP16, double>, write_kernel_for<FP16, float>, write_kernel_for<FP16, BF16>, write_kernel_for<FP16, FP16>},
  };
  static constexpr Kernel kStats[kDTypes] = {stats_kernel<double>, stats_kernel<float>, stats_kernel<BF16>, stats_kernel<FP16>};
  if (call.op == Op::kStats) return kStats[in];
  return kWrite[out][in](call.stochastic, call.partials != nullptr);
}

}  // namespace

cudaError_t run(const Pair* pairs, std::size_t count, DType out, DType in, const Call& call, cudaStream_t stream) {
  const Kernel kernel = kernel_for(out, in, call);
  Batch batch;
  batch.call = call;
  batch.tensors = 0;
  uint32_t blocks = 0;  // a grid may have 2^31 - 1 blocks, 2^45 elements: more than any device holds
  for (std::size_t k = 0; k < count; ++k) {
    if (pairs[k].elements > 0) {
      batch.pairs[batch.tensors] = pairs[k];
      batch.first_block[batch.tensors++] = blocks;
      blocks += static_cast<uint32_t>(blocks_of(pairs[k].elements));
    }
    if (batch.tensors == kTensors || (k + 1 == count && batch.tensors > 0)) {
      void* arguments[] = {&batch};
      const cudaError_t error = cudaLaunchKernel(kernel, dim3(blocks), dim3(kThreads), arguments, 0, stream);
      if (error != cudaSuccess) return error;
      if (batch.call.partials != nullptr) batch.call.partials += blocks;
      batch.tensors = 0;
      blocks = 0;
    }
  }
  return cudaSuccess;
}

cudaError_t add_up(const Partial* partials, int64_t count, double* sq_norm, int64_t* nonfinite, cudaStream_t stream) {
  AddUp work{partials, count, sq_norm, nonfinite};
  void* arguments[] = {&work};
  return cudaLaunchKernel(add_up_kernel, dim3(1), dim3(kThreads), arguments, 0, stream);
}

}  // namespace cuda
}  // namespace fusedaccum
