// The CPU kernels without PyTorch, for the sanitizers: every instruction set, dtype pair and mode,
// in heap blocks of exactly the size needed.
//
// Results are compared with arithmetic written here, on numbers that every format can represent or
// that doubles round exactly.
//   test_kernels           runs all and prints how many checks passed
//   test_kernels overrun   reads and writes one element too many, which AddressSanitizer must see
//   test_kernels shift     shifts by more bits than a word has, which UndefinedBehaviorSanitizer must see
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>

#include "../../../csrc/chunks.h"
#include "../../../csrc/cpu/dispatch.h"
#include "../../../csrc/cpu/launch.h"
#include "../../../csrc/formulas.h"

using namespace fusedaccum;
using namespace fusedaccum::cpu;

namespace {

long checks = 0;

#define CHECK(condition, ...)                                              \
  do {                                                                     \
    ++checks;                                                              \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition); \
      std::fprintf(stderr, __VA_ARGS__);                                   \
      std::fprintf(stderr, "\n");                                          \
      std::exit(1);                                                        \
    }                                                                      \
  } while (0)

// In a format with `digits` significant bits, smallest exponent `lowest`; from the definition. Ties
// go to even, or as `to_whole` has it.
double rounded(double x, int digits, int lowest, double largest, double (*to_whole)(double) = ::nearbyint) {
  if (x == 0 || !std::isfinite(x)) return x;
  int exponent;
  std::frexp(x, &exponent);
  const int unit = std::max(exponent - 1, lowest) - digits + 1;
  const double y = std::ldexp(to_whole(std::ldexp(x, -unit)), unit);
  return std::fabs(y) > largest ? std::copysign(INFINITY, y) : y;
}

double rounded_to(double x, DType type) {
  switch (type) {
    case kF64:
      return x;
    case kF32:
      return static_cast<float>(x);
    case kBF16:
      return rounded(static_cast<float>(x), 8, -126, 0x1.fep+127);
    default:
      return rounded(static_cast<float>(x), 11, -14, 65504.0);
  }
}

uint16_t encode16(double x, DType type) {  // x must be a number of the format
  const float f = static_cast<float>(x);
  uint32_t bits;
  std::memcpy(&bits, &f, sizeof(bits));
  if (type == kBF16) return static_cast<uint16_t>(bits >> 16);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  if (std::isinf(x)) return sign | 0x7c00;
  int exponent;
  const double fraction = std::frexp(std::fabs(x), &exponent);  // in [0.5, 1)
  if (x == 0) return sign;
  if (exponent < -13) return static_cast<uint16_t>(sign | static_cast<int>(std::ldexp(std::fabs(x), 24)));
  return static_cast<uint16_t>(sign | (exponent + 14) << 10 | (static_cast<int>(std::ldexp(fraction, 11)) - 1024));
}

double decode16(uint16_t bits, DType type) {
  if (type == kBF16) {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float f;
    std::memcpy(&f, &wide, sizeof(f));
    return f;
  }
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const double magnitude = exponent == 31 ? (fraction ? NAN : INFINITY)
                           : exponent     ? std::ldexp(1024 + fraction, exponent - 25)
                                          : std::ldexp(fraction, -24);
  return bits & 0x8000 ? -magnitude : magnitude;
}

// A heap block of exactly `n` elements after `offset` others, so that ASan guards the end and, at
// offset 0, the beginning.
struct Block {
  DType type;
  int64_t n, offset;
  char* memory;

  Block(DType type_, int64_t n_, int64_t offset_) : type(type_), n(n_), offset(offset_) {
    const auto size = static_cast<size_t>((n + offset) * kItemSize[type]);
    memory =
        static_cast<char*>(offset == 0 && size > 0 ? std::aligned_alloc(64, (size + 63) / 64 * 64) : std::malloc(size));
  }
  Block(const Block&) = delete;
  ~Block() { std::free(memory); }
  char* data() const { return memory + offset * kItemSize[type]; }

