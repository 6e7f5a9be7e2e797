// The token log: how much room it has, and how records get into it.
#pragma once
#include "scheduler/memory.h"
#include "scheduler/state.h"

namespace blink {

// The token that the step sampled for a row. Other kernels write it while the scheduler's already runs on the GPU.
BLINK_FN uint32_t sampled_token(const State& state, uint32_t row) {
  return load_relaxed(reinterpret_cast<const uint32_t*>(state.sampled) + row);
}

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
  uint32_t found = 0;  // blocks of the prompt that were cached, in a first TOKEN record
};

// What TokenBody's `detail` can say of them.
inline constexpr uint32_t kMostFound = 0xFFFF;

// Records that each token of a sequence takes in its log.
BLINK_FN uint32_t records_per_token(const Sequence& sequence) { return 1 + sequence.logprobs; }

// Records that a sequence must find room for before it goes on: its next token's, and its END where no token ends it.
BLINK_FN uint32_t records_to_go_on(const Sequence& sequence) {
  return records_per_token(sequence) + (sequence.max_tokens == 0);
}

BLINK_FN uint64_t lap_of(const State& state, uint64_t at) {
  return 1 + rounds_before(at, state.config.log_slots) % 65535;
}

// Where the record at a position of the log lies.
BLINK_FN arena::TokenRecord* record_at(const State& state, uint32_t channel, uint64_t at) {
  auto* log = outbound_part<arena::TokenRecord>(state, channel, state.outbound_layout.channel_log_offset);
  return log + (at & (state.config.log_slots - 1));
}

BLINK_FN uint64_t head_of(const State& state, uint64_t at, const Record& record) {
  return arena::TokenHead{lap_of(state, at), static_cast<uint64_t>(record.kind), static_cast<uint64_t>(record.finish),
                          record.position}
      .pack();
}

BLINK_FN uint64_t body_of(const State& state, uint64_t at, const Record& record) {
  const bool is_token = record.kind == arena::RecordKind::TOKEN;
  const uint64_t detail = is_token ? record.found : static_cast<uint64_t>(record.error);
  return arena::TokenBody{lap_of(state, at), detail, record.token}.pack();
}

// Each word carries the lap, so that a reader needs no order between the two.
BLINK_FN void write_words(const State& state, uint32_t channel, uint64_t at, uint64_t head, uint64_t body) {
  arena::TokenRecord* to = record_at(state, channel, at);
  store_relaxed(&to->body, body);
  store_relaxed(&to->head, head);
}

// Writes a record at a position of the log. The caller moves log_next.
BLINK_FN void write_record(const State& state, uint32_t channel, uint64_t at, const Record& record) {
  write_words(state, channel, at, head_of(state, at, record), body_of(state, at, record));
}

struct Logprob {
  uint32_t token;
  float logprob;
  uint32_t rank;
};

// A log-probability of a sampled row, the token's own first; written by other kernels as `sampled` is.
BLINK_FN Logprob sampled_logprob(const State& state, uint32_t row, uint32_t k) {
  const layout::RowLogprobs& from = state.sampled_logprobs[row];
  return {load_relaxed(&from.tokens[k]), load_relaxed(&from.logprobs[k]), k == 0 ? load_relaxed(&from.rank) : k};
}

inline constexpr uint32_t kMostRank = (1u << 24) - 1;

// The same for a LOGPROB record.
BLINK_FN void write_logprob(const State& state, uint32_t channel, uint64_t at, const Logprob& record) {
  const uint64_t lap = lap_of(state, at);
  const uint64_t rank = record.rank < kMostRank ? record.rank : kMostRank;
  const arena::LogprobHead head{lap, static_cast<uint64_t>(arena::RecordKind::LOGPROB), rank,
                                bits_of_float(record.logprob)};
  const arena::LogprobBody body{lap, rank >> 8, record.token};
  write_words(state, channel, at, head.pack(), body.pack());
}

}  // namespace blink
