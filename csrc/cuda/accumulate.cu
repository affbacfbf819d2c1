// accumulate over many tensors in one launch:  t = grad * scale;  new = overwrite ? t : buffer * decay + t;  buffer = round(new)
//
// Bytes an element: grad + 2 * buffer to add, grad + buffer to overwrite. Where buffer and gradient start at 16 bytes, all full packs
// move in 16-byte loads and stores; elsewhere, and in a tensor's last pack, the same body moves single elements. The tensors' table is
// a kernel argument, by value: nothing to copy to the device, nothing to keep alive. Offsets are 64 bits wide. Compile with -fmad=false.
#include "../formulas.h"
#include "accumulate.h"

namespace fusedaccum {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kChunk = 16384;  // elements a block takes on; a multiple of kThreads * pack, so that chunks start aligned

// Kernel arguments may hold 32,764 bytes from CUDA 12.1 on, 4,096 before.
constexpr int kArgumentBytes = CUDART_VERSION >= 12010 ? 32764 : 4096;
constexpr int kTensors = (kArgumentBytes - static_cast<int>(sizeof(Call)) - 16) / static_cast<int>(sizeof(Pair) + sizeof(uint32_t));

struct Batch {
  Pair pairs[kTensors];
  Call call;
  uint32_t first_chunk[kTensors];  // number of each tensor's first chunk; block b works on chunk b
  int tensors;
};
static_assert(sizeof(Batch) <= kArgumentBytes, "the table must fit into the kernel's arguments");

// -- dtypes: how elements lie in memory, and their way into and out of the compute type C --------------------------------

struct BF16 {
  uint16_t bits;
};
struct FP16 {
  uint16_t bits;
};

__device__ __forceinline__ double widened(double x) { return x; }
__device__ __forceinline__ float widened(float x) { return x; }
__device__ __forceinline__ float widened(BF16 x) { return bitcast<float>(uint32_t{x.bits} << 16); }
__device__ __forceinline__ float widened(FP16 x) { return fp16_to_float<float, uint32_t>(x.bits); }

template <class Out>
struct Rounded {  // to FP64 and FP32
  static __device__ __forceinline__ Out nearest(double x) { return static_cast<Out>(x); }
  static __device__ __forceinline__ Out nearest(float x) { return static_cast<Out>(x); }
};
template <>
struct Rounded<BF16> {  // from FP64 by way of FP32
  static __device__ __forceinline__ BF16 nearest(float x) { return upper(float_to_bf16_upper<float, uint32_t>(x)); }
  static __device__ __forceinline__ BF16 stochastic(float x, uint32_t r) { return upper(float_to_bf16_upper_stochastic(x, r)); }
  static __device__ __forceinline__ BF16 upper(uint32_t bits) { return {static_cast<uint16_t>(bits >> 16)}; }
};
template <>
struct Rounded<FP16> {
  static __device__ __forceinline__ FP16 nearest(float x) { return {static_cast<uint16_t>(float_to_fp16<float, uint32_t>(x))}; }
  static __device__ __forceinline__ FP16 stochastic(float x, uint32_t r) { return {static_cast<uint16_t>(float_to_fp16_stochastic(x, r))}; }
};

template <class Out, class In>
struct Compute {
  using type = float;
};
template <class In>
struct Compute<double, In> {
  using type = double;
};
template <class Out>
struct Compute<Out, double> {
  using type = double;
};
template <>
struct Compute<double, double> {
  using type = double;
};

// -- packs: what a thread moves at a time, 16 bytes of the narrower side --------------------------------------------------

template <class Out, class In>
constexpr int kPack = 16 / static_cast<int>(sizeof(Out) < sizeof(In) ? sizeof(Out) : sizeof(In));

template <class T, int kCount>
struct alignas(16) Pack {
  static constexpr int kVectors = kCount * static_cast<int>(sizeof(T)) / 16;
  T x[kCount];

  __device__ __forceinline__ void load(const T* from, int valid, bool aligned) {
    if (aligned && valid == kCount) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) reinterpret_cast<uint4*>(x)[i] = reinterpret_cast<const uint4*>(from)[i];
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) x[i] = i < valid ? from[i] : T{};
    }
  }

  __device__ __forceinline__ void store(T* to, int valid, bool aligned) const {
    if (aligned && valid == kCount) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(x)[i];
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (i < valid) to[i] = x[i];
      }
    }
  }
};

__device__ __forceinline__ double value_of(const Scalar& scalar) {
  if (scalar.device_f64 != nullptr) return *scalar.device_f64;
  return scalar.device_f32 != nullptr ? static_cast<double>(*scalar.device_f32) : scalar.host;
}

