// First half of intake: leases, heartbeats and read cursors of the channels.
#pragma once
#include "scheduler/table.h"

namespace blink {

BLINK_FN void end_lease(Channel& channel) {
  channel.live = 0;
  channel.drop = 1;
}

// Whether a lease word asks for the channel's next lease.
BLINK_FN bool asks_for_lease(const Channel& channel, uint64_t word) {
  return word == channel.lease + 1 && word <= 0xFFFFFFFFu;
}

BLINK_FN void begin_lease(Channel& channel, uint64_t lease, uint64_t heartbeat, uint64_t now_ns) {
  channel.drop = 1;
  channel.lease = lease;
  channel.live = 1;
  channel.log_start = channel.log_read = channel.log_next;
  channel.heartbeat = heartbeat;
  channel.heartbeat_ns = now_ns;
}

BLINK_FN void watch_lease(Channel& channel, uint64_t word, uint64_t heartbeat, uint64_t now_ns) {
  const bool changed = word != channel.lease_seen;
  channel.lease_seen = word;
  if (asks_for_lease(channel, word)) {
    begin_lease(channel, word, heartbeat, now_ns);
  } else if (word == 0) {
    if (channel.live) end_lease(channel);
  } else if (word != channel.lease && changed) {
    ++channel.protocol_errors;
  }
}

BLINK_FN void watch_heartbeat(Channel& channel, uint64_t heartbeat, uint64_t now_ns, uint64_t timeout_ns) {
  if (heartbeat != channel.heartbeat) {
    channel.heartbeat = heartbeat;
    channel.heartbeat_ns = now_ns;
  } else if (now_ns - channel.heartbeat_ns >= timeout_ns) {
    end_lease(channel);
  }
}

BLINK_FN void watch_cursor(Channel& channel, uint64_t log_read) {
  if (log_read >= channel.log_read && log_read <= channel.log_next) {
    channel.log_read = log_read;
  } else if (log_read > channel.log_next && log_read != channel.log_read_seen) {
    ++channel.protocol_errors;
  }
  channel.log_read_seen = log_read;
}

// Both on a boundary of 16 bytes.
template <class Exec>
BLINK_FN void wipe(const Exec& exec, uint64_t* words, uint64_t bytes) {
  exec.each(static_cast<uint32_t>(bytes / 16), [&](uint32_t i) { store_zeros(words + 2 * uint64_t{i}); });
}

// Leaves nothing of the leases that have just ended, and finds nothing at those that have just begun.
//
// A log is wiped with its lease's end: whoever gets the channel next may read it as soon as it has its keys, and has
// them only when the end has been told. By then nobody writes records of that lease any more.
//
// What front ends write is wiped when a lease begins, since whoever had the channel before may write until its keys are
// revoked. Its prompts and its salts could be made use of, and commit words are no secret: it could have written those
// of this lease. The new front end, which writes nothing before it is told of its lease, is told by a release behind
// this (telemetry.h). Nothing of the heap is needed any more: intake has copied what it took.
template <class Exec>
BLINK_FN void wipe_channels(const Exec& exec, const State& state) {
  for (uint32_t c = 0; c < state.config.channels; ++c) {
    if (!state.channels[c].drop) continue;
    wipe(exec, outbound_part<uint64_t>(state, c, state.outbound_layout.channel_log_offset),
         uint64_t{state.config.log_slots} * sizeof(arena::TokenRecord));
    if (!state.channels[c].live) continue;
    // Rings and heap, up to the next channel.
    const uint64_t rings = state.inbound_layout.channel_submit_offset;
    wipe(exec, inbound_part<uint64_t>(state, c, rings), state.inbound_layout.channel_bytes - rings);
  }
}

// Reads the control words of every channel and drops the sequences whose lease has ended.
template <class Exec>
BLINK_FN void watch_channels(const Exec& exec, State& state, uint64_t now_ns) {
  exec.each(state.config.channels, [&](uint32_t c) {
    Channel& channel = state.channels[c];
    const arena::ChannelIn* in = channel_in(state, c);
    const uint64_t heartbeat = load_acquire(&in->heartbeat);
    watch_lease(channel, load_acquire(&in->lease), heartbeat, now_ns);
    if (channel.live) watch_heartbeat(channel, heartbeat, now_ns, state.config.lease_timeout_ns);
    if (channel.live) watch_cursor(channel, load_acquire(&in->log_read));
  });
  const uint64_t ended_leases = exec.scan(
      state.config.channels, [&](uint32_t c) -> uint64_t { return state.channels[c].drop; }, [](uint32_t, uint64_t) {});
  if (ended_leases == 0) return;
  wipe_channels(exec, state);
  const auto dropped = [&](uint32_t slot) { return state.channels[state.sequences[slot].channel].drop != 0; };
  release_blocks(exec, state, dropped);
  const auto untold = [&](uint32_t i) -> uint64_t {
    return dropped(state.order[i]) && state.sequences[state.order[i]].status != Status::kEnding;
  };
  const uint64_t ended = exec.scan(state.live, untold, [](uint32_t, uint64_t) {});
  exec.leader([&] { state.counters.finished[static_cast<uint32_t>(arena::Finish::CANCELLED)] += ended; });
  exec.each(state.live, [&](uint32_t i) {
    if (dropped(state.order[i])) state.sequences[state.order[i]].status = Status::kFree;
  });
  compact_order(exec, state);
  exec.each(state.config.channels, [&](uint32_t c) {
    if (state.channels[c].drop) state.channels[c].ending = 0;
    state.channels[c].drop = 0;
  });
}

}  // namespace blink
