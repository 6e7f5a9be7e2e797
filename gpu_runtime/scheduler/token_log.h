// The token log: how much room it has, and how records get into it.
#pragma once
#include "scheduler/memory.h"
#include "scheduler/state.h"

namespace blink {

// Records that fit into the channel's log before the front end reads on.
BLINK_FN uint64_t log_room(const State& state, const Channel& channel) {
  return state.config.log_slots - (channel.log_next - channel.log_read);
}

// The same, less what is due to ending sequences.
BLINK_FN uint64_t log_room_to_spare(const State& state, const Channel& channel) {
  const uint64_t room = log_room(state, channel);
  return room > channel.ending ? room - channel.ending : 0;
}

struct Record {
  arena::RecordKind kind;
  arena::Finish finish;
  arena::ErrorCode error;
  uint64_t position;  // of the submission
  uint32_t token;
};

// Writes a record at a position of the log. The caller moves log_next. Each word carries the lap, so that a reader
// needs no order between the two.
BLINK_FN void write_record(const State& state, uint32_t channel, uint64_t at, const Record& record) {
  const uint32_t slots = state.config.log_slots;
  const uint64_t lap = 1 + rounds_before(at, slots) % 65535;
  auto* log = outbound_part<arena::TokenRecord>(state, channel, state.outbound_layout.channel_log_offset);
  arena::TokenRecord* to = log + (at & (slots - 1));
  const arena::TokenHead head{lap, static_cast<uint64_t>(record.kind), static_cast<uint64_t>(record.finish),
                              record.position};
  const arena::TokenBody body{lap, static_cast<uint64_t>(record.error), record.token};
  store_relaxed(&to->body, body.pack());
  store_relaxed(&to->head, head.pack());
}

}  // namespace blink
