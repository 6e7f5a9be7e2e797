// Items of several sequences as one list, so that a block of threads goes through them at once: a sequence's KV blocks,
// for example, of which one has two and another thousands.
#pragma once
#include "scheduler/state.h"

namespace blink {

// The k-th item of the i-th sequence.
struct Item {
  uint32_t i, k;
};

// Lays out count(i) items of each of n sequences; returns how many there are in all.
template <class Exec, class Count>
BLINK_FN uint32_t lay_out(const Exec& exec, State& state, uint32_t n, Count count) {
  return static_cast<uint32_t>(exec.scan(n, count, [&](uint32_t i, uint64_t before) { state.spans[i] = before; }));
}

// The item at a place in the list: that of the last sequence which begins at or before it.
BLINK_FN Item item_at(const State& state, uint32_t n, uint32_t at) {
  uint32_t low = 0;
  for (uint32_t high = n; high - low > 1;) {
    const uint32_t middle = low + (high - low) / 2;
    if (state.spans[middle] <= at) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return {low, at - static_cast<uint32_t>(state.spans[low])};
}

}  // namespace blink
