// What the scheduler lets the front ends know after each step: cursors, leases and the telemetry page.
#pragma once
#include "scheduler/memory.h"
#include "scheduler/state.h"

namespace blink {

BLINK_FN void write_channel_words(State& state, uint32_t c) {
  const Channel& channel = state.channels[c];
  arena::ChannelOut* out = channel_out(state, c);
  store_relaxed(&out->log_start, channel.log_start);
  store_relaxed(&out->log_written, channel.log_next);
  store_relaxed(&out->submit_read, channel.submit_next);
  store_relaxed(&out->cancel_read, channel.cancel_next);
  store_relaxed(&out->rejected, channel.rejected);
  store_relaxed(&out->protocol_errors, channel.protocol_errors);
  store_release(&out->lease, channel.lease);
  store_release(&out->live, uint64_t{channel.live});
}

BLINK_FN void write_telemetry_page(State& state, arena::DeviceState device_state) {
  auto* page = reinterpret_cast<arena::Telemetry*>(state.outbound + state.outbound_layout.telemetry_offset);
  const Counters& counters = state.counters;
  uint64_t ending = 0;
  uint64_t rejected = 0;
  uint64_t protocol_errors = 0;
  for (uint32_t c = 0; c < state.config.channels; ++c) {
    ending += state.channels[c].ending;
    rejected += state.channels[c].rejected;
    protocol_errors += state.channels[c].protocol_errors;
  }
  const uint64_t total = state.config.blocks - 1;
  store_relaxed(&page->state, static_cast<uint64_t>(device_state));
  store_relaxed(&page->steps, counters.steps);
  store_relaxed(&page->running, uint64_t{state.running});
  store_relaxed(&page->waiting, state.live - state.running - ending);
  store_relaxed(&page->blocks_total, total);
  store_relaxed(&page->blocks_used, uint64_t{state.held_blocks});
  store_relaxed(&page->blocks_cached, uint64_t{idle_blocks(state)});
  store_relaxed(&page->prefix_queries, counters.prefix_queries);
  store_relaxed(&page->prefix_hits, counters.prefix_hits);
  store_relaxed(&page->prompt_tokens, counters.prompt_tokens);
  store_relaxed(&page->generated_tokens, counters.generated_tokens);
  store_relaxed(&page->finished_stop, counters.finished[static_cast<uint32_t>(arena::Finish::STOP)]);
  store_relaxed(&page->finished_length, counters.finished[static_cast<uint32_t>(arena::Finish::LENGTH)]);
  store_relaxed(&page->finished_cancelled, counters.finished[static_cast<uint32_t>(arena::Finish::CANCELLED)]);
  store_relaxed(&page->finished_error, counters.finished[static_cast<uint32_t>(arena::Finish::ERROR)]);
  store_relaxed(&page->rejected, rejected);
  store_relaxed(&page->protocol_errors, protocol_errors);
  store_relaxed(&page->log_stalls, counters.log_stalls);
  store_relaxed(&page->step_tokens, uint64_t{state.header.tokens});
  store_relaxed(&page->heartbeat, ++state.counters.heartbeat);
}

template <class Exec>
BLINK_FN void write_telemetry(const Exec& exec, State& state, arena::DeviceState device_state) {
  exec.each(state.config.channels, [&](uint32_t c) { write_channel_words(state, c); });
  exec.leader([&] { write_telemetry_page(state, device_state); });
}

}  // namespace blink
