// A settling that nobody sees, so that its instructions are in the multiprocessor's caches when the tokens come: a step
// fetches the code of its kernels over and over, and the scheduler's would have to come from memory each time.
#pragma once
#include "scheduler/steady.h"

namespace blink {

// What a rehearsal writes to. In the device's memory, zero at first.
struct Sink {
  State state;
  Sequence sequence;
  Channel channel;
  arena::ChannelOut out;
  arena::Telemetry page;
  arena::TokenRecord record;
  layout::SampleRow row;
  uint32_t history;
  int32_t token_id;
  int32_t sampled;
};

// Foresees one row and one channel that lie in the sink. One thread.
__device__ inline void foresee_rehearsal(Foreseen& foreseen, Sink& sink) {
  foreseen.possible = 1;
  foreseen.logprobs = 0;
  foreseen.row_count = foreseen.channel_count = foreseen.vocab_size = 1;
  foreseen.eos_count = 1;
  foreseen.eos_tokens[0] = 1;
  foreseen.sampled = &sink.sampled;
  foreseen.token_ids = &sink.token_id;
  foreseen.sample_rows = &sink.row;
  foreseen.counts.state = &sink.state;
  foreseen.counts.page = &sink.page;
  foreseen.channels[0] = {&sink.channel, &sink.out, 0, 0, 0};
  ForeseenRow& row = foreseen.rows[0];
  row.record = &sink.record;
  row.history = &sink.history;
  row.sequence = &sink.sequence;
  row.blocks = 1;
  row.flags = 0;
  row.checks_eos = 1;
  row.stop_count = 1;
  row.stop_tokens[0] = 1;
}

}  // namespace blink
