// The chain's own kernels. A step graph is: begin ‖ layers ‖ pull, then the tail; the idle graph: begin, poll, pull,
// tail. The tail is the scheduler; it launches the next graph from the device.
#include "chain/relay.cuh"
#include "scheduler/hot_state.cuh"
#include "scheduler/poll.h"
#include "scheduler/prefetch.cuh"
#include "scheduler/step.h"

namespace {

using blink::ColdArrays;
using blink::State;
using blink::layout::ChainBoard;
using blink::layout::Command;
using blink::layout::StepHeader;
using blink::layout::StepStamp;

// A block of compute capability 9.0 has 227 KiB; config.py's SHARED_LIMIT leaves this much for what is not the state's.
static_assert(sizeof(blink::BlockScratch) + 64 <= (227 - 218) * 1024);

__device__ uint64_t now_ns() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

__device__ StepStamp* stamp_of(const ChainBoard& board, uint64_t step) {
  return reinterpret_cast<StepStamp*>(board.stamps) + step % blink::layout::STAMPS;
}

__device__ uint32_t bucket_index(const State& state, uint32_t bucket) {
  uint32_t b = 0;
  while (b + 1 < state.config.bucket_count && state.config.buckets[b] < bucket) ++b;
  return b;
}

__device__ uint64_t next_graph(const State& state, const ChainBoard& board, const StepHeader& header) {
  if (header.tokens == 0) return board.idle_graph;
  const uint32_t b = bucket_index(state, header.bucket);
  const bool decodes_only = header.tokens == header.decode_works;
  return decodes_only && board.decode_graphs[b] != 0 ? board.decode_graphs[b] : board.mixed_graphs[b];
}

// Starts the graph when this one has ended. A failure ends the chain; the host, which waits for that, finds the reason.
__device__ void launch_next(const State& state, ChainBoard& board, const StepHeader& header) {
  if (board.launches_itself == 0) return;
  const auto graph = reinterpret_cast<cudaGraphExec_t>(next_graph(state, board, header));
  const cudaError_t status = cudaGraphLaunch(graph, cudaStreamGraphTailLaunch);
  if (status != cudaSuccess) board.launch_error = static_cast<uint64_t>(status);
}

// Tells local front ends what the scheduler has published. The whole block.
__device__ void push(const State& state, ChainBoard& board) {
  if (board.host_outbound == 0) return;
  const uint32_t warp = threadIdx.x / blink::kLanes;
  const uint32_t warps = blockDim.x / blink::kLanes;
  for (uint32_t c = warp; c < state.config.channels; c += warps) blink::push_records(state, board, c);
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x < state.config.channels) blink::push_words(state, board, threadIdx.x);
  if (threadIdx.x < sizeof(blink::arena::Telemetry) / 8) blink::push_telemetry(state, board, threadIdx.x);
}

}  // namespace

// First node of every graph, beside the layers: notes the time and, for an arena in host memory, tells the front ends
// what the last run of the scheduler published. 256 threads.
extern "C" __global__ void __launch_bounds__(256) blink_begin(const State* state, ChainBoard* board) {
  const StepHeader& header = state->header;
  if (threadIdx.x == 0 && header.tokens != 0) {
    StepStamp* stamp = stamp_of(*board, header.step);
    *stamp = StepStamp{header.step, now_ns(), 0, 0, header.tokens, header.decode_works, header.bucket, 0};
  }
  push(*state, *board);
}

// Beside the head of a step graph: takes over what front ends wrote into host memory. 256 threads.
extern "C" __global__ void __launch_bounds__(256) blink_pull(const State* state, ChainBoard* board) {
  if (board->host_inbound != 0) blink::pull(*state, *board, now_ns());
}

// Waits, on one thread, until there is something to do, the command changes, or the time is over.
extern "C" __global__ void blink_poll(const State* state, ChainBoard* board) {
  const uint64_t begin = now_ns();
  for (uint64_t now = begin; now - begin < board->longest_poll_ns; now = now_ns()) {
    if (blink::load_acquire(&board->command) != board->command_seen) return;
    if (board->host_inbound != 0 && blink::bell_of(*state, *board) != board->bell_polled) return;
    if (blink::has_news(*state)) return;
    // Short while a next request is likely.
    __nanosleep(now - board->idle_since_ns < 1'000'000'000 ? 500 : 5'000);
  }
}

// Last node of every graph: the scheduler. 320 threads: 256 rows, channels on a warp in front of them, and a warp for
// what one thread does meanwhile; shared memory: hot_bytes(). Launched with programmatic dependent launch: it starts
// when sampling does, and rehearses meanwhile. Sampling itself does not start before everything in front of it has
// ended, so that what the scheduler reads early is no longer written by anybody.
extern "C" __global__ void __launch_bounds__(320)
    blink_tail(ColdArrays cold, ChainBoard* board, ColdArrays rehearsal_cold) {
  __shared__ blink::BlockScratch scratch;
  __shared__ uint64_t begin;
  __shared__ uint64_t command;
  extern __shared__ uint4 shared[];
  auto* hot_memory = reinterpret_cast<uint8_t*>(shared);
  const blink::BlockExec exec{&scratch};
  const StepHeader& header = cold.state->header;
  blink::touch_steady(*cold.state);
  const blink::HotState rehearsal(rehearsal_cold, hot_memory);
  if (threadIdx.x == 0) command = static_cast<uint64_t>(Command::RUN);
  State* state = &rehearsal.state();
  uint64_t ended_step = 0;
  bool steady = false;
  // One text for both, since it is the text that has to be fetched.
#pragma unroll 1
  for (uint32_t real = 0; real < 2; ++real) {
    if (real != 0) {
      asm volatile("griddepcontrol.wait;" ::: "memory");  // for the sampled tokens
      state = cold.state;
      ended_step = header.tokens != 0 ? header.step : 0;
      // Relaxed: an acquire would empty the first-level cache.
      if (threadIdx.x == 0) command = blink::load_relaxed(&board->command);
    }
    if (threadIdx.x == 0) begin = now_ns();
    __syncthreads();
    const auto launch = [&](const StepHeader& next) {
      if (real != 0) launch_next(*cold.state, *board, next);
    };
    steady = blink::steady_step(exec, *state, begin, static_cast<Command>(command), launch);
    __syncthreads();
  }
  if (!steady) {
    const auto launch = [&](const StepHeader& next) { launch_next(*cold.state, *board, next); };
    blink::full_device_step(exec, cold, hot_memory, begin, static_cast<Command>(command), launch);
  }
  if (header.stopped != 0 || board->launch_error != 0) push(*cold.state, *board);  // no graph follows that would
  if (threadIdx.x != 0) return;
  board->command_seen = command;
  if (ended_step != 0 || header.tokens != 0) board->idle_since_ns = begin;
  if (ended_step != 0) {
    StepStamp* stamp = stamp_of(*board, ended_step);
    stamp->tail_begin_ns = begin;
    stamp->tail_end_ns = now_ns();
  }
}
