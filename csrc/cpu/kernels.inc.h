// The CPU kernels: accumulate (with cast and scale as modes of it) and stats, for one instruction set.
//
//   t = in * scale;  new = overwrite ? t : out * decay + t;  out = round(new)
//
// Bytes per element: in + 2 * out to add, in + out to overwrite when streamed (a plain store reads the line first). No alignment is
// required. All elements go through one body, 32 at a time; the last ones through a padded copy, so that the memory around them is
// neither read nor written. Included by kernels_<isa>.cpp, which define FUSEDACCUM_ISA. No function here may be shared between
// instruction sets (the linker would keep any one of them): all are inlined or in FUSEDACCUM_ISA, none is from std.
#pragma once

#include <tuple>
#include <utility>

#include "draws.h"
#include "stores.h"
#include "vectors.h"

namespace fusedaccum {
namespace cpu {
namespace FUSEDACCUM_ISA {

// Sums of squares in 16 lanes. Every instruction set puts an element of a chunk into the same lane: i % 16 for element i, or (i % 32) / 2
// where even and odd elements come in separate registers.
struct Tally {
  static constexpr int kSums = 16;
  static constexpr int kRegisters = kSums / F64::kWidth;
  F64::Vector sums[kRegisters] = {};

  // The sum to which register i of a step goes. Split, four in a row are two of even elements, and two of the odd ones between these.
  template <bool kSplit>
  static constexpr int sum_of(int i) {
    return kSplit ? i / 4 * 2 + i % 2 : i % kRegisters;
  }

  template <bool kSplit>
  FUSEDACCUM_INLINE void add(const F64& x) {
    FUSEDACCUM_UNROLL
    for (int i = 0; i < F64::kCount; ++i) {
      F64::Vector& sum = sums[sum_of<kSplit>(i)];
      sum += x.v[i] * x.v[i];
    }
  }
  // The square of a float has at most 48 bits: exact in FP64, so that here, and only here, an FMA gives the same bits.
  template <bool kSplit>
  FUSEDACCUM_INLINE void add(const F32& x) {
    const F64 wide = widen(x);
#if defined(__AVX512F__)
    FUSEDACCUM_UNROLL
    for (int i = 0; i < F64::kCount; ++i) {
      F64::Vector& sum = sums[sum_of<kSplit>(i)];
      sum = (F64::Vector)_mm512_fmadd_pd((__m512d)wide.v[i], (__m512d)wide.v[i], (__m512d)sum);
    }
#else
    add<kSplit>(wide);
#endif
  }

  FUSEDACCUM_INLINE double total() const {
    double lanes[kSums];
    memcpy(lanes, sums, sizeof(lanes));
    for (int half = kSums / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    }
    return lanes[0];
  }
};

template <bool kSplit, class T>
FUSEDACCUM_INLINE auto read(const T* p) {
  if constexpr (kSplit) {
    return load_split(p);
  } else {
    return load(p);
  }
}

FUSEDACCUM_INLINE bool finite(double x) { return x - x == 0.0; }

// How many of in[i] * scale are not finite. Rarely called: if one is not, the outputs' sum of squares is not either, and shows it.
template <class In, class C>
__attribute__((noinline)) int64_t count_nonfinite(const In* in, int64_t n, C scale) {
  int64_t count = 0;
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t here = n - i < kLanes ? n - i : kLanes;
    alignas(64) In padded[kLanes] = {};
    C t[kLanes];
    memcpy(static_cast<void*>(padded), in + i, static_cast<size_t>(here) * sizeof(In));
    const Pack<C> x = as<C>(load(padded));
    memcpy(t, &x, sizeof(t));
    for (int64_t k = 0; k < here; ++k) count += !finite(contribution(t[k], scale));
  }
  return count;
}

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

// How many bytes ahead of a step lines are prefetched: the hardware stops at the end of a page, and the more a step computes, the fewer
// loads of later steps are under way with it. Whether that pays for steps that compute little (an add into FP32 or FP64) depends on the
// processor (Parameters::prefetch).
constexpr int kAhead = 2048;
template <int kMode, class Out, class In>
constexpr bool kComputesMuch = sizeof(Out) < sizeof(float) || ((kMode & kStats) != 0 && sizeof(In) < sizeof(float));

template <class T>
FUSEDACCUM_INLINE void prefetch(const T* p) {
  for (size_t line = 0; line < kLanes * sizeof(T); line += 64) __builtin_prefetch(reinterpret_cast<const char*>(p) + kAhead + line);
}

template <int kMode, class Out, class In, class C>
FUSEDACCUM_INLINE void run_steps(Out* out, const In* in, int64_t n, const Step<kMode, Out, In, C>& step, bool prefetches, Draws* draws,
                                 Tally& tally) {
  constexpr bool kSplit = Step<kMode, Out, In, C>::kSplit, kStreams = (kMode & kStream) != 0, kMuch = kComputesMuch<kMode, Out, In>;
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
    memset(static_cast<void*>(last_out + rest), 0, sizeof(last_out) - rest * sizeof(Out));  // where 0 * infinity may have left NaNs
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
  if constexpr ((kMode & kStochastic) != 0 ? kPlain && sizeof(Out) == 2 : kPlain || kOverwrites) return &run<kMode, Out, In>;
  return nullptr;
}

template <int kType>
using Element = std::tuple_element_t<kType, std::tuple<double, float, BF16, FP16>>;  // in the order of DType

// All kernels, whose places in the table are counted through, row by row.
template <int... kPlaces>
constexpr KernelTable table(std::integer_sequence<int, kPlaces...>) {
  return {FUSEDACCUM_NAME,
          {kernel_for<kPlaces / (kDTypes * kDTypes), Element<kPlaces / kDTypes % kDTypes>, Element<kPlaces % kDTypes>>()...},
          {&run_stats<double>, &run_stats<float>, &run_stats<BF16>, &run_stats<FP16>}};
}

}  // namespace FUSEDACCUM_ISA

// A constant: nothing compiled for an instruction set may run before it is known that this CPU has it.
constexpr KernelTable FUSEDACCUM_TABLE = FUSEDACCUM_ISA::table(std::make_integer_sequence<int, kModes * kDTypes * kDTypes>());

}  // namespace cpu
}  // namespace fusedaccum
