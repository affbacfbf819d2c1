// The CPU kernels: accumulate (with cast and scale as modes of it) and stats, for one instruction set.
//
//   t = in * scale;  new = overwrite ? t : out * decay + t;  out = round(new)
//
// Bytes an element: in + 2 * out to add, in + out to overwrite when streamed (a plain store reads the line first). No alignment is
// required. All elements go through one body, 32 at a time; the last ones by way of a padded copy of theirs, so that the
// memory around is neither read nor written. Included by kernels_<isa>.cpp, which define FUSEDACCUM_ISA. No function here may be
// shared between instruction sets (the linker would keep any one of them): all are inlined or in FUSEDACCUM_ISA, none is from std.
#pragma once

#include "vectors.h"

namespace fusedaccum {
namespace cpu {
namespace FUSEDACCUM_ISA {

template <class A, class B>
struct Compute {
  using type = float;
};
template <class B>
struct Compute<double, B> {
  using type = double;
};
template <class A>
struct Compute<A, double> {
  using type = double;
};
template <>
struct Compute<double, double> {
  using type = double;
};

// Sums of squares in 16 lanes: element i of a chunk always falls to lane i % 16, on every instruction set.
struct Tally {
  static constexpr int kSums = 16;
  static constexpr int kRegisters = kSums / F64::kWidth;
  F64::Vector sums[kRegisters] = {};

