// plan: which sequences get how many tokens in the next step.
#pragma once
#include "scheduler/table.h"

namespace blink {

// What a sequence adds to the reserved blocks when it is admitted with `found` blocks that the cache has, of which so
// many were idle: one that others hold is reserved already.
BLINK_FN uint64_t added_reservation(const Sequence& sequence, uint32_t found, uint32_t idle) {
  return uint64_t{sequence.reserved} - found + idle;
}

BLINK_FN void enter_running(State& state, uint32_t slot, uint32_t found, uint32_t idle) {
  Sequence& sequence = state.sequences[slot];
  sequence.status = Status::kRunning;
  sequence.blocks = found;
  sequence.computed = found * state.config.block_tokens;
  ++state.running;
  state.held_blocks += idle;
  state.reserved_blocks += static_cast<uint32_t>(added_reservation(sequence, found, idle));
  if (!state.config.prefix_cache) return;
  state.prefixes[slot].indexed = state.prefixes[slot].found = found;
  const bool looked_up = !has_flag(sequence.flags, arena::SubmitFlag::PROMPT_LOGPROBS);
  state.counters.prefix_queries += looked_up ? sequence.prompt_tokens : 0;
  state.counters.prefix_hits += sequence.computed;
}

// Admits a waiting sequence, with what the cache has of its prompt, when there are a place and blocks for it.
template <class Exec>
BLINK_FN bool admit_one(const Exec& exec, State& state, uint32_t slot) {
  if (state.running == state.config.max_running) return false;
  const Sequence& sequence = state.sequences[slot];
  const uint32_t found = match_blocks(exec, state, slot, 0, blocks_to_look_up(state, sequence));
  const uint32_t idle = count_idle(exec, state, 0, found);
  if (state.reserved_blocks + added_reservation(sequence, found, idle) > state.config.blocks - 1) return false;
  exec.each(found, [&](uint32_t k) { hold_match(state, slot, k); });
  exec.leader([&] { enter_running(state, slot, found, idle); });
  return true;
}

// Admits waiting sequences strictly by arrival while places and blocks last.
template <class Exec>
BLINK_FN void admit(const Exec& exec, State& state) {
  const auto waits = [&](uint32_t i) -> uint64_t { return state.sequences[state.order[i]].status == Status::kWaiting; };
  const uint64_t waiting = exec.scan(state.live, waits, [&](uint32_t i, uint64_t before) {
    if (waits(i) && before < layout::MAX_ADMITTED_PER_STEP) state.listed[before] = state.order[i];
  });
  const uint64_t most = waiting < layout::MAX_ADMITTED_PER_STEP ? waiting : layout::MAX_ADMITTED_PER_STEP;
  for (uint32_t j = 0; j < most && admit_one(exec, state, state.listed[j]); ++j) {
  }
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
