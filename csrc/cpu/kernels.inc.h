// The CPU kernels: accumulate (with cast and scale as modes of it) and stats, for one instruction
// set.
//
//   t = in * scale;  new = overwrite ? t : out * decay + t;  out = round(new)
//
// Bytes per element: in + 2 * out to add, in + out to overwrite when streamed (a plain store reads
// the line first). No alignment is required. All elements go through one body, 32 at a time; the
// last ones through a padded copy, so that the memory around them is neither read nor written.
// Included by kernels_<isa>.cpp, which define FUSEDACCUM_ISA. No function here may be shared
// between instruction sets (the linker would keep any one of them): all are inlined or in
// FUSEDACCUM_ISA, none is from std.
#pragma once

#include <tuple>
#include <utility>

#include "draws.h"
#include "measures.h"
#include "parts.h"
#include "stores.h"

namespace fusedaccum {
namespace cpu {
namespace FUSEDACCUM_ISA {

// Thirty-two elements: read, compute, round, write; returns what was written.
template <int kMode, class Out, class In, class C>
struct Step {
  static constexpr bool kSplit = std::is_same_v<Out, BF16> && std::is_same_v<In, BF16> && (kMode & kStochastic) == 0;
  typename Pack<C>::Vector scale, decay;

  FUSEDACCUM_INLINE explicit Step(const Parameters& p)
      : scale(Pack<C>::all(static_cast<C>(p.scale)).v[0]), decay(Pack<C>::all(static_cast<C>(p.decay)).v[0]) {}