  FUSEDACCUM_INLINE void add(const F64& x) {
    FUSEDACCUM_UNROLL
    for (int i = 0; i < F64::kCount; ++i) sums[i % kRegisters] += x.v[i] * x.v[i];
  }
  // The square of a float has at most 48 bits: exact in FP64, so that here, and only here, an FMA gives the same bits.
  FUSEDACCUM_INLINE void add(const F32& x) {
    const F64 wide = widen(x);
#if defined(__AVX512F__)
    FUSEDACCUM_UNROLL
    for (int i = 0; i < F64::kCount; ++i) {
      sums[i % kRegisters] = (F64::Vector)_mm512_fmadd_pd((__m512d)wide.v[i], (__m512d)wide.v[i], (__m512d)sums[i % kRegisters]);
    }
#else
    add(wide);
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

FUSEDACCUM_INLINE bool finite(double x) { return x - x == 0.0; }

// How many of in[i] * scale are not finite. Rarely called: where one is not, the sum of squares of the outputs is not either.
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

// Zero in the lanes from `valid` on.
template <class T>
FUSEDACCUM_INLINE Pack<T> first(const Pack<T>& x, int valid) {
  T lanes[kLanes];
  memcpy(lanes, &x, sizeof(lanes));
  for (int i = valid; i < kLanes; ++i) lanes[i] = T(0);
  return load_plain<T>(lanes);
}

// Random numbers for the elements of a call, in order.
struct Draws {
  static constexpr int kDrawn = 256;
  static constexpr int kEnd = kLanes + kDrawn;
  uint64_t seed;
  uint64_t block;  // the next to be drawn
  int at = kEnd;   // the next number to be used
  alignas(64) uint16_t numbers[kEnd];

  FUSEDACCUM_INLINE Draws(uint64_t seed_, uint64_t counter) : seed(seed_), block(counter >> 3) {
    refill();
    at += static_cast<int>(counter & 7);
  }
  FUSEDACCUM_INLINE void refill() {
    const int left = kEnd - at;  // < kLanes
    for (int i = 0; i < left; ++i) numbers[kLanes - left + i] = numbers[at + i];
    for (int i = 0; i < kDrawn; i += 8 * U32::kWidth, block += U32::kWidth) draw(block, seed, numbers + kLanes + i);
    at = kLanes - left;
  }
  FUSEDACCUM_INLINE U32 next() {
    if (kEnd - at < kLanes) refill();
    at += kLanes;
    return load_halves(numbers + at - kLanes);
  }
};

// Thirty-two elements: read, compute, round, write, tally; of the last ones only `valid` are tallied.
template <int kMode, class Out, class In, class C>
struct Step {
  typename Pack<C>::Vector scale, decay;
  Tally tally;

  FUSEDACCUM_INLINE explicit Step(const Parameters& p)
      : scale(Pack<C>::all(static_cast<C>(p.scale)).v[0]), decay(Pack<C>::all(static_cast<C>(p.decay)).v[0]) {}

  FUSEDACCUM_INLINE void operator()(Out* out, const In* in, Draws* draws, int valid = kLanes) {
    Pack<C> x = as<C>(load(in));
    FUSEDACCUM_UNROLL
    for (int i = 0; i < Pack<C>::kCount; ++i) x.v[i] = contribution(x.v[i], scale);
    if constexpr ((kMode & kOverwrite) == 0) {
      const Pack<C> buffer = as<C>(load(out));
      FUSEDACCUM_UNROLL
      for (int i = 0; i < Pack<C>::kCount; ++i) x.v[i] = accumulated(buffer.v[i], decay, x.v[i]);
    }
    if constexpr ((kMode & kStochastic) != 0) {
      add_up(store_stochastic(out, x, draws->next()), valid);
    } else {
      add_up(store<(kMode & kStream) != 0>(out, x), valid);
    }
  }

 private:
  template <class Stored>
  FUSEDACCUM_INLINE void add_up(const Stored& stored, int valid) {
    if constexpr ((kMode & kStats) != 0) tally.add(valid == kLanes ? stored : first(stored, valid));
  }
};

template <int kMode, class Out, class In, class C>
FUSEDACCUM_INLINE void run_steps(Out* out, const In* in, int64_t n, Step<kMode, Out, In, C>& step, Draws* draws) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) step(out + i, in + i, draws);
  if (i == n) return;
  const auto rest = static_cast<size_t>(n - i);
  alignas(64) Out last_out[kLanes] = {};
  alignas(64) In last_in[kLanes] = {};
  memcpy(static_cast<void*>(last_in), in + i, rest * sizeof(In));
  if ((kMode & kOverwrite) == 0) memcpy(static_cast<void*>(last_out), out + i, rest * sizeof(Out));
  step(last_out, last_in, draws, static_cast<int>(rest));
  memcpy(static_cast<void*>(out + i), last_out, rest * sizeof(Out));
}

template <int kMode, class Out, class In>
void run(void* out_memory, const void* in_memory, int64_t n, const Parameters& parameters, Partial* partial) {
  using C = typename Compute<Out, In>::type;
  Out* out = static_cast<Out*>(out_memory);
  const In* in = static_cast<const In*>(in_memory);
  Step<kMode, Out, In, C> step(parameters);
  if constexpr ((kMode & kStochastic) != 0) {
    Draws draws(parameters.seed, parameters.counter);
    run_steps(out, in, n, step, &draws);
  } else {
    run_steps(out, in, n, step, nullptr);
  }
  if constexpr ((kMode & kStream) != 0) finish_streaming();
  if constexpr ((kMode & kStats) != 0) {
    *partial = {step.tally.total(), 0};
    if (finite(partial->sq_norm)) return;
    if constexpr ((kMode & kCountOutput) != 0) {
      partial->nonfinite = count_nonfinite<Out, typename Compute<Out, Out>::type>(out, n, 1);
    } else {
      partial->nonfinite = count_nonfinite<In, C>(in, n, static_cast<C>(parameters.scale));
    }
  }
}

template <class In>
void run_stats(const void* in_memory, int64_t n, Partial* partial) {
  const In* in = static_cast<const In*>(in_memory);
  Tally tally;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) tally.add(load(in + i));
  if (i < n) {
    alignas(64) In last[kLanes] = {};
    memcpy(static_cast<void*>(last), in + i, static_cast<size_t>(n - i) * sizeof(In));
    tally.add(load(last));
  }
  *partial = {tally.total(), 0};
  if (!finite(partial->sq_norm)) partial->nonfinite = count_nonfinite<In, typename Compute<In, In>::type>(in, n, 1);
}

}  // namespace FUSEDACCUM_ISA

// clang-format off
#define FUSEDACCUM_ROW(mode, Out)                                                                                    \
  {&FUSEDACCUM_ISA::run<mode, Out, double>, &FUSEDACCUM_ISA::run<mode, Out, float>,                                  \
   &FUSEDACCUM_ISA::run<mode, Out, FUSEDACCUM_ISA::BF16>, &FUSEDACCUM_ISA::run<mode, Out, FUSEDACCUM_ISA::FP16>}
#define FUSEDACCUM_MODE(mode)                                                                                        \
  {FUSEDACCUM_ROW(mode, double), FUSEDACCUM_ROW(mode, float),                                                        \
   FUSEDACCUM_ROW(mode, FUSEDACCUM_ISA::BF16), FUSEDACCUM_ROW(mode, FUSEDACCUM_ISA::FP16)}
#define FUSEDACCUM_MODE16(mode)                                                                                      \
  {{}, {}, FUSEDACCUM_ROW(mode, FUSEDACCUM_ISA::BF16), FUSEDACCUM_ROW(mode, FUSEDACCUM_ISA::FP16)}

const KernelTable FUSEDACCUM_TABLE = {
    FUSEDACCUM_NAME,
    // In the order of Mode's bits; the modes that make no sense are empty.
    {FUSEDACCUM_MODE(0), FUSEDACCUM_MODE(1), FUSEDACCUM_MODE(2), FUSEDACCUM_MODE(3),              // add and overwrite, also with stats
     {}, {}, {}, FUSEDACCUM_MODE(7),                                                              // overwrite; the stats count outputs
     {}, FUSEDACCUM_MODE(9), {}, FUSEDACCUM_MODE(11), {}, {}, {}, FUSEDACCUM_MODE(15),            // streamed overwrites
     FUSEDACCUM_MODE16(16), FUSEDACCUM_MODE16(17), FUSEDACCUM_MODE16(18), FUSEDACCUM_MODE16(19),  // stochastic rounding
     {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}},
    {&FUSEDACCUM_ISA::run_stats<double>, &FUSEDACCUM_ISA::run_stats<float>,
     &FUSEDACCUM_ISA::run_stats<FUSEDACCUM_ISA::BF16>, &FUSEDACCUM_ISA::run_stats<FUSEDACCUM_ISA::FP16>},
};
// clang-format on

}  // namespace cpu
}  // namespace fusedaccum
