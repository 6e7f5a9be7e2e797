// The GPU's executor: one block, one thread per item, a barrier at the end of every member.
#pragma once
#include "blink_proto/arena.h"
#include "scheduler/exec.h"

namespace blink {

inline constexpr uint32_t kWarp = 32;
inline constexpr uint32_t kMaxWarps = 32;

// What the threads of the block share while a member runs.
struct BlockScratch {
  uint64_t warp_sums[kMaxWarps];
  uint32_t warp_counts[kMaxWarps][arena::MAX_CHANNELS];
};

struct BlockExec {
  BlockScratch* scratch;

  __device__ void barrier() const { __syncthreads(); }

  template <class F>
  __device__ void each(uint32_t n, F f) const {
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < n; i += blockDim.x) f(i);
    __syncthreads();
  }

  template <class P, class Q>
  __device__ bool all(uint32_t n, P p, uint32_t m, Q q) const {
    const uint32_t first = warps_of(m);
    bool holds = true;
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < first + n; i += blockDim.x) {
      holds = holds && (i < first ? i >= m || q(i) : p(i - first));
    }
    return __syncthreads_and(holds) != 0;
  }

  template <class F, class G, class H, class Last>
  __device__ void beside(uint32_t n, F f, uint32_t m, G g, H h, Last last) const {
    const uint32_t first = warps_of(m);
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < first + n; i += blockDim.x) {
      if (i >= first) {
        f(i - first);
      } else if (i < m) {
        g(i);
      }
    }
    if (threadIdx.x == 0) h();
    if (threadIdx.x == blockDim.x - 1) last();  // the thread that has the least else to do
    __syncthreads();
  }

  template <class Value, class Use>
  __device__ uint64_t scan(uint32_t n, Value value, Use use) const {
    uint64_t carry = 0;
#pragma unroll 1
    for (uint32_t base = 0; base < n; base += blockDim.x) {
      const uint32_t i = base + threadIdx.x;
      const uint64_t own = i < n ? value(i) : 0;
      const uint64_t inclusive = inclusive_sum(own);
      const uint64_t sum = scratch->warp_sums[blockDim.x / kWarp - 1];
      if (i < n) use(i, carry + inclusive - own);
      carry += sum;
      __syncthreads();
    }
    if (n == 0) __syncthreads();  // orders the reads of n itself
    return carry;
  }

  template <class Key, class Weight, class Use>
  __device__ void rank(uint32_t n, uint32_t keys, uint32_t* counts, Key key, Weight weight, Use use) const {
    each(keys, [&](uint32_t k) { counts[k] = 0; });
    const uint32_t warp = threadIdx.x / kWarp;
    const uint32_t lane = threadIdx.x % kWarp;
#pragma unroll 1
    for (uint32_t base = 0; base < n; base += blockDim.x) {
#pragma unroll 1
      for (uint32_t k = lane; k < keys; k += kWarp) scratch->warp_counts[warp][k] = 0;
      __syncwarp();
      const uint32_t i = base + threadIdx.x;
      const uint32_t own = i < n ? key(i) : kNone;
      const uint32_t peers = __match_any_sync(0xFFFFFFFFu, own);
      const uint32_t earlier = peers & ((1u << lane) - 1);
      const uint32_t own_weight = own != kNone ? weight(i) : 0;
      uint32_t before = 0;
      uint32_t all = 0;
      for (uint32_t bit = 0; 1u << bit < kRankWeights; ++bit) {
        const uint32_t set = __ballot_sync(0xFFFFFFFFu, own_weight >> bit & 1);
        before += static_cast<uint32_t>(__popc(set & earlier)) << bit;
        all += static_cast<uint32_t>(__popc(set & peers)) << bit;
      }
      if (own != kNone && earlier == 0) scratch->warp_counts[warp][own] = all;
      __syncthreads();
      if (own != kNone) {
        uint32_t rank = counts[own] + before;
#pragma unroll 1
        for (uint32_t w = 0; w < warp; ++w) rank += scratch->warp_counts[w][own];
        use(i, rank);
      }
      __syncthreads();
#pragma unroll 1
      for (uint32_t k = threadIdx.x; k < keys; k += blockDim.x) {
#pragma unroll 1
        for (uint32_t w = 0; w < blockDim.x / kWarp; ++w) counts[k] += scratch->warp_counts[w][k];
      }
      __syncthreads();
    }
  }

  template <class F>
  __device__ void leader(F f) const {
    if (threadIdx.x == 0) f();
    __syncthreads();
  }

 private:
  // Threads of the warps in front, which so many items have to themselves.
  __device__ static uint32_t warps_of(uint32_t items) { return (items + kWarp - 1) / kWarp * kWarp; }

  // Inclusive sum over the block's threads; leaves the running sums of the warps in the scratch.
  __device__ __noinline__ uint64_t inclusive_sum(uint64_t own) const {
    const uint32_t lane = threadIdx.x % kWarp;
    const uint32_t warp = threadIdx.x / kWarp;
    uint64_t sum = own;
#pragma unroll 1
    for (uint32_t delta = 1; delta < kWarp; delta *= 2) {
      const uint64_t other = __shfl_up_sync(0xFFFFFFFFu, sum, delta);
      if (lane >= delta) sum += other;
    }
    if (lane == kWarp - 1) scratch->warp_sums[warp] = sum;
    __syncthreads();
    if (warp == 0) {
      const uint32_t warps = blockDim.x / kWarp;
      uint64_t total = lane < warps ? scratch->warp_sums[lane] : 0;
#pragma unroll 1
      for (uint32_t delta = 1; delta < kWarp; delta *= 2) {
        const uint64_t other = __shfl_up_sync(0xFFFFFFFFu, total, delta);
        if (lane >= delta) total += other;
      }
      if (lane < warps) scratch->warp_sums[lane] = total;
    }
    __syncthreads();
    return warp == 0 ? sum : sum + scratch->warp_sums[warp - 1];
  }
};

}  // namespace blink
