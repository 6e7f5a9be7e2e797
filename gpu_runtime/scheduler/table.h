// The sequence table and the block pool: ending sequences and taking back what they held.
#pragma once
#include "scheduler/items.h"
#include "scheduler/prefix_cache.h"
#include "scheduler/token_log.h"

namespace blink {

// A block in a sequence's row, as an item of those that are let go: the last one of a sequence first.
struct Held {
  uint32_t i;  // of the sequence in the order
  uint32_t block;
  bool indexed;
};

BLINK_FN Held held_at(const State& state, uint32_t at) {
  const Item item = item_at(state, state.live, at);
  const uint32_t slot = state.order[item.i];
  const uint32_t k = state.sequences[slot].blocks - 1 - item.k;
  const bool indexed = state.config.prefix_cache && k < state.prefixes[slot].indexed;
  return {item.i, static_cast<uint32_t>(blocks_of(state, slot)[k]), indexed};
}

// One holder less for each of the items that are indexed blocks. `released_by` becomes the last that lets a block go.
template <class Exec>
BLINK_FN void leave_shared(const Exec& exec, State& state, uint32_t items) {
  if (!state.config.prefix_cache) return;
  exec.each(items, [&](uint32_t t) { state.cached[held_at(state, t).block].released_by = 0; });
  exec.each(items, [&](uint32_t t) {
    const Held held = held_at(state, t);
    if (!held.indexed) return;
    CachedBlock& cached = state.cached[held.block];
    add_among_threads(&cached.holders, 0xFFFFFFFFu);
    raise_among_threads(&cached.released_by, held.i);
  });
}

// Puts the items that nobody holds any more where they belong: what is indexed behind the idle blocks, the rest on the
// stack of free ones. Returns how many of each: free ones in the high half.
template <class Exec>
BLINK_FN uint64_t put_back(const Exec& exec, State& state, uint32_t items) {
  const auto place = [&](const Held& held) -> uint64_t {
    if (!held.indexed) return uint64_t{1} << 32;
    const CachedBlock& cached = state.cached[held.block];
    return cached.holders == 0 && cached.released_by == held.i;
  };
  return exec.scan(
      items, [&](uint32_t t) { return place(held_at(state, t)); },
      [&](uint32_t t, uint64_t before) {
        const Held held = held_at(state, t);
        if (!held.indexed) {
          state.free_blocks[state.free_block_count + (before >> 32)] = held.block;
        } else if (place(held) != 0) {
          push_idle(state, state.idle_tail + (before & 0xFFFFFFFFu), held.block);
        }
      });
}

// Gives the blocks of all sequences back for which `gone(slot)` holds. Their status is the caller's to change.
template <class Exec, class Gone>
BLINK_FN void release_blocks(const Exec& exec, State& state, Gone gone) {
  keep_answers(exec, state, gone);
  const uint32_t items = lay_out(exec, state, state.live, [&](uint32_t i) -> uint64_t {
    return gone(state.order[i]) ? state.sequences[state.order[i]].blocks : 0;
  });
  leave_shared(exec, state, items);
  if (state.config.prefix_cache) make_idle_room(exec, state, items);
  const uint64_t back = put_back(exec, state, items);
  const uint64_t unreserved = exec.scan(
      state.live,
      [&](uint32_t i) -> uint64_t {
        const Sequence& sequence = state.sequences[state.order[i]];
        const bool counts = gone(state.order[i]) && sequence.status == Status::kRunning;
        return counts ? (uint64_t{1} << 32 | (sequence.reserved - sequence.blocks)) : 0;
      },
      [](uint32_t, uint64_t) {});
  exec.each(state.live, [&](uint32_t i) {
    if (gone(state.order[i])) state.sequences[state.order[i]].blocks = 0;
  });
  exec.leader([&] {
    const auto freed = static_cast<uint32_t>(back >> 32);
    const auto idle = static_cast<uint32_t>(back);
    state.free_block_count += freed;
    state.idle_tail += idle;
    state.held_blocks -= freed + idle;
    state.reserved_blocks -= static_cast<uint32_t>(unreserved) + freed + idle;
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
