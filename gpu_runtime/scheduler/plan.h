// plan: which sequences get how many tokens in the next step.
#pragma once
#include "scheduler/table.h"

namespace blink {

// Admits waiting sequences strictly by arrival while places and blocks last.
template <class Exec>
BLINK_FN void admit(const Exec& exec, State& state) {
  const uint64_t free_blocks = state.config.blocks - 1 - state.reserved_blocks;
  const uint64_t free_places = state.config.max_running - state.running;
  const auto wish = [&](uint32_t i) -> uint64_t {
    const Sequence& sequence = state.sequences[state.order[i]];
    return sequence.status == Status::kWaiting ? (uint64_t{1} << 32 | sequence.reserved) : 0;
  };
  const auto fits = [&](uint64_t before, uint64_t reserved) {
    return (before >> 32) < free_places && (before & 0xFFFFFFFFu) + reserved <= free_blocks;
  };
  exec.scan(state.live, wish, [&](uint32_t i, uint64_t before) {
    Sequence& sequence = state.sequences[state.order[i]];
    sequence.query = sequence.status == Status::kWaiting && fits(before, sequence.reserved);
  });
  const auto admitted = [&](uint32_t i) -> uint64_t {
    const Sequence& sequence = state.sequences[state.order[i]];
    return sequence.query ? (uint64_t{1} << 32 | sequence.reserved) : 0;
  };
  const uint64_t sum = exec.scan(state.live, admitted, [](uint32_t, uint64_t) {});
  exec.each(state.live, [&](uint32_t i) {
    Sequence& sequence = state.sequences[state.order[i]];
    if (sequence.query) sequence.status = Status::kRunning;
  });
  exec.leader([&] {
    state.running += static_cast<uint32_t>(sum >> 32);
    state.reserved_blocks += static_cast<uint32_t>(sum);
  });
}

// Shares what is left of rows, and of the logs' records, evenly among the sequences that score their prompts: so many
// tokens each may bring beyond the one that each may in any case. `counts`: records that the channels have given away.
template <class Exec>
BLINK_FN void share_room(const Exec& exec, State& state) {
  const auto takes_part = [&](uint32_t i) {
    const Sequence& sequence = state.sequences[state.order[i]];
    return sequence.status == Status::kRunning && sequence.room != 0 && scores(sequence);
  };
  const uint64_t sharing =
      exec.scan(state.live, [&](uint32_t i) -> uint64_t { return takes_part(i); }, [](uint32_t, uint64_t) {});
  const uint32_t spare_rows = state.config.max_running - state.running;
  exec.each(state.live, [&](uint32_t i) {
    if (!takes_part(i)) return;
    Sequence& sequence = state.sequences[state.order[i]];
    const uint64_t room = log_room_to_spare(state, state.channels[sequence.channel]);
    const uint64_t given = state.counts[sequence.channel];
    const uint64_t spare = room > given ? (room - given) / records_per_token(sequence) : 0;
    sequence.room += static_cast<uint32_t>((spare < spare_rows ? spare : spare_rows) / sharing);
  });
}

// Decides how many tokens each running sequence may bring: the log must have room for their records.
template <class Exec>
BLINK_FN void keep_log_room(const Exec& exec, State& state) {
  const auto channel_of = [&](uint32_t i) {
    const Sequence& sequence = state.sequences[state.order[i]];
    return sequence.status == Status::kRunning ? sequence.channel : kNone;
  };
  const auto records = [&](uint32_t i) { return records_to_go_on(state.sequences[state.order[i]]); };
  exec.rank(state.live, state.config.channels, state.counts, channel_of, records, [&](uint32_t i, uint32_t before) {
    Sequence& sequence = state.sequences[state.order[i]];
    const uint64_t needed = uint64_t{before} + records_to_go_on(sequence);
    sequence.room = needed <= log_room_to_spare(state, state.channels[sequence.channel]);
    if (scores(sequence)) state.scoring = 1;  // the same word from any thread
  });
  if (state.scoring != 0) share_room(exec, state);
}

// Tokens that a running sequence could compute next.
BLINK_FN uint32_t wish_of(const Sequence& sequence) {
  if (sequence.status != Status::kRunning) return 0;
  const uint32_t left = tokens_left(sequence);
  if (scores(sequence)) return left < sequence.room ? left : sequence.room;
  return sequence.room != 0 ? left : left - 1;
}

BLINK_FN bool is_decode(const Sequence& sequence) {
  return sequence.status == Status::kRunning && sequence.room != 0 && sequence.length - sequence.computed == 1;
}

// Tokens of a prompt chunk, 0 for a decode.
BLINK_FN uint64_t chunk_wish(const Sequence& sequence) { return is_decode(sequence) ? 0 : wish_of(sequence); }

template <class Exec>
BLINK_FN void plan(const Exec& exec, State& state) {
  if (state.live != state.running) admit(exec, state);
  keep_log_room(exec, state);
  const auto sequence_at = [&](uint32_t i) -> Sequence& { return state.sequences[state.order[i]]; };
  // Decodes in the low half, stalls in the high half.
  const auto share = [&](uint32_t i) -> uint64_t {
    const Sequence& sequence = sequence_at(i);
    const bool stalled = sequence.status == Status::kRunning && wish_of(sequence) == 0;
    return uint64_t{stalled} << 32 | uint64_t{is_decode(sequence)};
  };
  const uint64_t shares = exec.scan(state.live, share, [](uint32_t, uint64_t) {});
  exec.leader([&] { state.counters.log_stalls += shares >> 32; });
  const uint64_t decodes = shares & 0xFFFFFFFFu;
  const uint64_t budget = state.config.token_budget - decodes;
  exec.scan(
      state.live, [&](uint32_t i) { return chunk_wish(sequence_at(i)); },
      [&](uint32_t i, uint64_t before) {
        Sequence& sequence = sequence_at(i);
        const uint64_t left = before < budget ? budget - before : 0;
        const uint64_t wish = chunk_wish(sequence);
        sequence.query = is_decode(sequence) ? 1 : static_cast<uint32_t>(wish < left ? wish : left);
      });
}

}  // namespace blink
