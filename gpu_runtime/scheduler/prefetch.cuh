// Brings what a steady step reads into the L2 cache. The layers of a step read the weights and leave nothing else
// there, so that the scheduler would wait half a microsecond for memory at every turn; this runs while the step still
// samples.
#pragma once
#include "scheduler/intake.h"
#include "scheduler/state.h"

namespace blink {

__device__ inline void prefetch(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

__device__ inline void prefetch_bytes(const void* from, uint32_t bytes) {
  constexpr uint32_t kLine = 128;
  for (uint32_t at = threadIdx.x * kLine; at < bytes; at += blockDim.x * kLine) {
    prefetch(static_cast<const uint8_t*>(from) + at);
  }
}

__device__ inline void prefetch_row(const State& state, uint32_t r) {
  const layout::Work& work = state.works[r];
  const uint32_t slot = work.slot;
  const uint32_t context = work.context_tokens;
  const auto* sequence = reinterpret_cast<const uint8_t*>(state.sequences + slot);
  prefetch(sequence);
  prefetch(sequence + sizeof(Sequence) - 1);
  prefetch(history_of(state, slot) + context);
  prefetch(blocks_of(state, slot) + context / state.config.block_tokens);
}

__device__ inline void prefetch_channel(const State& state, uint32_t c) {
  const Channel& channel = state.channels[c];
  const arena::ChannelIn* in = channel_in(state, c);
  prefetch(&in->lease);
  prefetch(&in->heartbeat);
  prefetch(&in->log_read);
  prefetch(&submit_slot(state, c)->commit);
  const auto* ring = inbound_part<arena::CancelRecord>(state, c, state.inbound_layout.channel_cancel_offset);
  prefetch(ring + channel.cancel_next % state.config.cancel_slots);
  prefetch(channel_out(state, c));
}

// All threads of the block. Reads only what the step before has written.
__device__ inline void prefetch_steady(const State& state) {
  const uint32_t rows = state.header.rows;
  prefetch_bytes(state.rows, rows * sizeof(layout::SampleRow));
  prefetch_bytes(state.row_ranks, rows * sizeof(uint32_t));
  prefetch_bytes(state.decode_tiles, state.header.decode_tiles * sizeof(layout::Tile));
  prefetch_bytes(state.channels, state.config.channels * sizeof(Channel));
  if (threadIdx.x == 0) {
    prefetch(state.row_counts);
    prefetch(state.free_blocks + state.free_block_count - 1);
    prefetch(state.outbound + state.outbound_layout.telemetry_offset);
  }
  for (uint32_t r = threadIdx.x; r < rows; r += blockDim.x) prefetch_row(state, r);
  for (uint32_t c = threadIdx.x; c < state.config.channels; c += blockDim.x) prefetch_channel(state, c);
}

}  // namespace blink
