// What a steady step foresees: everything about its outcome but the sampled tokens, and where each of them belongs.
// Written while the step still computes.
#pragma once
#include "scheduler/state.h"

namespace blink {

// Rows that a steady step may have: one for each thread of the GPU's block, beside those of the channels.
inline constexpr uint32_t kSteadyRows = 256;

struct alignas(16) ForeseenRow {
  arena::TokenRecord* record;  // in the token log
  uint64_t head, body;         // of that record, but for the token
  uint32_t* history;           // where the token goes
  Sequence* sequence;
  uint32_t length;  // of the sequence with that token
  uint32_t blocks;  // of the sequence; 0: as many as before
  uint32_t flags;   // of the next row, RowFlag bits; kNone: as before
  uint32_t token;
  uint32_t checks_eos;
  uint32_t stop_count;
  uint32_t stop_tokens[arena::MAX_STOP_TOKENS];
};

struct ForeseenChannel {
  Channel* channel;
  arena::ChannelOut* out;
  uint64_t log_next, heartbeat, log_read;
};

struct ForeseenCounts {
  State* state;
  arena::Telemetry* page;
  uint64_t positions;  // KV positions that the next decodes read
  uint64_t generated, steps, heartbeat;
  uint32_t round_start, free_blocks, blocks_used;
};

struct alignas(16) Foreseen {
  uint32_t possible;  // 0: nothing else here means anything
  uint32_t logprobs;  // whether rows want log-probabilities
  uint32_t row_count, channel_count, vocab_size, eos_count;
  uint32_t eos_tokens[layout::MAX_EOS_TOKENS];
  uint64_t now_ns;
  const int32_t* sampled;
  int32_t* token_ids;
  layout::SampleRow* sample_rows;
  ForeseenCounts counts;
  ForeseenChannel channels[arena::MAX_CHANNELS];
  ForeseenRow rows[kSteadyRows];  // last
};

// Bytes of it that mean something.
BLINK_FN uint64_t foreseen_bytes(const Foreseen& foreseen) {
  const uint64_t rows = foreseen.possible ? foreseen.row_count : 0;
  return sizeof(Foreseen) - (kSteadyRows - rows) * sizeof(ForeseenRow);
}

}  // namespace blink
