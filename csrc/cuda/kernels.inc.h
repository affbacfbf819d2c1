// Every op over many tensors in one launch. Both accumulate and cast are one kernel; a cast
// overwrites:
//
//   t = in * scale;  new = overwrite ? t : out * decay + t;  out = round(new)
//
// Bytes per element: in + 2 * out to add, in + out to overwrite or cast. A block takes a chunk of
// one tensor, tile by tile. A thread loads all of its packs of a tile before it uses the first.
// Whole tiles of aligned tensors move pack by pack; the others go through the same body, element by
// element. The tensors' table is a kernel argument, by value: nothing to copy to the device,
// nothing to keep alive. Offsets are 64 bits wide. Compile with -fmad=false.
#pragma once

#include "batch.h"
#include "elements.h"
#include "tally.h"

namespace fusedaccum {
namespace cuda {
namespace {

constexpr int kPacks = 2;       // packs per thread, tile and side: four loads where the output is read
constexpr int kStatsPacks = 4;  // where there is one side only

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

// The chunk of its tensor that a block works on, a tile of kTile packs at a time. Elements are
// counted from the chunk's first.
template <int kBlockThreads, int kCount, int kTilePacks>
struct Chunk {
  static constexpr int kTile = kBlockThreads * kTilePacks * kCount;
  const Pair& pair;
  int64_t first;  // in the tensor
  int elements;

  FUSEDACCUM_DEVICE explicit Chunk(const Batch& batch, int tensor) : pair(batch.pairs[tensor]) {
    first = static_cast<int64_t>(blockIdx.x - batch.first_block[tensor]) * kChunk;
    elements = static_cast<int>(pair.elements - first < kChunk ? pair.elements - first : kChunk);
  }

  // Where this thread's pack k of a tile begins. A warp's packs lie side by side.
  FUSEDACCUM_DEVICE static int at(int tile, int k) {
    return tile + (k * kBlockThreads + static_cast<int>(threadIdx.x)) * kCount;
  }

  // How many of its elements there are; 0 or less for none.
  FUSEDACCUM_DEVICE int valid(int at) const { return elements - at < kCount ? elements - at : kCount; }

  // work(tile, whole) for every tile; where `whole`, it may move packs.
  template <class Work>
  FUSEDACCUM_DEVICE void each_tile(bool aligned, Work work) const {
    int tile = 0;
    if (aligned) {
      for (; tile + kTile <= elements; tile += kTile) work(tile, std::true_type());
    }
    for (; tile < elements; tile += kTile) work(tile, std::false_type());
  }

