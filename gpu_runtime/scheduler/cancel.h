// cancel: ends sequences that their front end no longer wants.
#pragma once
#include "scheduler/intake.h"

namespace blink {

// Reads the channel's next cancel record; false when there is none.
BLINK_FN bool take_cancel(State& state, uint32_t c) {
  Channel& channel = state.channels[c];
  const uint32_t slots = state.config.cancel_slots;
  const arena::CancelRecord* ring = cancel_ring(state, c);
  const arena::CancelRecord* from = ring + channel.cancel_next % slots;
  if (load_acquire(&from->commit) != commit_word(channel, channel.cancel_next, slots)) return false;
  const uint64_t target = load_relaxed(&from->target);
  ++channel.cancel_next;
  if (target >= channel.submit_next) {
    ++channel.protocol_errors;
  } else {
    state.cancels[state.cancel_count++] = Cancel{c, target};
  }
  return true;
}

BLINK_FN bool is_cancelled(const State& state, const Sequence& sequence) {
  if (sequence.status == Status::kEnding) return false;
  for (uint32_t k = 0; k < state.cancel_count; ++k) {
    const Cancel& cancel = state.cancels[k];
    if (cancel.channel == sequence.channel && cancel.target == sequence.position) return true;
  }
  return false;
}

template <class Exec>
BLINK_FN void cancel(const Exec& exec, State& state) {
  exec.leader([&] {
    state.cancel_count = 0;
    uint32_t read = 0;
    for (uint32_t c = 0; c < state.config.channels; ++c) {
      while (state.channels[c].live && read < layout::MAX_CANCELS_PER_STEP && take_cancel(state, c)) ++read;
    }
  });
  if (state.cancel_count == 0) return;
  const auto cancelled = [&](uint32_t slot) { return is_cancelled(state, state.sequences[slot]); };
  release_blocks(exec, state, cancelled);
  const uint64_t ended = exec.scan(
      state.live, [&](uint32_t i) -> uint64_t { return cancelled(state.order[i]); }, [](uint32_t, uint64_t) {});
  exec.leader([&] { state.counters.finished[static_cast<uint32_t>(arena::Finish::CANCELLED)] += ended; });
  exec.each(state.live, [&](uint32_t i) {
    Sequence& sequence = state.sequences[state.order[i]];
    if (!is_cancelled(state, sequence)) return;
    sequence.status = Status::kEnding;
    sequence.finish = arena::Finish::CANCELLED;
    sequence.query = 0;
  });
  flush_ending(exec, state);
}

}  // namespace blink
