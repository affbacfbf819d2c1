#include "launch.h"

#include <algorithm>

#include "../chunks.h"
#include "dispatch.h"

namespace fusedaccum {
namespace cpu {
namespace {

constexpr int64_t kChunkElements = 1 << 14;
constexpr int64_t kAlone = 1 << 15;             // elements that are not worth waking another thread for
constexpr int64_t kStreamedBytes = 4 << 20;     // outputs larger than this are not kept in the caches anyway
constexpr int64_t kStreamedMasters = 32 << 20;  // the same of joined masters, which the optimizer's step reads at once
constexpr int kZeros = 1 << 12;
constexpr int64_t kLowSize[kLowParts + 1] = {1, 2, 0};

// Read instead of a gradient when the scale is 0, so that its NaNs add nothing.
alignas(64) const double zeros[kZeros] = {};

bool is_16_bit(DType type) { return type == kBF16 || type == kFP16; }

char* at(void* p, int64_t element, DType type) { return static_cast<char*>(p) + element * kItemSize[type]; }
const char* at(const void* p, int64_t element, DType type) {
  return static_cast<const char*>(p) + element * kItemSize[type];
}

class Launch {
 public:
  Launch(const std::vector<Pair>& pairs, const Call& call, bool stats)
      : pairs_(pairs), call_(call), kernels_(kernels()), stats_(stats) {
    int64_t bytes = 0;
    const int64_t beside = call.op == Op::kAccumulate ? kLowSize[call.low] : 0;
    for (const Pair& pair : pairs) bytes += pair.n * (kItemSize[pair.out_type] + beside);
    const bool joins_masters =
        call.op == Op::kCast && call.low == kInt16 && !pairs.empty() && pairs[0].out_type == kF32;
    streams_ = bytes >= (joins_masters ? kStreamedMasters : kStreamedBytes);
  }

  void chunk(const Chunk& chunk, Partial* partial) const {
    const Pair& pair = pairs_[chunk.tensor];
    const int64_t n = chunk.end - chunk.begin;
    if (call_.op == Op::kStats && call_.low == kNoLow) {
      kernels_.stats[pair.in_type](at(pair.in, chunk.begin, pair.in_type), n, prefetch_pays(), partial);
      return;
    }
    Parameters parameters{call_.scale, call_.decay, call_.seed, 0, prefetch_pays(), low_at(pair, chunk.begin)};
    const bool stochastic = call_.stochastic && is_16_bit(pair.out_type);
    if (stochastic) parameters.counter = call_.counters[chunk.tensor] + static_cast<uint64_t>(chunk.begin);
    char* out = at(pair.out, chunk.begin, pair.out_type);
    const Kernel kernel = kernel_for(pair, stochastic, out, parameters.low);
    if (call_.op == Op::kAccumulate && call_.scale == 0) {
      from_zeros(kernel, pair, out, n, parameters, partial);
    } else {
      kernel(out, at(pair.in, chunk.begin, pair.in_type), n, parameters, partial);
    }
  }

 private:
  char* low_at(const Pair& pair, int64_t element) const {
    return static_cast<char*>(pair.low) + element * kLowSize[call_.low];
  }

  Kernel kernel_for(const Pair& pair, bool stochastic, const char* out, const void* low) const {
    if (call_.low == kNoLow) return kernels_.kernel[mode(pair, stochastic, out)][pair.out_type][pair.in_type];
    const bool casts = call_.op == Op::kCast, accumulates = call_.op == Op::kAccumulate;
    int which = casts || accumulates ? mode(pair, stochastic, out) : stats_ ? kStats : 0;
    if (accumulates && reinterpret_cast<uintptr_t>(low) % 32 != 0) which &= ~kStream;
    return kernels_.parts[static_cast<int>(call_.op)][which][call_.low][(casts ? pair.out_type : pair.in_type) == kF32];
  }

  int mode(const Pair& pair, bool stochastic, const char* out) const {
    const bool overwrite = call_.overwrite || call_.op == Op::kCast;
    int mode = (overwrite ? kOverwrite : 0) | (stats_ ? kStats : 0) | (stochastic ? kStochastic : 0);
    if (stats_ && call_.op == Op::kCast) mode |= kCountOutput;
    // In place, the line is in the cache already, and a store past it would only throw it out.
    const bool aligned = reinterpret_cast<uintptr_t>(out) % 64 == 0;
    if (overwrite && streams_ && aligned && !stochastic && pair.out != pair.in) mode |= kStream;
    return mode;
  }

  void from_zeros(Kernel kernel, const Pair& pair, char* out, int64_t n, Parameters parameters,
                  Partial* partial) const {
    parameters.scale = 0.0;  // not -0.0
    Partial sum{0.0, 0};
    for (int64_t i = 0; i < n; i += kZeros) {
      Partial part{0.0, 0};
      kernel(at(out, i, pair.out_type), zeros, std::min<int64_t>(kZeros, n - i), parameters, &part);
      parameters.counter += kZeros;
      parameters.low = static_cast<char*>(parameters.low) + kZeros * kLowSize[call_.low];
      sum.sq_norm += part.sq_norm;
      sum.nonfinite += part.nonfinite;
    }
    if (partial != nullptr) *partial = sum;
  }

  const std::vector<Pair>& pairs_;
  const Call& call_;
  const KernelTable& kernels_;
  bool stats_;
  bool streams_;
};

}  // namespace

void launch(const std::vector<Pair>& pairs, const Call& call, int threads, const Parallel& parallel, Partial* total) {
  ChunkTable table(kChunkElements);
  table.reserve(pairs.size());
  for (const Pair& pair : pairs) table.add(pair.n);
  std::vector<Partial> partials(total ? static_cast<std::size_t>(table.chunks()) : 0);
  const Launch launch(pairs, call, total != nullptr);
  const auto run = [&](int64_t begin, int64_t end) {
    table.each(begin, end, [&](int64_t number, const Chunk& chunk) {
      launch.chunk(chunk, total ? &partials[static_cast<std::size_t>(number)] : nullptr);
    });
  };
  const int64_t workers = table.elements() <= kAlone ? 1 : std::min<int64_t>(std::max(threads, 1), table.chunks());
  if (workers <= 1) {
    run(0, table.chunks());
  } else {
    const std::vector<int64_t> cuts = table.balanced(workers);
    parallel(workers, [&](int64_t worker) {
      run(cuts[static_cast<std::size_t>(worker)], cuts[static_cast<std::size_t>(worker) + 1]);
    });
  }
  if (total == nullptr) return;
  *total = {0.0, 0};
  for (const Partial& partial : partials) {
    total->sq_norm += partial.sq_norm;
    total->nonfinite += partial.nonfinite;
  }
}

}  // namespace cpu
}  // namespace fusedaccum
