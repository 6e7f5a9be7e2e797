// Loads what a steady step reads, for the sake of the caches. The layers of a step read the weights and leave nothing
// else in the second-level cache, so that the scheduler would wait half a microsecond for memory at every turn; this
// runs while the step still samples, on the multiprocessor where the scheduler is about to run.
#pragma once
#include "scheduler/intake.h"
#include "scheduler/state.h"

namespace blink {

// A load whose value nobody wants, into the first-level cache: only for memory that nobody writes meanwhile.
__device__ inline void touch(const void* address) {
  uint32_t ignored;
  asm volatile("ld.global.ca.u32 %0, [%1];" : "=r"(ignored) : "l"(address));
}

// Into the second-level cache: for what other kernels or front ends write, and for what is only stored to.
__device__ inline void prefetch(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

__device__ inline void touch_bytes(const void* from, uint32_t bytes) {
  constexpr uint32_t kSector = 32;
  for (uint32_t at = threadIdx.x * kSector; at < bytes; at += blockDim.x * kSector) {
    touch(static_cast<const uint8_t*>(from) + at);
  }
}

__device__ inline void touch_row(const State& state, uint32_t r) {
  const layout::Work& work = state.works[r];
  const uint32_t slot = work.slot;
  const uint32_t context = work.context_tokens;
  const auto* sequence = reinterpret_cast<const uint8_t*>(state.sequences + slot);
  for (uint32_t at = 0; at < sizeof(Sequence); at += 32) touch(sequence + at);
  touch(blocks_of(state, slot) + (context - 1) / state.config.block_tokens);
  prefetch(history_of(state, slot) + context);
  prefetch(state.sampled + r);
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
__device__ inline void touch_steady(const State& state) {
  const uint32_t rows = state.header.rows;
  touch_bytes(&state, sizeof(State));
  touch_bytes(state.works, rows * sizeof(layout::Work));
  touch_bytes(state.rows, rows * sizeof(layout::SampleRow));
  touch_bytes(state.row_ranks, rows * sizeof(uint32_t));
  touch_bytes(state.row_counts, state.config.channels * sizeof(uint32_t));
  touch_bytes(state.channels, state.config.channels * sizeof(Channel));
  if (threadIdx.x == 0) {
    touch(state.free_blocks + state.free_block_count - 1);
    prefetch(state.outbound + state.outbound_layout.telemetry_offset);
  }
  for (uint32_t r = threadIdx.x; r < rows; r += blockDim.x) touch_row(state, r);
  for (uint32_t c = threadIdx.x; c < state.config.channels; c += blockDim.x) prefetch_channel(state, c);
}

}  // namespace blink
