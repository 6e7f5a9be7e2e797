// Where the arrays that a step touches again and again lie in device memory.
#pragma once
#include "scheduler/state.h"

namespace blink {

// Fixed for the life of a scheduler.
struct ColdArrays {
  State* state;
  Sequence* sequences;
  Channel* channels;
  uint32_t* order;
  uint32_t* free_slots;
  uint32_t max_sequences;
  uint32_t channel_count;
};

BLINK_FN uint32_t whole_pieces(uint32_t words) { return (words + 3) / 4 * 4; }

// Shared memory that a step on the GPU needs to hold a copy of them.
BLINK_FN uint32_t hot_bytes(uint32_t max_sequences, uint32_t channels) {
  return static_cast<uint32_t>(sizeof(State) + max_sequences * sizeof(Sequence) + channels * sizeof(Channel)) +
         (whole_pieces(max_sequences) * 3 + whole_pieces(channels)) * static_cast<uint32_t>(sizeof(uint32_t));
}

}  // namespace blink