  // work(at) for every element that this thread had in the tiles.
  template <class Work>
  FUSEDACCUM_DEVICE void each(Work work) const {
    for (int pack = static_cast<int>(threadIdx.x) * kCount; pack < elements; pack += kBlockThreads * kCount) {
      for (int i = 0; i < valid(pack); ++i) work(pack + i);
    }
  }
};

template <class Out, class In, bool kOverwrite, bool kStochastic, bool kStats>
__global__ void __launch_bounds__(kThreads<kStochastic>, kBlocks<kStochastic>)
    write_kernel(const __grid_constant__ Batch batch) {
  using C = Compute<Out, In>;
  constexpr int kCount = kPack<Out, In>;

  const Chunk<kThreads<kStochastic>, kCount, kPacks> chunk(batch, tensor_of(batch, blockIdx.x));
  Out* const output = static_cast<Out*>(chunk.pair.out) + chunk.first;
  const In* const input = static_cast<const In*>(chunk.pair.in) + chunk.first;

  const bool cast = batch.call.op == Op::kCast;
  const double exact_scale = value_of(batch.call.scale);
  const bool reads = cast || exact_scale != 0.0;  // an accumulate with scale 0 lets nothing of the gradient in
  const C scale = static_cast<C>(reads ? exact_scale : 0.0), decay = static_cast<C>(value_of(batch.call.decay));

  [[maybe_unused]] Tally<int> tally;
  const uint64_t numbers_from = chunk.pair.counter + static_cast<uint64_t>(chunk.first);
  // Scale 0 is rare enough to go the slow way, and so are random numbers that do not begin where a
  // pack's would.
  const bool in_packs =
      reads && is_aligned<kCount>(output) && is_aligned<kCount>(input) && (!kStochastic || numbers_from % kCount == 0);
  chunk.each_tile(in_packs, [&](int tile, auto whole) {
    constexpr bool kWhole = decltype(whole)::value;
    Pack<In, kCount> in[kPacks];
    Pack<Out, kCount> out[kPacks];
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      const int at = chunk.at(tile, k);
      if constexpr (kWhole) {
        in[k].load(input + at);
        if constexpr (!kOverwrite) out[k].load(output + at);
      } else {
        in[k].load(input + at, reads ? chunk.valid(at) : 0);
        if constexpr (!kOverwrite) out[k].load(output + at, chunk.valid(at));
      }
    }
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      const int at = chunk.at(tile, k);
      const int valid = kWhole ? kCount : chunk.valid(at);
      [[maybe_unused]] uint32_t numbers[kCount];
      if constexpr (kStochastic && kWhole) draw(numbers_from + at, batch.call.seed, numbers);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const C t = contribution(static_cast<C>(widened(in[k].x[i])), scale);
        const C next = kOverwrite ? t : accumulated(static_cast<C>(widened(out[k].x[i])), decay, t);
        if constexpr (kStochastic) {
          if constexpr (!kWhole) numbers[i] = random16(numbers_from + at + i, batch.call.seed);
          out[k].x[i] = Rounded<Out>::stochastic(static_cast<float>(next), numbers[i]);
        } else {
          out[k].x[i] = Rounded<Out>::nearest(next);
        }
        if constexpr (kStats) {
          if (i < valid) tally.square(static_cast<double>(widened(out[k].x[i])));
        }
      }
      if constexpr (kWhole) {
        out[k].store(output + at);
      } else {
        out[k].store(output + at, valid);
      }
    }
  });
  if constexpr (kStats) {
    if (tally.poisoned()) {
      chunk.each([&](int at) {
        const In in = reads ? input[at] : In{};
        tally.judge(cast ? static_cast<C>(widened(output[at])) : contribution(static_cast<C>(widened(in)), scale));
      });
    }
    const Partial sum = tally.template add_block<kThreads<kStochastic>>();
    if (threadIdx.x == 0) batch.call.partials[blockIdx.x] = sum;
  }
}

template <class In>
__global__ void __launch_bounds__(kThreads<false>, kBlocks<false>) stats_kernel(const __grid_constant__ Batch batch) {
  constexpr int kCount = kPack<In, In>;
  const Chunk<kThreads<false>, kCount, kStatsPacks> chunk(batch, tensor_of(batch, blockIdx.x));
  const In* const input = static_cast<const In*>(chunk.pair.in) + chunk.first;
  Tally<int> tally;
  chunk.each_tile(is_aligned<kCount>(input), [&](int tile, auto whole) {
    constexpr bool kWhole = decltype(whole)::value;
    Pack<In, kCount> in[kStatsPacks];
#pragma unroll
    for (int k = 0; k < kStatsPacks; ++k) {
      const int at = chunk.at(tile, k);
      if constexpr (kWhole) {
        in[k].load(input + at);
      } else {
        in[k].load(input + at, chunk.valid(at));  // zeros where there is nothing: they add nothing
      }
    }
#pragma unroll
    for (int k = 0; k < kStatsPacks; ++k) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) tally.square(static_cast<double>(widened(in[k].x[i])));
    }
  });
  if (tally.poisoned()) chunk.each([&](int at) { tally.judge(widened(input[at])); });
  const Partial sum = tally.template add_block<kThreads<false>>();
  if (threadIdx.x == 0) batch.call.partials[blockIdx.x] = sum;
}

