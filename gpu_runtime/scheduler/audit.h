// Checks the scheduler's own invariants; for tests. Serial, on the host.
#pragma once
#include <vector>

#include "scheduler/audit_cache.h"

namespace blink {

inline bool is_shared(const State& state, uint32_t slot, uint32_t k) {
  return state.config.prefix_cache && k < state.prefixes[slot].indexed;
}

// Where every block is: on the stack of free ones, in one row as the sequence's own, or indexed, and then in as many
// rows as it has holders.
inline const char* audit_blocks(const State& state) {
  std::vector<uint32_t> owners(state.config.blocks, 0);
  std::vector<uint32_t> holders(state.config.blocks, 0);
  for (uint32_t i = 0; i < state.free_block_count; ++i) ++owners[state.free_blocks[i]];
  for (uint32_t i = 0; i < state.live; ++i) {
    const uint32_t slot = state.order[i];
    for (uint32_t b = 0; b < state.sequences[slot].blocks; ++b) {
      const int32_t block = blocks_of(state, slot)[b];
      if (block < 0 || static_cast<uint32_t>(block) >= state.config.blocks) return "a block id is out of range";
      ++(is_shared(state, slot, b) ? holders : owners)[static_cast<uint32_t>(block)];
    }
  }
  if (owners[layout::SCRATCH_BLOCK] != 0 || holders[layout::SCRATCH_BLOCK] != 0) return "the scratch block is owned";
  uint32_t held = state.config.blocks - 1 - state.free_block_count;
  for (uint32_t b = 1; b < state.config.blocks; ++b) {
    const bool indexed = state.config.prefix_cache && state.cached[b].indexed;
    if (owners[b] + indexed == 0) return "a block is lost";
    if (owners[b] + indexed > 1) return "a block is owned twice";
    if (indexed && state.cached[b].holders != holders[b]) return "the holders of a block are miscounted";
    if (!indexed && holders[b] != 0) return "a block is shared that is not indexed";
    held -= indexed && holders[b] == 0;
  }
  return held == state.held_blocks ? nullptr : "the held blocks are miscounted";
}

inline const char* audit_sequence(const State& state, const Sequence& sequence) {
  const bool running = sequence.status == Status::kRunning;
  if (sequence.status == Status::kFree) return "a free sequence stands in the order";
  if (!running && sequence.blocks != 0) return "a sequence that does not run holds blocks";
  if (running && sequence.computed + (sequence.max_tokens == 0) >= sequence.length) {
    return "a running sequence has nothing left to compute";
  }
  if (sequence.blocks > sequence.reserved) return "a sequence holds more blocks than it reserved";
  const uint64_t planned = uint64_t{sequence.computed} + (running ? sequence.query : 0);
  if (running && uint64_t{sequence.blocks} * state.config.block_tokens < planned) return "blocks are missing";
  return nullptr;
}

inline const char* audit_table(const State& state) {
  std::vector<int> seen(state.config.max_sequences, 0);
  uint32_t running = 0;
  uint32_t reserved = state.held_blocks;
  for (uint32_t i = 0; i < state.free_slot_count; ++i) ++seen[state.free_slots[i]];
  for (uint32_t i = 0; i < state.live; ++i) {
    const Sequence& sequence = state.sequences[state.order[i]];
    ++seen[state.order[i]];
    running += sequence.status == Status::kRunning;
    reserved += sequence.status == Status::kRunning ? sequence.reserved - sequence.blocks : 0;
    if (const char* broken = audit_sequence(state, sequence)) return broken;
  }
  for (int count : seen) {
    if (count != 1) return "a slot is lost or stands twice";
  }
  if (state.header.rows > state.config.max_running) return "more rows than there is room for";
  if (running != state.running || reserved != state.reserved_blocks) return "running or reserved is miscounted";
  if (running > state.config.max_running || reserved > state.config.blocks - 1) return "over-committed";
  return nullptr;
}

inline const char* audit_logs(const State& state) {
  for (uint32_t c = 0; c < state.config.channels; ++c) {
    const Channel& channel = state.channels[c];
    if (channel.log_read > channel.log_next) return "a log was read beyond its end";
    if (channel.log_next - channel.log_read > state.config.log_slots) return "an unread record was overwritten";
  }
  return nullptr;
}

// Null, or what is wrong.
inline const char* audit(const State& state) {
  if (const char* broken = audit_blocks(state)) return broken;
  if (const char* broken = audit_table(state)) return broken;
  if (const char* broken = audit_cache(state)) return broken;
  return audit_logs(state);
}

}  // namespace blink