  void set(int64_t i, double x) {
    char* p = data() + i * kItemSize[type];
    if (type == kF64) std::memcpy(p, &x, 8);
    if (type == kF32) {
      const float f = static_cast<float>(x);
      std::memcpy(p, &f, 4);
    }
    if (kItemSize[type] == 2) {
      const uint16_t bits = encode16(x, type);
      std::memcpy(p, &bits, 2);
    }
  }
  double get(int64_t i) const {
    const char* p = data() + i * kItemSize[type];
    double x = 0;
    float f;
    uint16_t bits;
    if (type == kF64) std::memcpy(&x, p, 8);
    if (type == kF32) {
      std::memcpy(&f, p, 4);
      x = f;
    }
    if (kItemSize[type] == 2) {
      std::memcpy(&bits, p, 2);
      x = decode16(bits, type);
    }
    return x;
  }
};

double number(uint64_t seed) {  // has at most 8 significant bits, so every format can represent it
  seed = seed * 6364136223846793005u + 1442695040888963407u;
  seed ^= seed >> 29;
  return std::ldexp(static_cast<double>(static_cast<int>(seed % 255) - 127), static_cast<int>(seed >> 40 & 7) - 9);
}

void on_threads(int64_t count, const std::function<void(int64_t)>& work) {
  std::vector<std::thread> threads;
  for (int64_t i = 1; i < count; ++i) threads.emplace_back(work, i);
  work(0);
  for (std::thread& thread : threads) thread.join();
}

bool finite(double x) { return std::isfinite(x); }

// One call over tensors of the given sizes, checked element by element.
void run(DType out_type, DType in_type, const Call& call, const std::vector<int64_t>& sizes, int64_t offset,
         int threads, bool with_stats) {
  std::vector<std::unique_ptr<Block>> outs, ins, before;
  std::vector<Pair> pairs;
  uint64_t seed = 1;
  for (int64_t n : sizes) {
    outs.push_back(std::make_unique<Block>(out_type, n, offset));
    before.push_back(std::make_unique<Block>(out_type, n, 0));
    ins.push_back(std::make_unique<Block>(in_type, n, offset ? offset + 1 : 0));
    for (int64_t i = 0; i < n; ++i) {
      const double x = number(++seed);
      ins.back()->set(i, i == 3 && n > 40 ? INFINITY : number(++seed));
      outs.back()->set(i, x);
      before.back()->set(i, x);
    }
    pairs.push_back({outs.back()->data(), ins.back()->data(), n, out_type, in_type});
  }
  Partial total{-1, -1};
  launch(pairs, call, threads, on_threads, with_stats ? &total : nullptr);

  const bool wide = out_type == kF64 || in_type == kF64;
  const auto compute = [&](double x) { return wide ? x : static_cast<float>(x); };
  const double scale = compute(call.scale), decay = compute(call.decay);
  double squares = 0;
  int64_t bad = 0;
  for (size_t k = 0; k < outs.size(); ++k) {
    for (int64_t i = 0; i < outs[k]->n; ++i) {
      const bool zero = call.op == Op::kAccumulate && call.scale == 0;
      const double t = zero ? 0 : compute(ins[k]->get(i) * scale);
      const double x = call.overwrite || call.op == Op::kCast ? t : compute(compute(before[k]->get(i) * decay) + t);
      const double got = outs[k]->get(i), want = rounded_to(x, out_type);
      const bool close = call.stochastic && kItemSize[out_type] == 2;
      CHECK(close ? std::fabs(got - x) <= std::fabs(x) * 0x1p-7 + 0x1p-24 || !finite(x)
                  : got == want || (std::isnan(got) && std::isnan(want)),
            "%s out=%d in=%d n=%lld i=%lld: %a, not %a", kernels().name, out_type, in_type,
            static_cast<long long>(outs[k]->n), static_cast<long long>(i), got, want);
      squares += got * got;
      bad += !finite(call.op == Op::kCast ? got : t);
    }
  }
  if (!with_stats) return;
  CHECK(total.nonfinite == bad, "%lld, not %lld", static_cast<long long>(total.nonfinite), static_cast<long long>(bad));
  CHECK(finite(squares) ? std::fabs(total.sq_norm - squares) <= 1e-12 * squares : !finite(total.sq_norm), "%a, not %a",
        total.sq_norm, squares);
}

// Numbers in two parts, in heap blocks of exactly the size needed.
struct Parts {
  LowParts kind;
  int bits;  // of a low part
  Block h;
  std::unique_ptr<char[]> memory;

