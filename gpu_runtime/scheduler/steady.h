// The step of a steady state: every live sequence decodes, none ends, and no front end wants anything. Its outcome is
// that of the full step, in a fraction of the code. On the GPU that is what counts: the tail of a step graph finds its
// instructions in no cache, and a full step is 100 KB of them (30 µs on an H200, whatever the number of sequences).
#pragma once
#include "scheduler/emit.h"
#include "scheduler/harvest.h"
#include "scheduler/intake.h"
#include "scheduler/telemetry.h"

namespace blink {

// After a plan was written: whether the next step can be a steady one, and the rank of each row in its channel's log.
template <class Exec>
BLINK_FN void prepare_steady(const Exec& exec, State& state) {
  const layout::StepHeader& header = state.header;
  const bool possible = header.works != 0 && header.rows == header.works && header.decode_works == header.works &&
                        state.live == header.works;
  exec.leader([&] { state.steady = possible; });
  if (!possible) return;
  exec.rank(
      header.rows, state.config.channels, state.row_counts, [&](uint32_t r) { return state.works[r].channel; },
      [&](uint32_t r, uint32_t rank) { state.row_ranks[r] = rank; });
}

// The sampled token only makes the sequence one longer.
BLINK_FN bool row_is_steady(const State& state, uint32_t r) {
  const Sequence& sequence = state.sequences[state.works[r].slot];
  const uint32_t token = static_cast<uint32_t>(state.sampled[r]);
  return token < state.config.vocab_size && sequence.computed >= sequence.prompt_tokens &&
         sequence.length + 1 < sequence.prompt_tokens + sequence.max_tokens && !is_stop_token(state, sequence, token);
}

// No lease, submission or cancel record is new, and the log has room for this step's records and the next one's.
BLINK_FN bool channel_is_steady(const State& state, uint32_t c, uint64_t now_ns) {
  const Channel& channel = state.channels[c];
  const arena::ChannelIn* in = channel_in(state, c);
  if (load_acquire(&in->lease) != channel.lease_seen || channel.drop != 0) return false;
  if (!channel.live) return true;
  const uint64_t log_next = channel.log_next + state.row_counts[c];
  const uint64_t read = load_acquire(&in->log_read);
  const bool sane = read >= channel.log_read && read <= log_next;
  const bool beats = load_acquire(&in->heartbeat) != channel.heartbeat ||
                     now_ns - channel.heartbeat_ns < state.config.lease_timeout_ns;
  const uint32_t slots = state.config.cancel_slots;
  const auto* ring = inbound_part<arena::CancelRecord>(state, c, state.inbound_layout.channel_cancel_offset);
  const bool cancels =
      load_acquire(&ring[channel.cancel_next % slots].commit) == commit_word(channel, channel.cancel_next, slots);
  return sane && beats && !cancels && !submission_is_there(state, c) &&
         log_next + state.row_counts[c] - read <= state.config.log_slots;
}

// Takes a row's token in and writes its next work. `before`: blocks taken (high half) and tiles (low half) of the rows
// before it.
BLINK_FN void advance_row(State& state, uint32_t r, uint64_t before, uint32_t span) {
  const layout::Work work = state.works[r];
  Sequence& sequence = state.sequences[work.slot];
  const uint32_t token = static_cast<uint32_t>(state.sampled[r]);
  const Record record{arena::RecordKind::TOKEN, arena::Finish::NONE, arena::ErrorCode::NONE, work.position, token};
  write_record(state, work.channel, state.channels[work.channel].log_next + state.row_ranks[r], record);
  history_of(state, work.slot)[sequence.length++] = token;
  ++sequence.computed;
  if (blocks_for(state, sequence.length) > sequence.blocks) {
    const uint32_t* top = state.free_blocks + state.free_block_count - 1 - (before >> 32);
    blocks_of(state, work.slot)[sequence.blocks++] = static_cast<int32_t>(*top);
  }
  write_work(state, work.slot, r, r, r);
  write_token(state, state.works[r], 0);
  const uint32_t base = static_cast<uint32_t>(before);
  write_tiles_of(state.decode_tiles, r, base, pieces_of(sequence.length, span), span);
}

BLINK_FN void advance_channel(State& state, uint32_t c, uint64_t now_ns) {
  Channel& channel = state.channels[c];
  channel.log_next += state.row_counts[c];
  const arena::ChannelIn* in = channel_in(state, c);
  if (channel.live) watch_heartbeat(channel, load_acquire(&in->heartbeat), now_ns, state.config.lease_timeout_ns);
  if (channel.live) watch_cursor(channel, load_acquire(&in->log_read));
  write_channel_words(state, c);
}

BLINK_FN void advance_counts(State& state, uint64_t sum, uint32_t span) {
  layout::StepHeader& header = state.header;
  header.step = ++state.counters.steps;
  header.decode_tiles = static_cast<uint32_t>(sum);
  header.decode_span = span;
  state.decode_positions += header.rows;
  state.free_block_count -= static_cast<uint32_t>(sum >> 32);
  state.counters.generated_tokens += header.rows;
  state.round_start = (state.round_start + 1) % state.config.channels;
}

// False, with nothing changed, when the state is not a steady one.
template <class Exec, class Launch>
BLINK_FN bool steady_step(const Exec& exec, State& state, uint64_t now_ns, layout::Command command, Launch launch) {
  if (!state.steady || command != layout::Command::RUN || state.draining != 0) return false;
  const uint32_t rows = state.header.rows;
  const uint32_t channels = state.config.channels;
  const bool steady = exec.all(rows > channels ? rows : channels, [&](uint32_t i) {
    return (i >= rows || row_is_steady(state, i)) && (i >= channels || channel_is_steady(state, i, now_ns));
  });
  if (!steady) return false;
  const uint32_t span = decode_span_of(state.decode_positions + rows, rows);
  const auto share = [&](uint32_t r) -> uint64_t {
    const uint32_t context = state.works[r].context_tokens + 1;
    const bool block = blocks_for(state, context) > state.sequences[state.works[r].slot].blocks;
    return uint64_t{block} << 32 | pieces_of(context, span);
  };
  const uint64_t sum =
      exec.scan(rows, share, [&](uint32_t r, uint64_t before) { advance_row(state, r, before, span); });
  exec.each(channels, [&](uint32_t c) { advance_channel(state, c, now_ns); });
  exec.leader([&] {
    advance_counts(state, sum, span);
    launch(state.header);
    write_telemetry_page(state, arena::DeviceState::RUNNING);
  });
  return true;
}

}  // namespace blink
