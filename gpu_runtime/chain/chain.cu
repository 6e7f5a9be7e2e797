// The chain's own kernels. A step graph is: begin ‖ layers ‖ pull, then the tail; the idle graph: begin, poll, pull,
// tail. The tail is the scheduler; it launches the next graph from the device.
#include "chain/relay.cuh"
#include "scheduler/block_exec.cuh"
#include "scheduler/rehearsal.cuh"
#include "scheduler/step.h"

namespace {

using blink::State;
using blink::layout::ChainBoard;
using blink::layout::Command;
using blink::layout::StepHeader;
using blink::layout::StepStamp;

__device__ uint4 sink_memory[(sizeof(blink::Sink) + sizeof(uint4) - 1) / sizeof(uint4)];

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

// Starts the graph when this one has ended; 0, or what went wrong, which ends the chain. Built without the device
// runtime, the host launches each step instead.
__device__ uint32_t launch(uint64_t graph) {
#ifdef __CUDACC_RDC__
  return cudaGraphLaunch(reinterpret_cast<cudaGraphExec_t>(graph), cudaStreamGraphTailLaunch);
#else
  return 0;
#endif
}

// Copies what was foreseen. The whole block.
__device__ void load_foreseen(const State& state, blink::Foreseen& own) {
  __syncthreads();  // after the rehearsal
  const auto* from = reinterpret_cast<const uint4*>(state.foreseen);
  const auto pieces = static_cast<uint32_t>(blink::foreseen_bytes(*state.foreseen) / sizeof(uint4));
  for (uint32_t i = threadIdx.x; i < pieces; i += blockDim.x) reinterpret_cast<uint4*>(&own)[i] = from[i];
  __syncthreads();
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
  const uint64_t begin = now_ns();
  const StepHeader& header = state->header;
  if (threadIdx.x == 0 && header.tokens != 0) {
    StepStamp* stamp = stamp_of(*board, header.step);
    *stamp = StepStamp{header.step, begin, 0, 0, header.tokens, header.decode_works, header.bucket, 0};
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
    if (blink::is_wanted(*state, *board)) return;
    // Short while a next request is likely.
    __nanosleep(now - board->idle_since_ns < 1'000'000'000 ? 500 : 5'000);
  }
}

// Behind the pull, beside the head: what the scheduler can work out before the tokens are sampled. 320 threads.
extern "C" __global__ void __launch_bounds__(320) blink_foresee(State* state) {
  __shared__ blink::BlockScratch scratch;
  blink::foresee(blink::BlockExec{&scratch}, *state, now_ns());
}

// Last node of every graph: the scheduler. 320 threads: 256 rows, and channels on warps of their own in front of them.
// Launched with programmatic dependent launch: it starts when sampling does, and rehearses meanwhile. Sampling itself
// does not start before everything in front of it has ended, so that what is read early is no longer written by
// anybody.
extern "C" __global__ void __launch_bounds__(320) blink_tail(State* state, ChainBoard* board) {
  __shared__ blink::BlockScratch scratch;
  __shared__ blink::Foreseen foreseen;
  __shared__ uint64_t begin;
  __shared__ uint64_t command;
  const blink::BlockExec exec{&scratch};
  const uint64_t ended_step = state->header.tokens != 0 ? state->header.step : 0;
  uint64_t graph = 0;
  bool steady = false;
  uint32_t failure = 0;
  // One text for the rehearsal and for what counts, since it is the text that has to be fetched.
#pragma unroll 1
  for (uint32_t real = 0; real < 2; ++real) {
    failure = 0;
    if (real == 0) {
      exec.leader([&] { blink::foresee_rehearsal(foreseen, *reinterpret_cast<blink::Sink*>(sink_memory)); });
    } else {
      load_foreseen(*state, foreseen);
      if (foreseen.possible) graph = next_graph(*state, *board, state->header);
      asm volatile("griddepcontrol.wait;" ::: "memory");  // for the sampled tokens
      if (threadIdx.x == 0) begin = now_ns();
    }
    const auto runs = [&] {
      command = blink::load_relaxed(&board->command);
      return real == 0 || command == static_cast<uint64_t>(Command::RUN);
    };
    // Graph 0 is refused: the device runtime's part of the rehearsal.
    steady = blink::settle(exec, foreseen, runs, [&] { failure = launch(graph); });
  }
  if (!steady) {
    blink::full_step(exec, *state, begin, static_cast<Command>(command),
                     [&](const StepHeader& next) { failure = launch(next_graph(*state, *board, next)); });
  }
  if (failure != 0) board->launch_error = failure;
  const bool last = __syncthreads_or(failure != 0) || (!steady && state->header.stopped != 0);
  if (last) push(*state, *board);  // no graph follows that would
  if (threadIdx.x != 0) return;
  board->command_seen = command;
  if (ended_step != 0 || (!steady && state->header.tokens != 0)) board->idle_since_ns = begin;
  if (ended_step != 0) {
    StepStamp* stamp = stamp_of(*board, ended_step);
    stamp->tail_begin_ns = begin;
    stamp->tail_end_ns = now_ns();
  }
}
