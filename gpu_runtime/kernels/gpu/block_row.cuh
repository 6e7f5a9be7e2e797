// The GPU's executor of `kernels/select.h`: one block of kThreads threads for a row.
//
// A row is parted into as many runs of consecutive tokens as the block has warps. A warp goes through its run in chunks
// of 32 * 4 tokens, kAhead 16-byte loads a lane before their use. Parts begin at 16-byte boundaries, wherever the row
// does.
#pragma once
#include <cstdint>

namespace blink::sampling {

constexpr uint32_t kThreads = 1024;
constexpr uint32_t kWarpLanes = 32;
constexpr uint32_t kWarps = kThreads / kWarpLanes;
constexpr uint32_t kChunk = kWarpLanes * 4;
constexpr uint32_t kAhead = 2;
constexpr uint32_t kAll = 0xFFFFFFFFu;

// What the threads share while a member runs.
struct RowScratch {
  uint64_t warps[kWarps];
  uint64_t parts[kWarps];
  uint32_t found;
};

struct BlockRow {
  RowScratch* scratch;

  __device__ void barrier() const { __syncthreads(); }

  template <class F>
  __device__ void each(uint32_t n, F f) const {
    for (uint32_t i = threadIdx.x; i < n; i += kThreads) f(i);
  }

  template <class Step>
  __device__ void walk(const float* row, uint32_t size, Step step) const {
    const Span span(row, size);
    uint32_t at = warp() * span.part;  // of the warp
    const uint32_t end = at + span.part < span.end ? at + span.part : span.end;
    while (at < end) {
      if (at >= span.skew && at + kAhead * kChunk <= end) {
        float4 loaded[kAhead];
#pragma unroll
        for (uint32_t k = 0; k < kAhead; ++k) loaded[k] = span.whole(at + k * kChunk + lane() * 4);
#pragma unroll
        for (uint32_t k = 0; k < kAhead; ++k) {
          const uint32_t i = at + k * kChunk + lane() * 4 - span.skew;
          step(i, loaded[k].x);
          step(i + 1, loaded[k].y);
          step(i + 2, loaded[k].z);
          step(i + 3, loaded[k].w);
        }
        at += kAhead * kChunk;
      } else {  // the ends of the row
        const float4 loaded = span.load(at + lane() * 4);
#pragma unroll 1
        for (uint32_t k = 0; k < 4; ++k) {
          const float x = k < 2 ? (k == 0 ? loaded.x : loaded.y) : (k == 2 ? loaded.z : loaded.w);
          if (span.holds(at + lane() * 4 + k)) step(at + lane() * 4 + k - span.skew, x);
        }
        at += kChunk;
      }
    }
  }

  __device__ uint64_t max(uint64_t x) const {
    return reduce(x, [](uint64_t a, uint64_t b) { return a > b ? a : b; });
  }

  __device__ uint64_t sum(uint64_t x) const {
    return reduce(x, [](uint64_t a, uint64_t b) { return a + b; });
  }

  template <class Value, class Use>
  __device__ uint64_t scan(uint32_t n, Value value, Use use) const {
    uint64_t carry = 0;
    for (uint32_t base = 0; base < n; base += kThreads) {
      const uint32_t i = base + threadIdx.x;
      const uint64_t own = i < n ? value(i) : 0;
      const uint64_t inclusive = inclusive_sum(own);
      if (i < n) use(i, carry + inclusive - own);
      carry += scratch->warps[kWarps - 1];
      __syncthreads();
    }
    return carry;
  }

  template <class Value>
  __device__ uint64_t totals(const float* row, uint32_t size, Value value) const {
    uint64_t own = 0;
    walk(row, size, [&](uint32_t i, float x) { own += value(i, x); });
    const uint64_t part = warp_sum(own);
    if (lane() == 0) scratch->parts[warp()] = part;
    __syncthreads();
    uint64_t total = 0;
    for (uint32_t w = 0; w < kWarps; ++w) total += scratch->parts[w];
    return total;
  }

