// What the chain looks at while it has nothing to compute: on one thread, since many that poll slow others down.
#pragma once
#include "scheduler/intake.h"

namespace blink {

// True when a step could do something for the channel: a lease, a submission, a cancel record or a cursor is new. All
// words are asked for before any is looked at, since each takes a while to come: that of a device's memory, which
// network cards write, a sixth of a microsecond. Whatever is new is read again, in order, by the step.
BLINK_FN bool channel_has_news(const State& state, uint32_t c) {
  const Channel& channel = state.channels[c];
  const arena::ChannelIn* in = channel_in(state, c);
  const uint32_t slots = state.config.cancel_slots;
  const arena::CancelRecord* ring = cancel_ring(state, c);
  const uint64_t lease = load_relaxed(&in->lease);
  const uint64_t read = load_relaxed(&in->log_read);
  const uint64_t submission = load_relaxed(&submit_slot(state, c)->commit);
  const uint64_t cancel = load_relaxed(&ring[channel.cancel_next % slots].commit);
  if (lease != channel.lease_seen) return true;
  if (!channel.live) return false;
  const uint64_t submitted = commit_word(channel, channel.submit_next, state.config.submit_slots);
  if (submission == submitted && state.draining == 0 && can_take(state, channel)) return true;
  if (read != channel.log_read_seen) return true;
  if (channel.ending > 0 && log_room(state, channel) > 0) return true;  // the cursor came after this step's publish
  return cancel == commit_word(channel, channel.cancel_next, slots);
}

BLINK_FN bool has_news(const State& state) {
  for (uint32_t c = 0; c < state.config.channels; ++c) {
    if (channel_has_news(state, c)) return true;
  }
  return false;
}

}  // namespace blink
