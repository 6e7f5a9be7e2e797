#include "scheduler/rehearsal.h"

#include <cstring>

#include "scheduler/cold_arrays.h"
#include "scheduler/setup.h"
#include "scheduler/step.h"

#define BLINK_EXPORT __attribute__((visibility("default")))

using blink::State;
using blink::layout::Command;
using blink::layout::SchedulerConfig;

namespace {

constexpr uint64_t kArraysAt = blink::arena::align_up(sizeof(State), 64);
constexpr uint32_t kToken = 1;

SchedulerConfig small_config() {
  SchedulerConfig config{};
  config.channels = 1;
  config.submit_slots = config.cancel_slots = 2;
  config.log_slots = 16;
  config.heap_tokens = 16;
  config.vocab_size = 8;
  config.max_model_tokens = 64;
  config.max_sequences = config.max_running = 1;
  config.token_budget = 2;
  config.intake_tokens = 1;
  config.block_tokens = 64;
  config.blocks = 3;
  config.blocks_per_sequence = 1;
  config.bucket_count = 1;
  config.buckets[0] = 2;
  config.lease_timeout_ns = ~uint64_t{0};
  return config;
}

// Where the parts of a rehearsal lie in its memory.
struct Places {
  uint64_t inbound, outbound, total;
};

Places places_of(State& state) {
  const uint64_t inbound = kArraysAt + blink::arena::align_up(blink::carve(state, nullptr), 64);
  const uint64_t outbound = inbound + state.inbound_layout.total_bytes;
  return {inbound, outbound, outbound + state.outbound_layout.total_bytes};
}

State blank_state() {
  State state{};
  state.config = small_config();
  state.inbound_layout = blink::arena::InboundLayout(blink::sizes_of(state.config));
  state.outbound_layout = blink::arena::OutboundLayout(blink::sizes_of(state.config));
  return state;
}

template <class T>
T* writable(const T* part) {
  return const_cast<T*>(part);
}

// One submission of two tokens, which is then decoded.
void submit(State& state) {
  auto* record =
      writable(blink::inbound_part<blink::arena::SubmitRecord>(state, 0, state.inbound_layout.channel_submit_offset));
  auto* heap = writable(blink::inbound_part<uint32_t>(state, 0, state.inbound_layout.channel_heap_offset));
  heap[0] = heap[1] = kToken;
  record->prompt_tokens = 2;
  record->max_tokens = 40;
  record->top_p = 1.0f;
  record->flags = static_cast<uint32_t>(blink::arena::SubmitFlag::IGNORE_EOS);
  record->commit = blink::arena::CommitWord{1, 1}.pack();
}

void play(State& state) {
  const blink::HostExec exec;
  auto* control = writable(blink::channel_in(state, 0));
  control->lease = control->heartbeat = 1;
  submit(state);
  for (uint64_t now = 1; now < 4 && !state.steady; ++now) {
    blink::step(exec, state, now, Command::RUN);
    *writable(state.sampled) = kToken;
  }
}

}  // namespace

extern "C" {

BLINK_EXPORT uint64_t blink_rehearsal_bytes() {
  State state = blank_state();
  return places_of(state).total;
}

BLINK_EXPORT void blink_rehearsal_make(uint64_t base, uint8_t* image, uint8_t cold[48]) {
  State state = blank_state();
  const Places places = places_of(state);
  std::memset(image, 0, places.total);
  blink::carve(state, image + kArraysAt);
  blink::fill_pools(state);
  state.inbound = image + places.inbound;
  state.outbound = image + places.outbound;
  play(state);
  auto* device = reinterpret_cast<uint8_t*>(static_cast<uintptr_t>(base));
  blink::carve(state, device + kArraysAt);
  state.inbound = device + places.inbound;
  state.outbound = device + places.outbound;
  std::memcpy(image, &state, sizeof(State));
  const blink::ColdArrays arrays{
      reinterpret_cast<State*>(device), state.sequences,      state.channels, state.order, state.free_slots,
      state.config.max_sequences,       state.config.channels};
  static_assert(sizeof(arrays) == 48);
  std::memcpy(cold, &arrays, sizeof(arrays));
}

}  // extern "C"
