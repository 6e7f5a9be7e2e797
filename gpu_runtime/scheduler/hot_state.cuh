// The step of the scheduler on the GPU, with what it touches again and again in shared memory.
#pragma once
#include "scheduler/block_exec.cuh"
#include "scheduler/cold_arrays.h"
#include "scheduler/step.h"

namespace blink {

// Copies 16-byte pieces on all threads.
__device__ inline void copy_pieces(void* to, const void* from, uint32_t bytes) {
  auto* target = static_cast<uint4*>(to);
  const auto* source = static_cast<const uint4*>(from);
  for (uint32_t i = threadIdx.x; i < bytes / 16; i += blockDim.x) target[i] = source[i];
}

class HotState {
 public:
  // Loads the state. `shared` holds hot_bytes(), 16-byte aligned.
  __device__ HotState(const ColdArrays& cold, uint8_t* shared) : cold_(cold) {
    const uint32_t slots = whole_pieces(cold.max_sequences);
    state_ = reinterpret_cast<State*>(shared);
    sequences_ = reinterpret_cast<Sequence*>(shared + sizeof(State));
    channels_ = reinterpret_cast<Channel*>(sequences_ + cold.max_sequences);
    order_ = reinterpret_cast<uint32_t*>(channels_ + cold.channel_count);
    order_next_ = order_ + slots;
    free_slots_ = order_next_ + slots;
    load();
  }

  __device__ State& state() const { return *state_; }

  // Writes back what a step may have changed.
  __device__ void store() const {
    const State& hot = *state_;
    each_sequence_piece(hot.live, hot.order, [&](uint4* cold, uint4* own) { *cold = *own; });
    for (uint32_t i = threadIdx.x; i < hot.live; i += blockDim.x) cold_.order[i] = hot.order[i];
    for (uint32_t i = free_before_ + threadIdx.x; i < hot.free_slot_count; i += blockDim.x) {
      cold_.sequences[free_slots_[i]].status = Status::kFree;
    }
    copy_pieces(cold_.channels, channels_, cold_.channel_count * sizeof(Channel));
    copy_pieces(cold_.free_slots, free_slots_, cold_.max_sequences / 4 * 16);
    for (uint32_t i = cold_.max_sequences / 4 * 4 + threadIdx.x; i < cold_.max_sequences; i += blockDim.x) {
      cold_.free_slots[i] = free_slots_[i];
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      state_->sequences = cold_.sequences;
      state_->channels = cold_.channels;
      state_->order = cold_.order;
      state_->order_next = order_next_cold_;
      state_->free_slots = cold_.free_slots;
      state_->counts = counts_cold_;
    }
    __syncthreads();
    copy_pieces(cold_.state, state_, sizeof(State));
  }

 private:
  __device__ void load() {
    copy_pieces(state_, cold_.state, sizeof(State));
    copy_pieces(channels_, cold_.channels, cold_.channel_count * sizeof(Channel));
    for (uint32_t i = threadIdx.x; i < cold_.max_sequences; i += blockDim.x) {
      order_[i] = cold_.order[i];
      free_slots_[i] = cold_.free_slots[i];
    }
    __syncthreads();
    order_next_cold_ = state_->order_next;
    counts_cold_ = state_->counts;
    free_before_ = state_->free_slot_count;
    each_sequence_piece(state_->live, order_, [&](uint4* cold, uint4* own) { *own = *cold; });
    __syncthreads();
    if (threadIdx.x == 0) {
      state_->sequences = sequences_;
      state_->channels = channels_;
      state_->order = order_;
      state_->order_next = order_next_;
      state_->free_slots = free_slots_;
      state_->counts = free_slots_ + whole_pieces(cold_.max_sequences);
    }
    __syncthreads();
  }

  // f(piece in device memory, piece in shared memory) for all 16-byte pieces of the live sequences.
  template <class F>
  __device__ void each_sequence_piece(uint32_t live, const uint32_t* order, F f) const {
    constexpr uint32_t kPieces = sizeof(Sequence) / 16;
    for (uint32_t i = threadIdx.x; i < live * kPieces; i += blockDim.x) {
      const uint32_t at = order[i / kPieces] * kPieces + i % kPieces;
      f(reinterpret_cast<uint4*>(cold_.sequences) + at, reinterpret_cast<uint4*>(sequences_) + at);
    }
  }

  ColdArrays cold_;
  State* state_;
  Sequence* sequences_;
  Channel* channels_;
  uint32_t *order_, *order_next_, *free_slots_;
  uint32_t *order_next_cold_, *counts_cold_;
  uint32_t free_before_;
};

template <class Launch>
__device__ void full_device_step(const BlockExec& exec, const ColdArrays& cold, uint8_t* shared, uint64_t now_ns,
                                 layout::Command command, Launch launch) {
  HotState hot(cold, shared);
  full_step(exec, hot.state(), now_ns, command, launch);
  hot.store();
  __syncthreads();
}

// A whole step. A steady one is too short to be worth a copy of the state.
template <class Launch>
__device__ void device_step(const BlockExec& exec, const ColdArrays& cold, uint8_t* shared, uint64_t now_ns,
                            layout::Command command, Launch launch) {
  if (steady_step(exec, *cold.state, now_ns, command, launch)) return;
  full_device_step(exec, cold, shared, now_ns, command, launch);
}

}  // namespace blink