// The ops on numbers in two parts: h, BF16, and low parts beside it. Bytes per element with low
// parts of 8 bits and BF16 gradients: 8 to add, 5 to overwrite, 5 to cast to BF16, 6 to scale.
// Other: the gradients, or the outputs of a cast; BF16 where there is neither.
template <Op kOp, class Low, class Other, bool kOverwrite, bool kStats>
__global__ void __launch_bounds__(kThreads<false>, kBlocks<false>) parts_kernel(const __grid_constant__ Batch batch) {
  constexpr bool kAdds = kOp == Op::kAccumulate, kCasts = kOp == Op::kCast, kWrites = kAdds || kOp == Op::kScale;
  constexpr bool kReads = !(kAdds && kOverwrite);
  constexpr int kCount = kPack<BF16, Other>;

  const Chunk<kThreads<false>, kCount, kPacks> chunk(batch, tensor_of(batch, blockIdx.x));
  void *const out = chunk.pair.out, *const in = const_cast<void*>(chunk.pair.in);
  BF16* const h = static_cast<BF16*>(kWrites ? out : in) + chunk.first;
  Other* const other = static_cast<Other*>(kCasts ? out : in) + chunk.first;
  Low* const low = reinterpret_cast<Low*>(static_cast<uintptr_t>(chunk.pair.counter)) + chunk.first;

  const double exact_scale = value_of(batch.call.scale);
  const bool lets_in = !kAdds || exact_scale != 0.0;
  const float scale = static_cast<float>(lets_in ? exact_scale : 0.0),
              decay = static_cast<float>(value_of(batch.call.decay));

  [[maybe_unused]] Tally<int> tally;
  const bool in_packs = lets_in && is_aligned<kCount>(h) && is_aligned<kCount>(low) && is_aligned<kCount>(other);
  chunk.each_tile(in_packs, [&](int tile, auto whole) {
    constexpr bool kWhole = decltype(whole)::value;
    Pack<Other, kCount> others[kPacks];
    Pack<BF16, kCount> uppers[kPacks];
    Pack<Low, kCount> lows[kPacks];
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      const int at = chunk.at(tile, k);
      if constexpr (kWhole) {
        if constexpr (kAdds) others[k].load(other + at);
        if constexpr (kReads) uppers[k].load(h + at), lows[k].load(low + at);
      } else {
        if constexpr (kAdds) others[k].load(other + at, lets_in ? chunk.valid(at) : 0);
        if constexpr (kReads) uppers[k].load(h + at, chunk.valid(at)), lows[k].load(low + at, chunk.valid(at));
      }
    }
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      const int at = chunk.at(tile, k);
      const int valid = kWhole ? kCount : chunk.valid(at);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        float x = 0.0f;
        if constexpr (kReads) x = joined(uppers[k].x[i], lows[k].x[i]);
        if constexpr (kAdds) {
          const float t = contribution(widened(others[k].x[i]), scale);
          x = kOverwrite ? t : accumulated(x, decay, t);
        } else if constexpr (kOp != Op::kStats) {
          x = contribution(x, scale);
        }
        if constexpr (kWrites) x = split(x, uppers[k].x[i], lows[k].x[i]);
        if constexpr (kCasts) {
          others[k].x[i] = Rounded<Other>::nearest(x);
          x = widened(others[k].x[i]);
        }
        if constexpr (kStats) {
          if (i < valid) tally.square(static_cast<double>(x));
        }
      }
      if constexpr (kWhole) {
        if constexpr (kWrites) uppers[k].store(h + at), lows[k].store(low + at);
        if constexpr (kCasts) others[k].store(other + at);
      } else {
        if constexpr (kWrites) uppers[k].store(h + at, valid), lows[k].store(low + at, valid);
        if constexpr (kCasts) others[k].store(other + at, valid);
      }
    }
  });
  if constexpr (kStats) {
    if (tally.poisoned()) {
      chunk.each([&](int at) {
        if constexpr (kAdds) {
          tally.judge(contribution(lets_in ? widened(other[at]) : 0.0f, scale));
        } else {
          tally.judge(kCasts ? widened(other[at]) : joined(h[at], low[at]));
        }
      });
    }
    const Partial sum = tally.template add_block<kThreads<false>>();
    if (threadIdx.x == 0) batch.call.partials[blockIdx.x] = sum;
  }
}

constexpr int kAddUpLoads = 8;  // of a thread, under way together

__global__ void __launch_bounds__(kAddUpThreads) add_up_kernel(const __grid_constant__ AddUp work) {
  Tally<int64_t> tally;
  for (int64_t first = threadIdx.x; first < work.count; first += kAddUpThreads * kAddUpLoads) {
    Partial partials[kAddUpLoads];
#pragma unroll
    for (int k = 0; k < kAddUpLoads; ++k) {
      const int64_t i = first + k * kAddUpThreads;
      partials[k] = i < work.count ? work.partials[i] : Partial{0.0, 0};
    }
#pragma unroll
    for (int k = 0; k < kAddUpLoads; ++k) {
      tally.squares += partials[k].sq_norm;
      tally.bad += partials[k].nonfinite;
    }
  }
  const Partial sum = tally.add_block<kAddUpThreads>();
  if (threadIdx.x != 0) return;
  *work.sq_norm = sum.sq_norm;
  *work.nonfinite = sum.nonfinite;
}

}  // namespace
}  // namespace cuda
}  // namespace fusedaccum