  Parts(LowParts kind_, int64_t n, int64_t offset)
      : kind(kind_),
        bits(kind == kInt8 ? 8 : 16),
        h(kBF16, n, offset),
        memory(new char[static_cast<size_t>((n + offset) * bits / 8)]) {}
  char* low() const { return memory.get() + h.offset * bits / 8; }

  // x must be a number of 16 + bits bits.
  void set(int64_t i, double x) {
    const float f = static_cast<float>(x), upper = static_cast<float>(nearest_h(x));
    int32_t word, above;
    std::memcpy(&word, &f, sizeof(word));
    std::memcpy(&above, &upper, sizeof(above));
    h.set(i, upper);
    set_low(i, (word - above) >> (16 - bits));
  }
  void set_low(int64_t i, int32_t part) { std::memcpy(low() + i * bits / 8, &part, static_cast<size_t>(bits / 8)); }

  double get(int64_t i) const {
    int32_t part = 0;
    std::memcpy(&part, low() + i * bits / 8, static_cast<size_t>(bits / 8));
    part = (part ^ 1 << (bits - 1)) - (1 << (bits - 1));
    const double upper = h.get(i);
    if (std::isnan(upper) || (part < 0 && (upper == 0 || (kind == kInt8 && std::isinf(upper))))) return upper;
    uint16_t halves[2] = {0, 0};
    std::memcpy(halves + 1, h.data() + i * 2, 2);
    uint32_t word;
    std::memcpy(&word, halves, sizeof(word));
    word += static_cast<uint32_t>(part) << (16 - bits);
    float f;
    std::memcpy(&f, &word, sizeof(f));
    return f;
  }

  static double nearest_h(double x) { return rounded(x, 8, -126, 0x1.fep+127, ::round); }
  double nearest(double x) const { return kind == kInt8 ? rounded(x, 16, -126, 0x1.fefep+127) : x; }
};

// One call over numbers in two parts, checked element by element. `other`: of the gradients, or of
// a cast's output; `specials`: with infinities, and with what other code may leave.
void run_parts(LowParts kind, DType other, const Call& call, const std::vector<int64_t>& sizes, int64_t offset,
               int threads, bool with_stats, bool specials) {
  std::vector<std::unique_ptr<Parts>> numbers;
  std::vector<std::unique_ptr<Block>> others;
  std::vector<std::vector<double>> before;
  std::vector<Pair> pairs;
  uint64_t seed = 1;
  const bool casts = call.op == Op::kCast, adds = call.op == Op::kAccumulate;
  for (int64_t n : sizes) {
    numbers.push_back(std::make_unique<Parts>(kind, n, offset));
    others.push_back(std::make_unique<Block>(other, n, offset ? offset + 1 : 0));
    Parts& x = *numbers.back();
    for (int64_t i = 0; i < n; ++i) {
      const double y = number(++seed);
      x.set(i, x.nearest(static_cast<float>(y + y * number(++seed) * 0x1p-9)));
      others.back()->set(i, specials && i == 3 ? INFINITY : number(++seed));
      if (!specials) continue;
      // What other code has left: a zero, or an infinity, written to h alone.
      if (i % 128 == 70) x.h.set(i, i % 3 ? 0.0 : -0.0), x.set_low(i, -1);
      if (i % 128 == 40) x.h.set(i, INFINITY), x.set_low(i, kind == kInt8 ? -1 : 0);
    }
    before.emplace_back();
    for (int64_t i = 0; i < n; ++i) before.back().push_back(x.get(i));
    void* const h = x.h.data();
    void* const beside = others.back()->data();
    pairs.push_back({casts ? beside : h, adds ? beside : h, n, casts ? other : kBF16, adds ? other : kBF16, x.low()});
  }
  Partial total{-1, -1};
  launch(pairs, call, threads, on_threads, with_stats ? &total : nullptr);

  const auto single = [](double x) { return static_cast<double>(static_cast<float>(x)); };
  double squares = 0;
  int64_t bad = 0;
  for (size_t k = 0; k < numbers.size(); ++k) {
    for (int64_t i = 0; i < numbers[k]->h.n; ++i) {
      const Parts& parts = *numbers[k];
      const double t = !adds             ? before[k][static_cast<size_t>(i)]
                       : call.scale == 0 ? 0
                                         : single(others[k]->get(i) * single(call.scale));
      double x = t;
      if (casts || call.op == Op::kScale) x = single(t * single(call.scale));
      if (adds && !call.overwrite) x = single(single(before[k][static_cast<size_t>(i)] * single(call.decay)) + t);
      const double got = casts ? others[k]->get(i) : parts.get(i),
                   want = casts ? rounded_to(x, other) : parts.nearest(x);
      const double h = parts.h.get(i), nearest_h = Parts::nearest_h(got);
      CHECK(got == want || (std::isnan(got) && std::isnan(want)), "%s low=%d other=%d op=%d n=%lld i=%lld: %a, not %a",
            kernels().name, kind, other, static_cast<int>(call.op), static_cast<long long>(parts.h.n),
            static_cast<long long>(i), got, want);
      CHECK(casts || h == nearest_h || (std::isnan(h) && std::isnan(got)), "%s: h is %a beside %a", kernels().name, h,
            got);
      squares += got * got;
      bad += !finite(adds ? t : got);
    }
  }
  if (!with_stats) return;
  CHECK(total.nonfinite == bad, "%lld, not %lld", static_cast<long long>(total.nonfinite), static_cast<long long>(bad));
  CHECK(finite(squares) ? std::fabs(total.sq_norm - squares) <= 1e-12 * squares : !finite(total.sq_norm), "%a, not %a",
        total.sq_norm, squares);
}

