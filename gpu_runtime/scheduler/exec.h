// How a phase of the scheduler runs: a plain loop on the host, one thread per item on the GPU.
#pragma once
#include <cstdint>

#ifdef __CUDACC__
#define BLINK_FN __host__ __device__ inline
#else
#define BLINK_FN inline
#endif

namespace blink {

inline constexpr uint32_t kNone = 0xFFFFFFFFu;
inline constexpr uint32_t kRankWeights = 32;

// The host's executor. A device executor offers the same members with a barrier at the end of each, so a phase may
// rely on everything that the member calls before it have written.
struct HostExec {
  // Everything written before is seen by all threads after.
  void barrier() const {}

  // f(i) for every i below n, in any order.
  template <class F>
  void each(uint32_t n, F f) const {
    for (uint32_t i = 0; i < n; ++i) f(i);
  }

  // Whether p(i) holds for every i below n, and q(k) for every k below m. On the GPU the two go side by side.
  template <class P, class Q>
  bool all(uint32_t n, P p, uint32_t m, Q q) const {
    for (uint32_t i = 0; i < n; ++i) {
      if (!p(i)) return false;
    }
    for (uint32_t k = 0; k < m; ++k) {
      if (!q(k)) return false;
    }
    return true;
  }

  // f(i) for every i below n beside g(k) for every k below m, h() on one thread and last() on another one, in any
  // order.
  template <class F, class G, class H, class Last>
  void beside(uint32_t n, F f, uint32_t m, G g, H h, Last last) const {
    each(n, f);
    each(m, g);
    h();
    last();
  }

  // use(i, sum of value(j) for j < i) for every i below n; returns the sum over all. `value` must not depend on what
  // `use` writes.
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

  // use(i, sum of weight(j) over j < i with key(j) == key(i)) for every i below n whose key is not kNone; counts[k]
  // becomes the sum over all items with key k, for every k below `keys`. Weights are below kRankWeights.
  template <class Key, class Weight, class Use>
  void rank(uint32_t n, uint32_t keys, uint32_t* counts, Key key, Weight weight, Use use) const {
    for (uint32_t k = 0; k < keys; ++k) counts[k] = 0;
    for (uint32_t i = 0; i < n; ++i) {
      const uint32_t k = key(i);
      if (k == kNone) continue;
      use(i, counts[k]);
      counts[k] += weight(i);
    }
  }

  // f() on one thread.
  template <class F>
  void leader(F f) const {
    f();
  }
};

}  // namespace blink
