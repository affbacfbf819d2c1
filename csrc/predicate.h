// Whether a kernel may be given these lists of tensors: the C++ half of
// fusedaccum/ops/arguments.py, thousands in microseconds.
//
// It only says yes, yes after copying, or no. The Python half words the error, and has the last
// say: where stretches of memory overlap, it also looks for interleaved views, which share nothing.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <vector>

namespace fusedaccum {

enum Verdict : int { kFlat = 0, kStrided = 1, kRefused = 2 };

using Tensors = std::vector<const at::Tensor*>;

// Thousands of tensors are seldom in the cache: if prefetched, the lines of one arrive while others
// are being checked.
template <class Struct>
inline void prefetch(const Struct* object) {
  const auto* lines = reinterpret_cast<const char*>(object);
  for (std::size_t at = 0; at < sizeof(Struct); at += 64) __builtin_prefetch(lines + at);
}

inline void prefetch_storage(const at::Tensor& x) {
  prefetch(x.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
}

inline bool supported(at::ScalarType type) {
  return type == at::kDouble || type == at::kFloat || type == at::kBFloat16 || type == at::kHalf;
}

// Dispatch keys of plain, dense tensors; anything else (subclasses, functorch's wrappers, sparse …)
// is not read through its pointer.
inline bool plain(const at::Tensor& x) {
  constexpr c10::DispatchKeySet fine = c10::DispatchKeySet({c10::DispatchKey::Dense, c10::DispatchKey::ADInplaceOrView,
                                                            c10::DispatchKey::AutogradFunctionality,
                                                            c10::DispatchKey::Negative, c10::DispatchKey::ZeroTensor}) |
                                       c10::autocast_dispatch_keyset |
                                       c10::DispatchKeySet(c10::DispatchKeySet::RAW, c10::full_backend_mask);
  return (x.key_set() | fine) == fine && x.layout() == at::kStrided && !x.is_meta() && x.has_storage();
}

// Elements from the first to just after the last in memory.
inline int64_t span(const at::Tensor& x) {
  if (x.numel() == 0) return 0;
  if (x.is_contiguous()) return x.numel();
  int64_t last = 0;
  for (int64_t d = 0; d < x.dim(); ++d) last += (x.size(d) - 1) * x.stride(d);
  return last + 1;
}

inline bool backed(const at::Tensor& x) {
  if (x.numel() == 0 || x._is_zerotensor()) return true;
  const c10::TensorImpl* impl = x.unsafeGetTensorImpl();
  return impl->unsafe_storage().nbytes() >=
         static_cast<std::size_t>(impl->storage_offset() + span(x)) * impl->itemsize();
}

inline bool dense(const at::Tensor& x) { return x.is_non_overlapping_and_dense(); }

inline bool overlaps_itself(const at::Tensor& x) {
  if (x.numel() < 2 || dense(x)) return false;
  std::vector<std::pair<int64_t, int64_t>> dims;
  for (int64_t d = 0; d < x.dim(); ++d) {
    if (x.size(d) != 1) dims.emplace_back(x.stride(d), x.size(d));
  }
  std::sort(dims.begin(), dims.end());
  int64_t reach = 0;
  for (const auto& [stride, size] : dims) {
    if (stride <= reach) return true;
    reach += stride * (size - 1);
  }
  return false;
}

inline bool flat(const at::Tensor& x) { return !x.is_neg() && !x._is_zerotensor() && dense(x); }

inline bool flat_pair(const at::Tensor& out, const at::Tensor& in) {
  if (!flat(out) || !flat(in)) return false;
  if (out.numel() < 2 || (out.is_contiguous() && in.is_contiguous())) return true;
  for (int64_t d = 0; d < out.dim(); ++d) {
    if (out.size(d) != 1 && out.stride(d) != in.stride(d)) return false;
  }
  return true;
}

struct Stretch {
  const char* begin;
  const char* end;
};

using Stretches = std::vector<Stretch>;

inline Stretch memory(const at::Tensor& x, bool written) {
  if (x.numel() == 0) return {nullptr, nullptr};
  const char* begin = static_cast<const char*>(written ? x.mutable_data_ptr() : x.const_data_ptr());
  return {begin, begin + span(x) * static_cast<int64_t>(x.element_size())};
}

inline bool by_begin(const Stretch& a, const Stretch& b) { return a.begin < b.begin; }

// Those of `stretches` that meet [begin, end), in order of address.
inline Stretches within(const Stretches& stretches, const char* begin, const char* end) {
  Stretches found;
  for (const Stretch& stretch : stretches) {
    if (stretch.begin < end && begin < stretch.end) found.push_back(stretch);
  }
  if (!std::is_sorted(found.begin(), found.end(), by_begin)) std::sort(found.begin(), found.end(), by_begin);
  return found;
}

// True if an output's stretch of memory overlaps another output's, or an input's.
inline bool share_memory(Stretches outs, const Stretches& ins) {
  if (std::is_sorted(outs.rbegin(), outs.rend(), by_begin))
    std::reverse(outs.begin(), outs.end());  // as backward brings them
  if (!std::is_sorted(outs.begin(), outs.end(), by_begin)) std::sort(outs.begin(), outs.end(), by_begin);
  for (std::size_t i = 1; i < outs.size(); ++i) {
    if (outs[i].begin < outs[i - 1].end) return true;
  }
  if (outs.empty()) return false;
  auto next = outs.begin();  // the first that ends after the input begins: as outputs do not overlap, also the first
                             // that may meet it
  for (const Stretch& read : within(ins, outs.front().begin, outs.back().end)) {
    while (next != outs.end() && next->end <= read.begin) ++next;
    if (next != outs.end() && next->begin < read.end) return true;
  }
  return false;
}

constexpr std::size_t kAhead = 8;  // tensors

// The verdict on one pair by itself, which must be on the device of `first`.
inline Verdict judge_pair(const at::Tensor& out, const at::Tensor& in, const at::Tensor& first, bool written,
                          bool inference) {
  for (const at::Tensor* x : {&out, &in}) {
    if (!plain(*x) || !supported(x->scalar_type()) || x->device() != first.device() || !backed(*x)) return kRefused;
  }
  if (out.sizes() != in.sizes()) return kRefused;
  if (written && (overlaps_itself(out) || out._is_zerotensor())) return kRefused;
  if (written && out.is_inference() && !inference) return kRefused;
  return flat_pair(out, in) ? kFlat : kStrided;
}

// What nearly all tensors of a list have in common. Where they do, little is left to check.
class Kind {
 public:
  Kind() = default;  // of no tensor
  explicit Kind(const at::Tensor& x)
      : keys_(x.key_set()), dtype_(x.dtype()), device_(x.device()), itemsize_(x.element_size()) {}

  // True if this is a contiguous tensor of this kind, with memory behind all of it: then sets
  // `stretch` to that memory.
  C10_ALWAYS_INLINE bool includes(const at::Tensor& x, bool written, Stretch* stretch) const {
    const c10::TensorImpl* impl = x.unsafeGetTensorImpl();
    if (impl->key_set() != keys_ || impl->dtype() != dtype_ || impl->device() != device_ || !impl->is_contiguous())
      return false;
    c10::StorageImpl* storage = impl->unsafe_storage().unsafeGetStorageImpl();
    if (storage == nullptr || impl->numel() == 0) return false;
    const std::size_t before = static_cast<std::size_t>(impl->storage_offset()) * itemsize_;
    const std::size_t bytes = static_cast<std::size_t>(impl->numel()) * itemsize_;
    if (storage->nbytes() < before + bytes) return false;
    stretch->begin = static_cast<const char*>(written ? storage->mutable_data() : storage->data()) + before;
    stretch->end = stretch->begin + bytes;
    return true;
  }

 private:
  c10::DispatchKeySet keys_;
  caffe2::TypeMeta dtype_;
  c10::Device device_ = at::kCPU;
  std::size_t itemsize_ = 0;
};

// at::IntArrayRef's == calls memcmp, which takes longer than most shapes do.
C10_ALWAYS_INLINE bool same_shape(const at::Tensor& x, const at::Tensor& y) {
  const at::IntArrayRef a = x.sizes(), b = y.sizes();
  if (a.size() != b.size()) return false;
  for (std::size_t d = 0; d < a.size(); ++d) {
    if (a[d] != b[d]) return false;
  }
  return true;
}

// Low parts of a call's outputs or, with `of_ins`, of its inputs; none of a call without.
struct Low {
  bool given = false, of_ins = false;
  Tensors tensors;
};

struct Judgement {
  Verdict verdict = kFlat;
  Stretches outs, ins, low;  // the memory of every tensor, unless they are refused
};

// The verdict on low parts of lists that are fine by themselves. Sets `stretches` to their memory.
inline Verdict judge_low(const Tensors& outs, const Tensors& ins, const Low& low, bool written, Stretches& stretches) {
  const Tensors &whole = low.of_ins ? ins : outs, &others = low.of_ins ? outs : ins;
  if (low.tensors.size() != whole.size()) return kRefused;
  stretches.resize(whole.size());
  const bool inference = c10::InferenceMode::is_enabled();
  Verdict verdict = kFlat;
  for (std::size_t k = 0; k < whole.size(); ++k) {
    const at::Tensor& x = *low.tensors[k];
    const at::ScalarType type = x.scalar_type(), beside = others.empty() ? at::kBFloat16 : others[k]->scalar_type();
    if (whole[k]->scalar_type() != at::kBFloat16 || (beside != at::kBFloat16 && beside != at::kFloat)) return kRefused;
    if ((type != at::kChar && type != at::kShort) || type != low.tensors[0]->scalar_type()) return kRefused;
    if (!plain(x) || x.device() != whole[k]->device() || !backed(x) || x.sizes() != whole[k]->sizes()) return kRefused;
    if (written && (overlaps_itself(x) || (x.is_inference() && !inference))) return kRefused;
    if (!flat_pair(*outs[k], x)) verdict = kStrided;
    stretches[k] = memory(x, written);
  }
  return verdict;
}

// `ins` is empty for ops of one list.
inline Judgement judge(const Tensors& outs, const Tensors& ins, bool written, const Low& low = {}) {
  const bool pairs = !ins.empty();
  const bool inference = c10::InferenceMode::is_enabled();
  Judgement judged{kFlat, Stretches(outs.size()), Stretches(ins.size()), {}};
  Kind out_kind, in_kind;  // of the last pair that was judged by itself, and flat
  for (std::size_t k = 0; k < outs.size(); ++k) {
    if (k + kAhead < outs.size()) {
      prefetch_storage(*outs[k + kAhead]);
      if (pairs) prefetch_storage(*ins[k + kAhead]);
    }
    const at::Tensor& out = *outs[k];
    const at::Tensor& in = pairs ? *ins[k] : out;
    if (out_kind.includes(out, written, &judged.outs[k])) {
      if (!pairs || (in_kind.includes(in, false, &judged.ins[k]) && same_shape(out, in))) continue;
    }
    const Verdict of_pair = judge_pair(out, in, *outs[0], written, inference);
    judged.verdict = std::max(judged.verdict, of_pair);
    if (of_pair == kRefused) return judged;
    if (of_pair == kFlat) out_kind = Kind(out), in_kind = Kind(in);
    judged.outs[k] = memory(out, written);
    if (pairs) judged.ins[k] = memory(in, false);
  }
  if (!low.given) {
    if (written && share_memory(judged.outs, judged.ins)) judged.verdict = kRefused;
    return judged;
  }
  judged.verdict = std::max(judged.verdict, judge_low(outs, ins, low, written && !low.of_ins, judged.low));
  if (judged.verdict == kRefused || !written) return judged;
  Stretches writes = judged.outs, reads = judged.low;
  if (!low.of_ins) std::swap(writes, reads), writes.insert(writes.end(), reads.begin(), reads.end()), reads.clear();
  for (std::size_t k = 0; k < ins.size(); ++k) {
    const bool in_place = low.of_ins && judged.ins[k].begin == judged.outs[k].begin &&
                          outs[k]->dtype() == ins[k]->dtype() &&
                          flat_pair(*outs[k], *ins[k]);  // an output may be the very memory of its input
    if (!in_place) reads.push_back(judged.ins[k]);
  }
  if (share_memory(std::move(writes), reads)) judged.verdict = kRefused;
  return judged;
}

}  // namespace fusedaccum
