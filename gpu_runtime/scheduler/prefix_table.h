// The index of the prefix cache: from a key to the blocks that may hold what is looked for. A key is only where to
// look; what counts is that a block holds the same tokens behind the very block that was found before it.
#pragma once
#include "scheduler/memory.h"
#include "scheduler/state.h"

// Tests that want keys to collide take less of them.
#ifndef BLINK_PREFIX_KEY_MASK
#define BLINK_PREFIX_KEY_MASK 0xFFFFFFFFFFFFFFFFull
#endif

namespace blink {

// Buckets of the index, and entries of the queue of idle blocks: a power of two, twice as many as blocks or more.
inline uint64_t bucket_count(const layout::SchedulerConfig& config) {
  uint64_t count = 1;
  while (count < uint64_t{config.blocks} * 2) count *= 2;
  return count;
}

BLINK_FN uint64_t mix(uint64_t x) {
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ x >> 27) * 0x94D049BB133111EBull;
  return x ^ x >> 31;
}

// Key of no tokens.
BLINK_FN uint64_t first_key(const State& state, uint64_t salt) {
  return mix(mix(state.config.hash_seed) + salt) & BLINK_PREFIX_KEY_MASK;
}

BLINK_FN uint64_t* keys_of(const State& state, uint32_t slot) {
  return state.keys + uint64_t{slot} * state.config.blocks_per_sequence;
}

BLINK_FN const uint32_t* tokens_of(const State& state, uint32_t slot, uint32_t k) {
  return history_of(state, slot) + uint64_t{k} * state.config.block_tokens;
}

// What the k-th block's tokens add to the keys of it and of all behind it. A sum instead of a hash of a hash: sums over
// many blocks are found by all threads at once.
BLINK_FN uint64_t content_key(const State& state, uint32_t slot, uint32_t k) {
  const uint32_t* tokens = tokens_of(state, slot, k);
  uint64_t key = mix(state.config.hash_seed + k);
  for (uint32_t i = 0; i < state.config.block_tokens; ++i) key = mix(key + tokens[i]);
  return key & BLINK_PREFIX_KEY_MASK;
}

// Fills the row of keys of a slot up to `count` full blocks.
template <class Exec>
BLINK_FN void find_keys(const Exec& exec, State& state, uint32_t slot, uint32_t count) {
  Prefix& prefix = state.prefixes[slot];
  const uint32_t first = prefix.hashed;
  if (count <= first) return;
  uint64_t* keys = keys_of(state, slot);
  const uint64_t before_all = first == 0 ? prefix.key : keys[first - 1];
  const auto content = [&](uint32_t j) { return content_key(state, slot, first + j); };
  exec.scan(count - first, content,
            [&](uint32_t j, uint64_t before) { keys[first + j] = before_all + before + content(j); });
  exec.leader([&] { prefix.hashed = count; });
}

BLINK_FN uint32_t* bucket_of(const State& state, uint64_t key) {
  return state.buckets + (mix(key) & state.bucket_mask);
}

BLINK_FN bool holds_tokens(const State& state, uint32_t block, const uint32_t* tokens) {
  const uint32_t* held = state.cached_tokens + uint64_t{block} * state.config.block_tokens;
  for (uint32_t i = 0; i < state.config.block_tokens; ++i) {
    if (held[i] != tokens[i]) return false;
  }
  return true;
}

// An indexed block with the key and the tokens of a sequence's k-th one; kNoBlock: there is none.
BLINK_FN uint32_t find_block(const State& state, uint32_t slot, uint32_t k) {
  const uint64_t key = keys_of(state, slot)[k];
  uint32_t block = *bucket_of(state, key);
  for (uint32_t seen = 0; block != kNoBlock && seen < state.config.blocks; ++seen) {
    if (state.cached[block].key == key && holds_tokens(state, block, tokens_of(state, slot, k))) return block;
    block = state.cached[block].next;
  }
  return kNoBlock;
}

// Enters the k-th block of a sequence, which has just come to be indexed. Not beside a search.
BLINK_FN void link_block(State& state, uint32_t slot, uint32_t k) {
  const auto* row = blocks_of(state, slot);
  const auto block = static_cast<uint32_t>(row[k]);
  const uint32_t parent = k == 0 ? kNoBlock : static_cast<uint32_t>(row[k - 1]);
  CachedBlock& cached = state.cached[block];
  cached.key = keys_of(state, slot)[k];
  cached.salt = state.prefixes[slot].salt;
  cached.parent = parent;
  cached.parent_generation = state.cached[parent].generation;
  cached.holders = cached.indexed = 1;
  const uint32_t* tokens = tokens_of(state, slot, k);
  uint32_t* held = state.cached_tokens + uint64_t{block} * state.config.block_tokens;
  for (uint32_t i = 0; i < state.config.block_tokens; ++i) held[i] = tokens[i];
  cached.next = exchange_among_threads(bucket_of(state, cached.key), block);
}

// Takes all blocks that are no longer indexed out of a bucket. One thread for each bucket.
BLINK_FN void clear_bucket(State& state, uint32_t* bucket) {
  uint32_t* link = bucket;
  for (uint32_t seen = 0; *link != kNoBlock && seen < state.config.blocks; ++seen) {
    CachedBlock& cached = state.cached[*link];
    if (cached.indexed) {
      link = &cached.next;
    } else {
      *link = cached.next;
    }
  }
}

}  // namespace blink
