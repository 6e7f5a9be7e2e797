// Checks the prefix cache's invariants; for tests. Serial, on the host.
#pragma once
#include <vector>

#include "scheduler/prefix_cache.h"
#include "scheduler/token_log.h"

namespace blink {

// The buckets hold the indexed blocks and no others, each once and where it belongs.
inline const char* audit_buckets(const State& state) {
  std::vector<int> seen(state.config.blocks, 0);
  for (uint64_t bucket = 0; bucket <= state.bucket_mask; ++bucket) {
    for (uint32_t block = state.buckets[bucket]; block != kNoBlock; block = state.cached[block].next) {
      if (block >= state.config.blocks) return "a bucket holds what is no block";
      if (seen[block]++ != 0) return "a block is in the index twice";
      if (bucket_of(state, state.cached[block].key) != state.buckets + bucket) return "a block is in a wrong bucket";
    }
  }
  for (uint32_t b = 0; b < state.config.blocks; ++b) {
    if (seen[b] != static_cast<int>(state.cached[b].indexed)) return "the index holds a wrong block, or lacks one";
  }
  return nullptr;
}

// An indexed block's parent is indexed, held if it is held, and else stands behind it in the queue.
inline const char* audit_parents(const State& state) {
  for (uint32_t b = 1; b < state.config.blocks; ++b) {
    const CachedBlock& cached = state.cached[b];
    if (!cached.indexed) continue;
    if ((cached.holders == 0) != (cached.idle_at != 0)) return "a block is idle and held, or neither";
    if (cached.parent == kNoBlock) continue;
    const CachedBlock& parent = state.cached[cached.parent];
    if (!parent.indexed || parent.generation != cached.parent_generation) return "a block has outlived its parent";
    if (cached.holders > parent.holders) return "a block is held without its parent";
    if (parent.holders == 0 && parent.idle_at <= cached.idle_at) return "a parent would be evicted before its child";
  }
  return nullptr;
}

inline const char* audit_queue(const State& state) {
  uint32_t idle = 0;
  for (uint64_t at = state.idle_head; at != state.idle_tail; ++at) idle += is_idle(state, at);
  if (state.idle_tail - state.idle_head > state.bucket_mask + 1) return "the queue of idle blocks is over-full";
  return idle == idle_blocks(state) ? nullptr : "the idle blocks are miscounted";
}

// A sequence's indexed blocks are full, computed, hold its tokens, and are each the parent of the next.
inline const char* audit_prefix(const State& state, uint32_t slot) {
  const Prefix& prefix = state.prefixes[slot];
  if (state.sequences[slot].status != Status::kRunning) return nullptr;
  if (uint64_t{prefix.indexed} * state.config.block_tokens > state.sequences[slot].computed) {
    return "a block is indexed that is not computed";
  }
  for (uint32_t k = 0; k < prefix.indexed; ++k) {
    const auto block = static_cast<uint32_t>(blocks_of(state, slot)[k]);
    const auto parent = k == 0 ? kNoBlock : static_cast<uint32_t>(blocks_of(state, slot)[k - 1]);
    if (!holds_tokens(state, block, tokens_of(state, slot, k))) return "a shared block holds other tokens";
    if (state.cached[block].parent != parent) return "a shared block has another parent";
    if (k == 0 && state.cached[block].salt != prefix.salt) return "a block is shared by different salts";
  }
  return nullptr;
}

inline const char* audit_cache(const State& state) {
  if (!state.config.prefix_cache) return nullptr;
  if (const char* broken = audit_buckets(state)) return broken;
  if (const char* broken = audit_parents(state)) return broken;
  if (const char* broken = audit_queue(state)) return broken;
  for (uint32_t i = 0; i < state.live; ++i) {
    if (const char* broken = audit_prefix(state, state.order[i])) return broken;
  }
  return nullptr;
}

}  // namespace blink
