// The host's C interface to sampling.
#pragma once
#include <cstdint>

#include "scheduler/layout.h"

extern "C" {

// Arrays of one step. Those by slot may be null when no row has flags, `logprobs` when none asks for any.
struct blink_sample_job {
  const float* logits;  // [count][vocab]
  int64_t vocab;
  const blink::layout::SampleRow* rows;  // [count]
  int64_t count;
  const blink::layout::SampleExtras* extras;  // [slots]
  const blink::layout::BiasEntry* bias;       // [slots][MAX_BIAS]
  const blink::layout::BanToken* bans;        // [slots][MAX_BAN_WORDS]
  const uint32_t* history;                    // [slots][window]
  int64_t window;
  blink::layout::RowLogprobs* logprobs;  // [count]
  int32_t* tokens;                       // [count], -1 where there is no token to sample
};

void blink_sample(const blink_sample_job* job);

}  // extern "C"
