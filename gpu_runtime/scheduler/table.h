// The sequence table and the block pool: ending sequences and taking back what they held.
#pragma once
#include "scheduler/token_log.h"

namespace blink {

// Gives the blocks of all sequences back for which `gone(slot)` holds. Their status is the caller's to change.
template <class Exec, class Gone>
BLINK_FN void release_blocks(const Exec& exec, State& state, Gone gone) {
  const auto held = [&](uint32_t i) -> uint64_t {
    const uint32_t slot = state.order[i];
    return gone(slot) ? state.sequences[slot].blocks : 0;
  };
  const uint64_t freed = exec.scan(state.live, held, [&](uint32_t i, uint64_t before) {
    const uint32_t slot = state.order[i];
    if (!gone(slot)) return;
    uint32_t* to = state.free_blocks + state.free_block_count + before;
    for (uint32_t b = 0; b < state.sequences[slot].blocks; ++b) to[b] = blocks_of(state, slot)[b];
  });
  const uint64_t unreserved = exec.scan(
      state.live,
      [&](uint32_t i) -> uint64_t {
        const Sequence& sequence = state.sequences[state.order[i]];
        const bool counts = gone(state.order[i]) && sequence.status == Status::kRunning;
        return counts ? (uint64_t{1} << 32 | sequence.reserved) : 0;
      },
      [](uint32_t, uint64_t) {});
  exec.each(state.live, [&](uint32_t i) {
    if (gone(state.order[i])) state.sequences[state.order[i]].blocks = 0;
  });
  exec.leader([&] {
    state.free_block_count += static_cast<uint32_t>(freed);
    state.reserved_blocks -= static_cast<uint32_t>(unreserved);
    state.running -= static_cast<uint32_t>(unreserved >> 32);
  });
}

// Takes the slots of free sequences out of the order and back into the pool of slots.
template <class Exec>
BLINK_FN void compact_order(const Exec& exec, State& state) {
  const auto is_free = [&](uint32_t i) { return state.sequences[state.order[i]].status == Status::kFree; };
  const uint64_t kept = exec.scan(
      state.live, [&](uint32_t i) -> uint64_t { return !is_free(i); },
      [&](uint32_t i, uint64_t before) {
        if (is_free(i)) {
          state.free_slots[state.free_slot_count + i - before] = state.order[i];
        } else {
          state.order_next[before] = state.order[i];
        }
      });
  exec.leader([&] {
    state.free_slot_count += state.live - static_cast<uint32_t>(kept);
    state.live = static_cast<uint32_t>(kept);
    uint32_t* order = state.order;
    state.order = state.order_next;
    state.order_next = order;
  });
}

// Writes the END records of ending sequences while their logs have room, by arrival, and frees those sequences.
template <class Exec>
BLINK_FN void flush_ending(const Exec& exec, State& state) {
  const auto channel_of = [&](uint32_t i) {
    const Sequence& sequence = state.sequences[state.order[i]];
    return sequence.status == Status::kEnding ? sequence.channel : kNone;
  };
  const auto one = [](uint32_t) -> uint32_t { return 1; };
  exec.rank(state.live, state.config.channels, state.counts, channel_of, one, [&](uint32_t i, uint32_t rank) {
    Sequence& sequence = state.sequences[state.order[i]];
    const Channel& channel = state.channels[sequence.channel];
    if (rank >= log_room(state, channel)) return;
    const Record record{arena::RecordKind::END, sequence.finish, sequence.error, sequence.position, 0};
    write_record(state, sequence.channel, channel.log_next + rank, record);
    sequence.query = 1;  // marks it as told
  });
  exec.each(state.config.channels, [&](uint32_t c) {
    Channel& channel = state.channels[c];
    const uint64_t room = log_room(state, channel);
    const uint32_t told = state.counts[c] < room ? state.counts[c] : static_cast<uint32_t>(room);
    channel.log_next += told;
    channel.ending = state.counts[c] - told;
  });
  exec.each(state.live, [&](uint32_t i) {
    Sequence& sequence = state.sequences[state.order[i]];
    if (sequence.status == Status::kEnding && sequence.query == 1) sequence.status = Status::kFree;
  });
  compact_order(exec, state);
}

}  // namespace blink
