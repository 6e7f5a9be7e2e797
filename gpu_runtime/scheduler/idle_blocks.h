// Blocks of the prefix cache that no sequence holds: a queue in the order in which they were let go, a sequence's last
// block first. What was not used for longest is evicted first, and a block always before its parent, which whoever held
// the block held too. Blocks that are held again leave gaps: hence there is room for more entries than blocks.
#pragma once
#include "scheduler/prefix_table.h"

namespace blink {

BLINK_FN uint32_t& idle_entry(const State& state, uint32_t* queue, uint64_t at) {
  return queue[at & state.bucket_mask];
}

// Whether the queue's entry at a place still means something.
BLINK_FN bool is_idle(const State& state, uint64_t at) {
  return state.cached[idle_entry(state, state.idle, at)].idle_at == at;
}

BLINK_FN void push_idle(State& state, uint64_t at, uint32_t block) {
  idle_entry(state, state.idle, at) = block;
  state.cached[block].idle_at = at;
}

// Makes room for so many entries, of blocks that are not in the queue: closes its gaps when it must.
template <class Exec>
BLINK_FN void make_idle_room(const Exec& exec, State& state, uint64_t entries) {
  const uint64_t head = state.idle_head;
  const uint64_t tail = state.idle_tail;
  if (tail - head + entries <= state.bucket_mask + 1) return;
  const auto kept = [&](uint32_t i) -> uint64_t { return is_idle(state, head + i); };
  const uint64_t count = exec.scan(static_cast<uint32_t>(tail - head), kept, [&](uint32_t i, uint64_t before) {
    if (!kept(i)) return;
    const uint32_t block = idle_entry(state, state.idle, head + i);
    idle_entry(state, state.idle_next, tail + before) = block;
    state.cached[block].idle_at = tail + before;  // no entry of the old queue is at that place
  });
  exec.leader([&] {
    uint32_t* queue = state.idle;
    state.idle = state.idle_next;
    state.idle_next = queue;
    state.idle_head = tail;
    state.idle_tail = tail + count;
  });
}

// Puts the first `count` idle blocks on the stack of free ones, above those that are there; returns the queue's new
// head.
template <class Exec>
BLINK_FN uint64_t take_idle(const Exec& exec, State& state, uint32_t count) {
  constexpr uint32_t kPiece = 4096;  // entries looked at at once; more gaps than that are seldom
  uint32_t* stack = state.free_blocks + state.free_block_count;
  const uint64_t tail = state.idle_tail;
  uint64_t head = state.idle_head;
  for (uint32_t taken = 0; taken < count && head != tail;) {
    const auto piece = static_cast<uint32_t>(tail - head < kPiece ? tail - head : kPiece);
    const auto idle = [&](uint32_t i) -> uint64_t { return is_idle(state, head + i); };
    const uint64_t found = exec.scan(piece, idle, [&](uint32_t i, uint64_t before) {
      if (!idle(i) || taken + before >= count) return;
      stack[taken + before] = idle_entry(state, state.idle, head + i);
      if (taken + before + 1 == count) state.evict_head = head + i + 1;
    });
    taken += static_cast<uint32_t>(found);
    head += piece;
    if (taken >= count) head = state.evict_head;
  }
  return head;
}

// Evicts so many idle blocks, which there are.
template <class Exec>
BLINK_FN void evict(const Exec& exec, State& state, uint32_t count) {
  const uint64_t head = take_idle(exec, state, count);
  const uint32_t* blocks = state.free_blocks + state.free_block_count;
  const auto owner_of = [&](uint32_t t) -> uint32_t& {
    return state.bucket_owners[bucket_of(state, state.cached[blocks[t]].key) - state.buckets];
  };
  exec.each(count, [&](uint32_t t) {
    CachedBlock& cached = state.cached[blocks[t]];
    cached.indexed = 0;
    cached.idle_at = 0;
    ++cached.generation;
    owner_of(t) = t;  // of several in one bucket any one: they do the same
  });
  exec.each(count, [&](uint32_t t) {
    if (owner_of(t) == t) clear_bucket(state, bucket_of(state, state.cached[blocks[t]].key));
  });
  exec.leader([&] {
    state.idle_head = head;
    state.free_block_count += count;
  });
}

}  // namespace blink
