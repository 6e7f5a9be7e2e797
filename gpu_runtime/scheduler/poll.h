// What the chain looks at while it has nothing to compute: one word a time, on one thread.
#pragma once
#include "scheduler/intake.h"

namespace blink {

// True when a step could do something for the channel: a lease, a submission, a cancel record or a cursor is new.
BLINK_FN bool channel_has_news(const State& state, uint32_t c) {
  const Channel& channel = state.channels[c];
  const arena::ChannelIn* in = channel_in(state, c);
  if (load_relaxed(&in->lease) != channel.lease_seen) return true;
  if (!channel.live) return false;
  if (state.draining == 0 && can_take(state, channel) && submission_is_there(state, c)) return true;
  if (load_relaxed(&in->log_read) != channel.log_read_seen) return true;
  if (channel.ending > 0 && log_room(state, channel) > 0) return true;  // the cursor came after this step's publish
  const uint32_t slots = state.config.cancel_slots;
  const auto* ring = inbound_part<arena::CancelRecord>(state, c, state.inbound_layout.channel_cancel_offset);
  const uint64_t expected = commit_word(channel, channel.cancel_next, slots);
  return load_acquire(&ring[channel.cancel_next % slots].commit) == expected;
}

BLINK_FN bool has_news(const State& state) {
  for (uint32_t c = 0; c < state.config.channels; ++c) {
    if (channel_has_news(state, c)) return true;
  }
  return false;
}

}  // namespace blink