  template <class Value>
  __device__ uint32_t locate(const float* row, uint32_t size, Value value, uint64_t target) const {
    uint32_t part = 0;
    uint64_t before = 0;
    while (part + 1 < kWarps && before + scratch->parts[part] <= target) before += scratch->parts[part++];
    const Span span(row, size);
    const uint32_t end = (part + 1) * span.part;
    for (uint32_t base = part * span.part; base < end; base += 4 * kThreads) {
      const uint32_t at = base + threadIdx.x * 4;
      uint64_t weights[4] = {0, 0, 0, 0};
      if (at < end) {
        uint32_t k = 0;
        const float4 loaded = span.load(at);
        const float x[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
#pragma unroll
        for (; k < 4; ++k) {
          if (span.holds(at + k)) weights[k] = value(at + k - span.skew, x[k]);
        }
      }
      const uint64_t own = weights[0] + weights[1] + weights[2] + weights[3];
      uint64_t sum = before + inclusive_sum(own) - own;
      if (sum <= target && target - sum < own) {
        uint32_t k = 0;
        for (; k < 3 && sum + weights[k] <= target; ++k) sum += weights[k];
        scratch->found = at + k - span.skew;
      }
      before += scratch->warps[kWarps - 1];
      __syncthreads();
      if (before > target) break;
    }
    return scratch->found;
  }

  __device__ uint32_t add(uint32_t* word, uint32_t x) const { return atomicAdd(word, x); }
  __device__ float add(float* word, float x) const { return atomicAdd(word, x); }

 private:
  __device__ static uint32_t lane() { return threadIdx.x % kWarpLanes; }
  __device__ static uint32_t warp() { return threadIdx.x / kWarpLanes; }

  // A row seen from the 16-byte boundary at or before its start: `skew` places there are not its own.
  struct Span {
    const float* base;
    uint32_t skew;
    uint32_t end;
    uint32_t part;  // places of a warp

    __device__ Span(const float* row, uint32_t size)
        : skew(static_cast<uint32_t>(reinterpret_cast<uintptr_t>(row) / sizeof(float) % 4)) {
      base = row - skew;
      end = skew + size;
      part = (end + kWarps * kChunk - 1) / (kWarps * kChunk) * kChunk;
    }

    __device__ bool holds(uint32_t at) const { return at >= skew && at < end; }

    __device__ float4 whole(uint32_t at) const { return *reinterpret_cast<const float4*>(base + at); }

    // Zero at places that are not the row's.
    __device__ float4 load(uint32_t at) const {
      if (at >= skew && at + 4 <= end) return whole(at);
      return make_float4(one(at), one(at + 1), one(at + 2), one(at + 3));
    }

   private:
    __device__ float one(uint32_t at) const { return holds(at) ? base[at] : 0.0f; }
  };

  template <class Combine>
  __device__ uint64_t reduce(uint64_t x, Combine combine) const {
    for (uint32_t delta = kWarpLanes / 2; delta > 0; delta /= 2) x = combine(x, __shfl_xor_sync(kAll, x, delta));
    if (lane() == 0) scratch->warps[warp()] = x;
    __syncthreads();
    x = scratch->warps[lane()];
    for (uint32_t delta = kWarps / 2; delta > 0; delta /= 2) x = combine(x, __shfl_xor_sync(kAll, x, delta));
    __syncthreads();
    return x;
  }

  __device__ static uint64_t warp_sum(uint64_t x) {
    for (uint32_t delta = kWarpLanes / 2; delta > 0; delta /= 2) x += __shfl_xor_sync(kAll, x, delta);
    return x;
  }

  // Inclusive sum over the threads; leaves those of the warps in the scratch, to be read before the next barrier.
  __device__ uint64_t inclusive_sum(uint64_t own) const {
    uint64_t sum = warp_inclusive_sum(own);
    if (lane() == kWarpLanes - 1) scratch->warps[warp()] = sum;
    __syncthreads();
    if (warp() == 0) scratch->warps[lane()] = warp_inclusive_sum(scratch->warps[lane()]);
    __syncthreads();
    return warp() == 0 ? sum : sum + scratch->warps[warp() - 1];
  }

  __device__ static uint64_t warp_inclusive_sum(uint64_t sum) {
    for (uint32_t delta = 1; delta < kWarpLanes; delta *= 2) {
      const uint64_t other = __shfl_up_sync(kAll, sum, delta);
      if (lane() >= delta) sum += other;
    }
    return sum;
  }
};

static_assert(kWarps == kWarpLanes, "a warp reduces one value of each warp");

}  // namespace blink::sampling