  FUSEDACCUM_INLINE auto operator()(Out* out, const In* in, Draws* draws) const {
    Pack<C> x = as<C>(read<kSplit>(in));
    FUSEDACCUM_UNROLL
    for (int i = 0; i < Pack<C>::kCount; ++i) x.v[i] = contribution(x.v[i], scale);
    if constexpr ((kMode & kOverwrite) == 0) {
      const Pack<C> buffer = as<C>(read<kSplit>(out));
      FUSEDACCUM_UNROLL
      for (int i = 0; i < Pack<C>::kCount; ++i) x.v[i] = accumulated(buffer.v[i], decay, x.v[i]);
    }
    constexpr bool kStreamed = (kMode & kStream) != 0;
    if constexpr ((kMode & kStochastic) != 0) {
      return store_stochastic(out, x, draws->next());
    } else if constexpr (kSplit) {
      return store_split<kStreamed>(out, x);
    } else {
      return store<kStreamed>(out, x);
    }
  }
};

// False for steps that compute little, such as an add into FP32.
template <int kMode, class Out, class In>
constexpr bool kComputesMuch = sizeof(Out) < sizeof(float) || ((kMode & kStats) != 0 && sizeof(In) < sizeof(float));

template <int kMode, class Out, class In, class C>
FUSEDACCUM_INLINE void run_steps(Out* out, const In* in, int64_t n, const Step<kMode, Out, In, C>& step,
                                 bool prefetches, Draws* draws, Tally& tally) {
  constexpr bool kSplit = Step<kMode, Out, In, C>::kSplit, kStreams = (kMode & kStream) != 0,
                 kMuch = kComputesMuch<kMode, Out, In>;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    if (kMuch || (prefetches && !kStreams)) {
      prefetch(in + i);
      if (!kStreams) prefetch(out + i);
    }
    const auto stored = step(out + i, in + i, draws);
    if constexpr ((kMode & kStats) != 0) tally.add<kSplit>(stored);
  }
  if (i == n) return;
  const auto rest = static_cast<size_t>(n - i);
  alignas(64) Out last_out[kLanes] = {};
  alignas(64) In last_in[kLanes] = {};
  memcpy(static_cast<void*>(last_in), in + i, rest * sizeof(In));
  if ((kMode & kOverwrite) == 0) memcpy(static_cast<void*>(last_out), out + i, rest * sizeof(Out));
  step(last_out, last_in, draws);
  memcpy(static_cast<void*>(out + i), last_out, rest * sizeof(Out));
  if constexpr ((kMode & kStats) != 0) {
    memset(static_cast<void*>(last_out + rest), 0,
           sizeof(last_out) - rest * sizeof(Out));  // where 0 * infinity may have left NaNs
    tally.add<kSplit>(read<kSplit>(last_out));
  }
}

template <int kMode, class Out, class In>
void run(void* out_memory, const void* in_memory, int64_t n, const Parameters& parameters, Partial* partial) {
  using C = Compute<Out, In>;
  Out* out = static_cast<Out*>(out_memory);
  const In* in = static_cast<const In*>(in_memory);
  const Step<kMode, Out, In, C> step(parameters);
  Tally tally;
  if constexpr ((kMode & kStochastic) != 0) {
    Draws draws(parameters.seed, parameters.counter);
    run_steps(out, in, n, step, parameters.prefetch, &draws, tally);
  } else {
    run_steps(out, in, n, step, parameters.prefetch, nullptr, tally);
  }
  if constexpr ((kMode & kStream) != 0) finish_streaming();
  if constexpr ((kMode & kStats) != 0) {
    *partial = {tally.total(), 0};
    if (finite(partial->sq_norm)) return;
    if constexpr ((kMode & kCountOutput) != 0) {
      partial->nonfinite = count_nonfinite<Out, Compute<Out, Out>>(out, n, 1);
    } else {
      partial->nonfinite = count_nonfinite<In, C>(in, n, static_cast<C>(parameters.scale));
    }
  }
}

template <class In>
void run_stats(const void* in_memory, int64_t n, bool prefetches, Partial* partial) {
  constexpr bool kSplit = std::is_same_v<In, BF16>;
  const In* in = static_cast<const In*>(in_memory);
  Tally tally;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    if (kComputesMuch<kStats, In, In> || prefetches) prefetch(in + i);
    tally.add<kSplit>(read<kSplit>(in + i));
  }
  if (i < n) {
    alignas(64) In last[kLanes] = {};
    memcpy(static_cast<void*>(last), in + i, static_cast<size_t>(n - i) * sizeof(In));
    tally.add<kSplit>(read<kSplit>(last));
  }
  *partial = {tally.total(), 0};
  if (!finite(partial->sq_norm)) partial->nonfinite = count_nonfinite<In, Compute<In, In>>(in, n, 1);
}

// The kernel of a mode for two dtypes; null where the mode makes no sense.
template <int kMode, class Out, class In>
constexpr Kernel kernel_for() {
  constexpr bool kPlain = (kMode & (kCountOutput | kStream)) == 0;
  constexpr bool kOverwrites = (kMode & kOverwrite) != 0 && ((kMode & kStats) != 0 || (kMode & kCountOutput) == 0);
  if constexpr ((kMode & kStochastic) != 0 ? kPlain && sizeof(Out) == 2 : kPlain || kOverwrites)
    return &run<kMode, Out, In>;
  return nullptr;
}

template <int kType>
using Element = std::tuple_element_t<kType, std::tuple<double, float, BF16, FP16>>;  // in the order of DType

template <int kPlace>
constexpr Kernel parts_kernel_at() {
  using Low = std::tuple_element_t<kPlace / 2 % kLowParts, std::tuple<int8_t, int16_t>>;  // in the order of LowParts
  using Other = std::conditional_t<kPlace % 2 == 0, BF16, float>;
  constexpr int kRow = kPlace / 2 / kLowParts;
  return parts_kernel_for<static_cast<Op>(kRow / kPartsModes), kRow % kPartsModes, Low, Other>();
}

// All kernels, whose places in the table are counted through, row by row.
template <int... kPlaces, int... kPartsPlaces>
constexpr KernelTable table(std::integer_sequence<int, kPlaces...>, std::integer_sequence<int, kPartsPlaces...>) {
  return {FUSEDACCUM_NAME,
          {kernel_for<kPlaces / (kDTypes * kDTypes), Element<kPlaces / kDTypes % kDTypes>,
                      Element<kPlaces % kDTypes>>()...},
          {&run_stats<double>, &run_stats<float>, &run_stats<BF16>, &run_stats<FP16>},
          {parts_kernel_at<kPartsPlaces>()...}};
}

}  // namespace FUSEDACCUM_ISA

// A constant: nothing compiled for an instruction set may run before it is known that this CPU has
// it.
constexpr KernelTable FUSEDACCUM_TABLE =
    FUSEDACCUM_ISA::table(std::make_integer_sequence<int, kModes * kDTypes * kDTypes>(),
                          std::make_integer_sequence<int, static_cast<int>(Op::kOps) * kPartsModes * kLowParts * 2>());

}  // namespace cpu
}  // namespace fusedaccum