void parts_kernels() {
  for (const std::string& name : capabilities()) {
    set_capability(name);
    for (int variant = 0; variant < 64; ++variant) {
      Call call;
      call.op = static_cast<Op>(variant % 4);
      call.low = variant & 4 ? kInt16 : kInt8;
      call.overwrite = variant & 8;
      call.scale = variant % 3 == 0 ? 0.0 : call.op == Op::kStats ? 1.0 : 0.3;
      call.decay = variant & 8 ? 1.0 : 0.7;
      run_parts(call.low, variant & 16 && call.op != Op::kStats ? kF32 : kBF16, call, {0, 1, 31, 32, 33, 65, 100, 200},
                variant % 3, 1, variant & 32 || call.op == Op::kStats, variant % 5);
    }
    Call call;
    call.low = kInt8;
    call.scale = 0.3;
    call.decay = 0.7;
    run_parts(kInt8, kBF16, call, {20000, 30000}, 1, 3, true, false);
    run_parts(kInt8, kBF16, call, {50000}, 1, 3, false, false);
    call.overwrite = true;
    for (int64_t offset : {0, 1})
      run_parts(kInt8, kBF16, call, {(3 << 19) + 21}, offset, 2, true, true);  // large enough to be streamed
    call.op = Op::kCast;
    call.scale = 0.5;  // which leaves ties
    run_parts(kInt8, kBF16, call, {50000}, 0, 1, false, false);
  }
}

void all_kernels() {
  const std::vector<int64_t> ragged{0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100};
  for (const std::string& name : capabilities()) {
    set_capability(name);
    for (int out = 0; out < kDTypes; ++out) {
      for (int in = 0; in < kDTypes; ++in) {
        for (int variant = 0; variant < 32; ++variant) {
          Call call;
          call.op = variant & 1 ? Op::kCast : Op::kAccumulate;
          call.overwrite = variant & 2;
          call.stochastic = (variant & 4) && call.op == Op::kAccumulate;
          call.scale = variant & 8 ? 0.0 : 0.375;
          call.decay = variant & 2 ? 1.0 : 0.75;
          call.seed = 0x123456789abcdef;
          call.counters.assign(ragged.size(), ~uint64_t{0} - 70);
          run(static_cast<DType>(out), static_cast<DType>(in), call, ragged, variant % 3, 1, variant & 16);
        }
      }
    }
    Call call;
    call.scale = 0.5;
    for (int threads : {1, 3, 64}) run(kF32, kBF16, call, {16383, 1, 16385, 40000, 3}, 1, threads, true);
    call.overwrite = true;
    for (int64_t offset : {0, 1})
      run(kF32, kBF16, call, {(1 << 20) + 21}, offset, 2, true);  // large enough to be streamed
  }
}

