// The shm transport's end on the GPU: what a network card does for a DPU, for an arena in host memory. Front ends write
// into host memory that the GPU maps; the pull copies what is new into the arena in device memory, where the scheduler
// looks, and the push copies token records, cursors and telemetry back. A running chain reads one word of host memory
// a step, the bell, and the rest only when it has rung. Channels of front ends that reach device memory by themselves
// (RDMA) are left alone: their words in host memory say nothing.
#pragma once
#include "scheduler/intake.h"
#include "scheduler/layout.h"
#include "scheduler/poll.h"
#include "scheduler/validate.h"

namespace blink {

constexpr uint32_t kFullWarp = 0xFFFFFFFFu;
constexpr uint32_t kLanes = 32;

// Whether the channel's front end reaches device memory by itself, as far as the relay has been told.
__device__ inline bool is_direct(const layout::ChainBoard& board, uint32_t c) { return board.direct_seen >> c & 1; }

// The same part of a region in host memory.
template <class T>
__device__ T* mirrored(const void* own, const void* own_region, uint64_t other_region) {
  const auto offset = static_cast<const uint8_t*>(own) - static_cast<const uint8_t*>(own_region);
  return reinterpret_cast<T*>(other_region + offset);
}

// One warp copies 8-byte words; all loads of a round are under way together.
__device__ inline void copy_words(uint64_t* to, const uint64_t* from, uint64_t words) {
  constexpr uint32_t kRounds = 4;
  for (uint64_t base = threadIdx.x % kLanes; base < words; base += kLanes * kRounds) {
    uint64_t held[kRounds];
#pragma unroll
    for (uint32_t k = 0; k < kRounds; ++k) {
      if (base + k * kLanes < words) held[k] = load_relaxed(from + base + k * kLanes);
    }
#pragma unroll
    for (uint32_t k = 0; k < kRounds; ++k) {
      if (base + k * kLanes < words) to[base + k * kLanes] = held[k];
    }
  }
  __syncwarp();
}

// Copies a range of a channel's prompt heap, which lies within the heap.
__device__ inline void pull_heap(const State& state, const layout::ChainBoard& board, uint32_t c, uint64_t offset,
                                 uint64_t count) {
  if (count == 0) return;
  auto* heap = inbound_part<uint32_t>(state, c, state.inbound_layout.channel_heap_offset);
  auto* first = reinterpret_cast<uint64_t*>(heap + offset / 2 * 2);
  const uint64_t words = (offset + count + 1) / 2 - offset / 2;
  // A heap of an odd number of tokens ends in padding: parts start on cache lines.
  copy_words(first, mirrored<const uint64_t>(first, state.inbound, board.host_inbound), words);
}

// Tokens that a record needs from the heap; 0 for one that the scheduler will refuse without looking at them.
__device__ inline uint64_t heap_tokens_of(const State& state, const arena::SubmitRecord& record) {
  if (check_submission(state, record) != arena::ErrorCode::NONE) return 0;
  if (check_late(state, record) != arena::ErrorCode::NONE) return record.prompt_tokens;
  const uint32_t bans = bans_are_sane(state, record) ? record.ban_words : 0;
  return record.prompt_tokens + uint64_t{record.bias_count} * 2 + bans;
}

// How many records from a ring's position on are there in host memory, 32 at most. One warp.
template <class Record>
__device__ uint32_t count_new(const Record* own_ring, const State& state, const layout::ChainBoard& board,
                              const Channel& channel, uint64_t next, uint32_t slots) {
  const uint32_t lane = threadIdx.x % kLanes;
  const uint64_t position = next + lane;
  const Record* from = mirrored<const Record>(own_ring + position % slots, state.inbound, board.host_inbound);
  const bool there = lane < slots && load_acquire(&from->commit) == commit_word(channel, position, slots);
  const uint32_t missing = ~__ballot_sync(kFullWarp, there);
  return missing == 0 ? kLanes : static_cast<uint32_t>(__ffs(static_cast<int>(missing))) - 1;
}

// What a pull found: whether it copied anything, and whether there may be more than it took.
struct Pulled {
  bool any;
  bool more;
};

// Tokens that a pull copies for a channel at most, beyond its first submission: a step waits for it.
constexpr uint64_t kPullTokens = 1u << 16;

__device__ inline Pulled pull_submissions(const State& state, const layout::ChainBoard& board, uint32_t c) {
  const Channel& channel = state.channels[c];
  const uint32_t slots = state.config.submit_slots;
  arena::SubmitRecord* ring = submit_ring(state, c);
  const uint64_t next = channel.submit_next;
  const uint32_t count = count_new(ring, state, board, channel, next, slots);
  Pulled pulled{false, count == kLanes};
  uint64_t tokens = 0;
  for (uint64_t position = next; position < next + count; ++position) {
    arena::SubmitRecord* own = ring + position % slots;
    const uint64_t commit = commit_word(channel, position, slots);
    if (own->commit == commit) continue;  // pulled before, not taken yet
    if (tokens > kPullTokens) return {true, true};
    const auto* from = mirrored<const uint64_t>(own, state.inbound, board.host_inbound);
    copy_words(reinterpret_cast<uint64_t*>(own), from, sizeof(arena::SubmitRecord) / 8 - 1);
    const uint64_t needed = heap_tokens_of(state, *own);
    if (needed != 0) pull_heap(state, board, c, own->prompt_offset, own->prompt_tokens);
    if (needed > own->prompt_tokens) pull_heap(state, board, c, own->bias_offset, needed - own->prompt_tokens);
    tokens += needed;
    pulled.any = true;
    if (threadIdx.x % kLanes == 0) store_release(&own->commit, commit);
    __syncwarp();
  }
  return pulled;
}

__device__ inline Pulled pull_cancels(const State& state, const layout::ChainBoard& board, uint32_t c) {
  const Channel& channel = state.channels[c];
  const uint32_t slots = state.config.cancel_slots;
  arena::CancelRecord* ring = cancel_ring(state, c);
  const uint64_t next = channel.cancel_next;
  const uint32_t count = count_new(ring, state, board, channel, next, slots);
  const uint32_t lane = threadIdx.x % kLanes;
  if (lane < count) {
    arena::CancelRecord* own = ring + (next + lane) % slots;
    const auto* from = mirrored<const arena::CancelRecord>(own, state.inbound, board.host_inbound);
    own->target = load_relaxed(&from->target);
    store_release(&own->commit, commit_word(channel, next + lane, slots));
  }
  __syncwarp();
  return {count != 0, count == kLanes};
}

// No record has that commit word: its lap is 0.
constexpr uint64_t kNoCommit = 0;

// Forgets the records that stand in a channel's rings in host memory, as the scheduler does in its own (leases.h): it
// is about to accept the next lease, whose front end writes no record before a push has told it. Prompts and answers
// stay there: whoever is let into host memory has all of it mapped, every channel of it, and nothing of front ends that
// come by RDMA is ever copied to it. One warp.
__device__ inline void clear_host_rings(const State& state, const layout::ChainBoard& board, uint32_t c) {
  const uint32_t lane = threadIdx.x % kLanes;
  auto* submissions = mirrored<arena::SubmitRecord>(submit_ring(state, c), state.inbound, board.host_inbound);
  auto* cancels = mirrored<arena::CancelRecord>(cancel_ring(state, c), state.inbound, board.host_inbound);
  for (uint32_t i = lane; i < state.config.submit_slots; i += kLanes) store_relaxed(&submissions[i].commit, kNoCommit);
  for (uint32_t i = lane; i < state.config.cancel_slots; i += kLanes) store_relaxed(&cancels[i].commit, kNoCommit);
  __syncwarp();
}

// Takes over what front ends have written for one channel. One warp.
__device__ inline Pulled pull_channel(const State& state, const layout::ChainBoard& board, uint32_t c) {
  arena::ChannelIn* own = channel_in(state, c);
  const auto* from = mirrored<const arena::ChannelIn>(own, state.inbound, board.host_inbound);
  const uint32_t lane = threadIdx.x % kLanes;
  const uint64_t* words[3] = {&from->lease, &from->heartbeat, &from->log_read};
  uint64_t* own_words[3] = {&own->lease, &own->heartbeat, &own->log_read};
  const uint64_t word = lane < 3 ? load_acquire(words[lane]) : 0;
  const Channel& channel = state.channels[c];
  Pulled pulled{false, false};
  if (asks_for_lease(channel, __shfl_sync(kFullWarp, word, 0))) {
    clear_host_rings(state, board, c);
  } else if (channel.live != 0) {
    const Pulled submissions = pull_submissions(state, board, c);
    const Pulled cancels = pull_cancels(state, board, c);
    pulled = {submissions.any || cancels.any, submissions.more || cancels.more};
  }
  if (lane < 3) store_release(own_words[lane], word);
  return pulled;
}

__device__ inline uint64_t bell_of(const State& state, const layout::ChainBoard& board) {
  return load_acquire(reinterpret_cast<const uint64_t*>(board.host_inbound + state.inbound_layout.bell_offset));
}

// The bell is every front end's to ring, and so every one's to spoil: nobody depends on it for longer than that.
constexpr uint64_t kLongestTrustNs = 50'000'000;

// Notes which channels are direct; whether that is news. Pulls run one after another, so from here on none copies what
// the older word had the relay copy: a front end may be told of its channel as soon as this word is seen.
__device__ inline bool take_direct(layout::ChainBoard& board) {
  const uint64_t direct = load_relaxed(&board.direct);
  const bool changed = direct != board.direct_seen;
  board.direct_seen = direct;
  return changed;
}

// Takes over what front ends have written, if the bell says that there may be something. The whole block.
__device__ inline void pull(const State& state, layout::ChainBoard& board, uint64_t now_ns) {
  uint64_t bell = 0;
  bool look = false;
  if (threadIdx.x == 0) {
    bell = bell_of(state, board);
    look = take_direct(board) || bell != board.bell_seen || now_ns - board.pulled_ns >= kLongestTrustNs;
  }
  if (!__syncthreads_or(look)) return;
  Pulled pulled{false, false};
  for (uint32_t c = threadIdx.x / kLanes; c < state.config.channels; c += blockDim.x / kLanes) {
    if (is_direct(board, c)) continue;
    const Pulled one = pull_channel(state, board, c);
    pulled = {pulled.any || one.any, pulled.more || one.more};
  }
  const bool any = __syncthreads_or(pulled.any);
  const bool more = __syncthreads_or(pulled.more);
  if (threadIdx.x != 0) return;
  board.pulled_ns = now_ns;
  if (!more) board.bell_seen = bell;
  // What could not be taken over because others wait in front is no reason to stay awake.
  board.bell_polled = any && more ? bell - 1 : bell;
}

// Whether an idle chain has something to do: a command, a ring of local front ends, a channel that changes hands, or
// words that network cards have written. For one thread.
__device__ inline bool is_wanted(const State& state, const layout::ChainBoard& board) {
  if (load_acquire(&board.command) != board.command_seen) return true;
  if (board.host_inbound != 0 && bell_of(state, board) != board.bell_polled) return true;
  return load_relaxed(&board.direct) != board.direct_seen || has_news(state);
}

// The token log's new records. One warp for each channel. Those of a direct channel are read where they are; a later
// front end's begin behind them.
__device__ inline void push_records(const State& state, layout::ChainBoard& board, uint32_t c) {
  const uint32_t lane = threadIdx.x % kLanes;
  const uint64_t slots = state.config.log_slots;
  const uint64_t end = state.channels[c].log_next;
  const uint64_t begin = is_direct(board, c) ? end : board.pushed[c];
  auto* log = outbound_part<arena::TokenRecord>(state, c, state.outbound_layout.channel_log_offset);
  for (uint64_t position = begin + lane; position < end; position += kLanes) {
    arena::TokenRecord* from = log + position % slots;
    auto* to = mirrored<arena::TokenRecord>(from, state.outbound, board.host_outbound);
    store_relaxed(&to->body, from->body);
    store_relaxed(&to->head, from->head);
  }
  __syncwarp();
  if (lane == 0) board.pushed[c] = end;
}

// Cursors after the records they speak of; the lease after the cursors that belong to it; `live` last. Those of direct
// channels too: the control process looks at them.
__device__ inline void push_words(const State& state, const layout::ChainBoard& board, uint32_t c) {
  const arena::ChannelOut* from = channel_out(state, c);
  auto* to = mirrored<arena::ChannelOut>(from, state.outbound, board.host_outbound);
  store_relaxed(&to->log_start, from->log_start);
  store_relaxed(&to->log_written, from->log_written);
  store_relaxed(&to->submit_read, from->submit_read);
  store_relaxed(&to->cancel_read, from->cancel_read);
  store_relaxed(&to->rejected, from->rejected);
  store_relaxed(&to->protocol_errors, from->protocol_errors);
  store_release(&to->lease, from->lease);
  store_release(&to->live, from->live);
}

__device__ inline void push_telemetry(const State& state, const layout::ChainBoard& board, uint32_t word) {
  const auto* from = reinterpret_cast<const uint64_t*>(state.outbound + state.outbound_layout.telemetry_offset);
  store_relaxed(mirrored<uint64_t>(from + word, state.outbound, board.host_outbound), from[word]);
}

}  // namespace blink
