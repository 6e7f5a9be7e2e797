// The host's executor of `select.h`: a block of one thread.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

namespace blink::sampling {

class HostRow {
 public:
  static constexpr uint32_t kPart = 512;

  template <class Step>
  void walk(const float* row, uint32_t size, Step step) const {
    for (uint32_t i = 0; i < size; ++i) step(i, row[i]);
  }

  template <class F>
  void each(uint32_t n, F f) const {
    for (uint32_t i = 0; i < n; ++i) f(i);
  }

  void barrier() const {}
  uint64_t max(uint64_t x) const { return x; }
  uint64_t sum(uint64_t x) const { return x; }

  template <class Value, class Use>
  uint64_t scan(uint32_t n, Value value, Use use) const {
    uint64_t sum = 0;
    for (uint32_t i = 0; i < n; ++i) {
      const uint64_t own = value(i);
      use(i, sum);
      sum += own;
    }
    return sum;
  }

  template <class Value>
  uint64_t totals(const float* row, uint32_t size, Value value) const {
    parts_.clear();
    uint64_t total = 0;
    for (uint32_t begin = 0; begin < size; begin += kPart) {
      uint64_t part = 0;
      for (uint32_t i = begin; i < std::min(size, begin + kPart); ++i) part += value(i, row[i]);
      parts_.push_back(part);
      total += part;
    }
    return total;
  }

  template <class Value>
  uint32_t locate(const float* row, uint32_t size, Value value, uint64_t target) const {
    uint32_t part = 0;
    uint64_t sum = 0;
    while (part + 1 < parts_.size() && sum + parts_[part] <= target) sum += parts_[part++];
    uint32_t i = part * kPart;
    for (; i + 1 < size; ++i) {
      sum += value(i, row[i]);
      if (sum > target) break;
    }
    return i;
  }

  uint32_t add(uint32_t* word, uint32_t x) const {
    const uint32_t before = *word;
    *word += x;
    return before;
  }

  float add(float* word, float x) const {
    const float before = *word;
    *word += x;
    return before;
  }

 private:
  mutable std::vector<uint64_t> parts_;
};

}  // namespace blink::sampling