// The tensor of a chunk: the last one whose first chunk is not after it.
__device__ __forceinline__ int tensor_of(const Batch& batch, uint32_t chunk) {
  int low = 0, high = batch.tensors;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (batch.first_chunk[middle] <= chunk) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

template <int kStep>
__device__ __forceinline__ void move_down(uint32_t (&numbers)[16], uint64_t n) {
#pragma unroll
  for (int i = 0; i + kStep < 16; ++i) numbers[i] = (n & kStep) != 0 ? numbers[i + kStep] : numbers[i];
}

// The random numbers n to n + 7. They lie in one or two blocks of 8: 16 are drawn and moved down by n % 8, a bit of it at a time.
__device__ __forceinline__ void draw(uint64_t n, uint64_t seed, uint32_t (&numbers)[16]) {
  uint32_t words[2][4] = {};
  random_block(n >> 3, seed, words[0]);
  if (n % 8 != 0) random_block((n + 8) >> 3, seed, words[1]);  // n + 8 wraps, as counting does
#pragma unroll
  for (int i = 0; i < 16; ++i) numbers[i] = (words[i / 8][i % 8 / 2] >> (16 * (i % 2))) & 0xffffu;
  move_down<4>(numbers, n);
  move_down<2>(numbers, n);
  move_down<1>(numbers, n);
}

template <class Out, class In, bool kStochastic>
__global__ void __launch_bounds__(kThreads) accumulate_kernel(const __grid_constant__ Batch batch) {
  using C = typename Compute<Out, In>::type;
  constexpr int kCount = kPack<Out, In>;

  const int tensor = tensor_of(batch, blockIdx.x);
  const Pair& pair = batch.pairs[tensor];
  Out* const buffer = static_cast<Out*>(pair.buffer);
  const In* const grad = static_cast<const In*>(pair.grad);
  const bool aligned = (reinterpret_cast<uintptr_t>(buffer) | reinterpret_cast<uintptr_t>(grad)) % 16 == 0;

  const double exact_scale = value_of(batch.call.scale);
  const bool adds = exact_scale != 0.0;  // else the gradient is not even read: nothing of it may get in
  const C scale = static_cast<C>(exact_scale), decay = static_cast<C>(value_of(batch.call.decay));

  const int64_t begin = static_cast<int64_t>(blockIdx.x - batch.first_chunk[tensor]) * kChunk;
  const int64_t end = begin + kChunk < pair.elements ? begin + kChunk : pair.elements;
  for (int64_t at = begin + threadIdx.x * kCount; at < end; at += kThreads * kCount) {
    const int valid = end - at < kCount ? static_cast<int>(end - at) : kCount;
    Pack<In, kCount> in = {};
    Pack<Out, kCount> out = {};
    if (adds) in.load(grad + at, valid, aligned);
    if (!batch.call.overwrite) out.load(buffer + at, valid, aligned);

    [[maybe_unused]] uint32_t numbers[16];
    if constexpr (kStochastic) draw(pair.counter + static_cast<uint64_t>(at), batch.call.seed, numbers);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const C t = contribution(static_cast<C>(widened(in.x[i])), scale);
      const C next = batch.call.overwrite ? t : accumulated(static_cast<C>(widened(out.x[i])), decay, t);
      if constexpr (kStochastic) {
        out.x[i] = Rounded<Out>::stochastic(static_cast<float>(next), numbers[i]);
      } else {
        out.x[i] = Rounded<Out>::nearest(next);
      }
    }
    out.store(buffer + at, valid, aligned);
  }
}

// -- launch ---------------------------------------------------------------------------------------------------------------

using Kernel = void (*)(Batch);

template <class Out, class In>
constexpr Kernel kernel_for(bool stochastic) {
  if constexpr (sizeof(Out) == 2) {
    if (stochastic) return accumulate_kernel<Out, In, true>;
  }
  return accumulate_kernel<Out, In, false>;
}

using KernelFor = Kernel (*)(bool);
constexpr KernelFor kKernelFor[kDTypes][kDTypes] = {
    // [buffer][grad]
    {kernel_for<double, double>, kernel_for<double, float>, kernel_for<double, BF16>, kernel_for<double, FP16>},
    {kernel_for<float, double>, kernel_for<float, float>, kernel_for<float, BF16>, kernel_for<float, FP16>},
    {kernel_for<BF16, double>, kernel_for<BF16, float>, kernel_for<BF16, BF16>, kernel_for<BF16, FP16>},
    {kernel_for<FP16, double>, kernel_for<FP16, float>, kernel_for<FP16, BF16>, kernel_for<FP16, FP16>},
};

}  // namespace

cudaError_t accumulate(const Pair* pairs, std::size_t count, DType buffer, DType grad, const Call& call, cudaStream_t stream) {
  const Kernel kernel = kKernelFor[buffer][grad](call.stochastic);
  Batch batch;
  batch.call = call;
  batch.tensors = 0;
  uint32_t chunks = 0;  // a grid may have 2^31 - 1 blocks, 2^45 elements: more than any device holds
  for (std::size_t k = 0; k < count; ++k) {
    if (pairs[k].elements > 0) {
      batch.pairs[batch.tensors] = pairs[k];
      batch.first_chunk[batch.tensors++] = chunks;
      chunks += static_cast<uint32_t>((pairs[k].elements + kChunk - 1) / kChunk);
    }
    if (batch.tensors == kTensors || (k + 1 == count && batch.tensors > 0)) {
      void* arguments[] = {&batch};
      const cudaError_t error = cudaLaunchKernel(kernel, dim3(chunks), dim3(kThreads), arguments, 0, stream);
      if (error != cudaSuccess) return error;
      batch.tensors = 0;
      chunks = 0;
    }
  }
  return cudaSuccess;
}

}  // namespace cuda
}  // namespace fusedaccum