void stats_kernel() {
  for (int type = 0; type < kDTypes; ++type) {
    Block block(static_cast<DType>(type), 1001, 3);
    double squares = 0;
    for (int64_t i = 0; i < block.n; ++i) {
      block.set(i, number(static_cast<uint64_t>(i)));
      squares += block.get(i) * block.get(i);
    }
    Call call;
    call.op = Op::kStats;
    Partial total;
    launch({{nullptr, block.data(), block.n, block.type, block.type}}, call, 1, on_threads, &total);
    CHECK(total.sq_norm == squares && total.nonfinite == 0, "%a, not %a", total.sq_norm, squares);
    block.set(1000, INFINITY);
    launch({{nullptr, block.data(), block.n, block.type, block.type}}, call, 1, on_threads, &total);
    CHECK(total.nonfinite == 1, "%lld", static_cast<long long>(total.nonfinite));
  }
}

void chunk_table() {
  const std::vector<int64_t> sizes{0, 1, 15, 16, 17, 0, 160, 3, 0};
  ChunkTable table(16);
  for (int64_t size : sizes) table.add(size);
  for (int64_t parts : {1, 2, 3, 7, 40}) {
    const std::vector<int64_t> cuts = table.balanced(parts);
    CHECK(cuts.size() == static_cast<size_t>(parts) + 1 && cuts.front() == 0 && cuts.back() == table.chunks(), "%zu",
          cuts.size());
    std::vector<int64_t> seen(sizes.size(), 0);
    int64_t next = 0;
    for (int64_t part = 0; part < parts; ++part) {
      CHECK(cuts[static_cast<size_t>(part)] <= cuts[static_cast<size_t>(part) + 1], "part %lld",
            static_cast<long long>(part));
      table.each(cuts[static_cast<size_t>(part)], cuts[static_cast<size_t>(part) + 1],
                 [&](int64_t index, const Chunk& chunk) {
                   CHECK(index == next++, "chunk %lld", static_cast<long long>(index));
                   CHECK(chunk.begin == seen[chunk.tensor] && chunk.end > chunk.begin && chunk.end - chunk.begin <= 16,
                         "tensor %zu", chunk.tensor);
                   seen[chunk.tensor] = chunk.end;
                 });
    }
    CHECK(seen == sizes, "%lld parts", static_cast<long long>(parts));
  }
}

void balance() {
  ChunkTable table(1 << 14);
  for (int i = 0; i < 1000; ++i) table.add(10);
  table.add(100 << 14);
  for (int i = 0; i < 1000; ++i) table.add(10);
  const std::vector<int64_t> cuts = table.balanced(2);
  CHECK(cuts[1] > 1000 + 30 && cuts[1] < 1000 + 70, "cut at %lld", static_cast<long long>(cuts[1]));
}

void philox() {
  // Random123's kat_vectors, philox4x32 with 10 rounds.
  uint32_t zeros[4] = {0, 0, 0, 0}, pi[4] = {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344};
  philox4x32<Multiply32>(zeros, 0);
  philox4x32<Multiply32>(pi, 0x299f31d0a4093822);
  const uint32_t of_zeros[4] = {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8},
                 of_pi[4] = {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1};
  for (int i = 0; i < 4; ++i) CHECK(zeros[i] == of_zeros[i] && pi[i] == of_pi[i], "word %d", i);
  CHECK(random16(0, 0) == 0xe8d5 && random16(1, 0) == 0x6627 && random16(7, 0) == 0x9b00, "16-bit numbers");
}

}  // namespace

int main(int argc, char** argv) {
  const std::string fault = argc > 1 ? argv[1] : "";
  if (fault == "overrun") {
    Block out(kF32, 33, 0), in(kBF16, 33, 1);
    kernels().kernel[0][kF32][kBF16](out.data(), in.data(), 34, {1.0, 1.0, 0, 0}, nullptr);
    return 0;
  }
  if (fault == "shift") return 1 << (argc + 40);
  chunk_table();
  balance();
  philox();
  stats_kernel();
  all_kernels();
  parts_kernels();
  std::printf("%ld checks passed\n", checks);
}
