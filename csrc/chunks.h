// Many tensors cut into chunks of bounded size, numbered from 0, on which kernels are started. No
// torch, host only.
//
// The cut depends on the tensors' sizes alone, never on the number of threads: a sum over chunks in
// their order is deterministic.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace fusedaccum {

struct Chunk {
  std::size_t tensor;
  int64_t begin;  // elements within the tensor
  int64_t end;
};

class ChunkTable {
 public:
  explicit ChunkTable(int64_t chunk_elements) : chunk_elements_(chunk_elements) {}

  void reserve(std::size_t tensors) {
    sizes_.reserve(tensors);
    first_.reserve(tensors);
  }

  void add(int64_t elements) {
    sizes_.push_back(elements);
    first_.push_back(chunks_);
    chunks_ += (elements + chunk_elements_ - 1) / chunk_elements_;
    elements_ += elements;
  }

  int64_t chunks() const { return chunks_; }
  int64_t elements() const { return elements_; }

  // Calls visit(number, chunk) for the chunks of [begin, end), in order.
  template <class Visit>
  void each(int64_t begin, int64_t end, Visit visit) const {
    if (begin >= end) return;
    auto tensor = static_cast<std::size_t>(std::upper_bound(first_.begin(), first_.end(), begin) - first_.begin()) - 1;
    for (int64_t number = begin; number < end; ++tensor) {
      const int64_t size = sizes_[tensor];
      for (int64_t at = (number - first_[tensor]) * chunk_elements_; at < size && number < end;
           at += chunk_elements_, ++number) {
        visit(number, Chunk{tensor, at, std::min(size, at + chunk_elements_)});
      }
    }
  }

  // The chunk numbers that cut the chunks into `parts` runs of about equal work; parts + 1 of them.
  std::vector<int64_t> balanced(int64_t parts) const {
    std::vector<int64_t> cuts{0};
    const int64_t total = elements_ + kTensorCost * static_cast<int64_t>(sizes_.size());
    int64_t work = 0;
    for (std::size_t tensor = 0; tensor < sizes_.size(); ++tensor) {
      const int64_t next = work + kTensorCost + sizes_[tensor];
      while (static_cast<int64_t>(cuts.size()) < parts) {
        const int64_t target = total / parts * static_cast<int64_t>(cuts.size());
        if (target >= next) break;
        cuts.push_back(first_[tensor] + std::min(target - work, sizes_[tensor]) / chunk_elements_);
      }
      work = next;
    }
    cuts.resize(static_cast<std::size_t>(parts), chunks_);
    cuts.push_back(chunks_);
    return cuts;
  }

 private:
  static constexpr int64_t kTensorCost = 64;  // of starting on a tensor, in elements
  int64_t chunk_elements_;
  int64_t chunks_ = 0;
  int64_t elements_ = 0;
  std::vector<int64_t> sizes_;
  std::vector<int64_t> first_;  // number of each tensor's first chunk
};

}  // namespace fusedaccum
