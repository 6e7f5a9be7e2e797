// Where a state's plan lies.
#pragma once
#include "scheduler/host.h"
#include "scheduler/state.h"

namespace blink {

// `header`: the state's own, where it is or will be.
inline blink_plan_view plan_view(const State& state, layout::StepHeader* header) {
  return {header,
          state.works,
          state.rows,
          state.token_ids,
          state.positions,
          state.kv_slots,
          state.block_table,
          const_cast<int32_t*>(state.sampled),
          state.decode_tiles,
          state.chunk_tiles,
          state.history,
          state.extras,
          state.bias,
          state.bans,
          const_cast<layout::RowLogprobs*>(state.sampled_logprobs)};
}

}  // namespace blink
