// The step of a steady state: every live sequence decodes, none ends, and no front end wants anything. Its outcome is
// that of the full step, in a fraction of the code. On the GPU that is what counts: the tail of a step graph finds its
// instructions in no cache, and a full step has many times as many.
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
      [&](uint32_t r) { return 1 + state.rows[r].logprobs; },
      [&](uint32_t r, uint32_t rank) { state.row_ranks[r] = rank; });
}

// The sampled token only makes the sequence one longer.
BLINK_FN bool row_is_steady(const State& state, uint32_t r) {
  const Sequence& sequence = state.sequences[state.works[r].slot];
  const uint32_t token = sampled_token(state, r);
  return token < state.config.vocab_size && sequence.computed >= sequence.prompt_tokens &&
         sequence.length + 1 < sequence.prompt_tokens + sequence.max_tokens && !is_stop_token(state, sequence, token);
}

// No lease, submission or cancel record is new, and the log has room for this step's records and the next one's. All
// words are read at once; whatever is new is read again, in order, by the full step. That the log is overwritten only
// after the cursor was read follows from the decision in between.
BLINK_FN bool channel_is_steady(State& state, uint32_t c, uint64_t now_ns) {
  Channel& channel = state.channels[c];
  const arena::ChannelIn* in = channel_in(state, c);
  const uint32_t slots = state.config.cancel_slots;
  const auto* cancels = inbound_part<arena::CancelRecord>(state, c, state.inbound_layout.channel_cancel_offset);
  const uint64_t lease = load_relaxed(&in->lease);
  const uint64_t heartbeat = load_relaxed(&in->heartbeat);
  const uint64_t read = load_relaxed(&in->log_read);
  const uint64_t submission = load_relaxed(&submit_slot(state, c)->commit);
  const uint64_t cancel = load_relaxed(&cancels[channel.cancel_next & (slots - 1)].commit);
  channel.heartbeat_now = heartbeat;
  channel.log_read_now = read;
  if (lease != channel.lease_seen || channel.drop != 0) return false;
  if (!channel.live) return true;
  const uint64_t log_next = channel.log_next + state.row_counts[c];
  const bool sane = read >= channel.log_read && read <= log_next;
  const bool beats = heartbeat != channel.heartbeat || now_ns - channel.heartbeat_ns < state.config.lease_timeout_ns;
  const bool quiet = cancel != commit_word(channel, channel.cancel_next, slots) &&
                     submission != commit_word(channel, channel.submit_next, state.config.submit_slots);
  return sane && beats && quiet && log_next + state.row_counts[c] - read <= state.config.log_slots;
}

// Takes a row's token in and writes its next work. `before`: blocks taken (high half) and tiles (low half) of the rows
// before it.
BLINK_FN void advance_row(State& state, uint32_t r, uint64_t before, uint32_t span) {
  const layout::Work work = state.works[r];
  Sequence& sequence = state.sequences[work.slot];
  const uint32_t token = sampled_token(state, r);
  const Record record{arena::RecordKind::TOKEN, arena::Finish::NONE, arena::ErrorCode::NONE, work.position, token};
  const uint64_t at = state.channels[work.channel].log_next + state.row_ranks[r];
  write_record(state, work.channel, at, record);
  if (sequence.logprobs != 0) state.log_at[r] = at;
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

// Of the words that front ends see, only one changes: the position after the records. They need not be there when it is
// seen, since each carries its lap.
BLINK_FN void advance_channel(State& state, uint32_t c, uint64_t now_ns) {
  Channel& channel = state.channels[c];
  channel.log_next += state.row_counts[c];
  if (!channel.live) return;
  watch_heartbeat(channel, channel.heartbeat_now, now_ns, state.config.lease_timeout_ns);
  watch_cursor(channel, channel.log_read_now);
  store_relaxed(&channel_out(state, c)->log_written, channel.log_next);
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

// The words of the telemetry page that change; the others are those of the step before.
BLINK_FN void advance_telemetry(State& state) {
  auto* page = reinterpret_cast<arena::Telemetry*>(state.outbound + state.outbound_layout.telemetry_offset);
  store_relaxed(&page->steps, state.counters.steps);
  store_relaxed(&page->blocks_used, uint64_t{state.config.blocks - 1 - state.free_block_count});
  store_relaxed(&page->generated_tokens, state.counters.generated_tokens);
  store_relaxed(&page->prompt_tokens, state.counters.prompt_tokens);
  store_relaxed(&page->heartbeat, ++state.counters.heartbeat);
}

// False, with nothing changed, when the state is not a steady one.
template <class Exec, class Launch>
BLINK_FN bool steady_step(const Exec& exec, State& state, uint64_t now_ns, layout::Command command, Launch launch) {
  if (!state.steady || command != layout::Command::RUN || state.draining != 0) return false;
  const uint32_t rows = state.header.rows;
  const uint32_t channels = state.config.channels;
  const bool steady = exec.all(
      rows, [&](uint32_t r) { return row_is_steady(state, r); }, channels,
      [&](uint32_t c) { return channel_is_steady(state, c, now_ns); });
  if (!steady) return false;
  const uint32_t span = decode_span_of(state.decode_positions + rows, rows);
  const auto share = [&](uint32_t r) -> uint64_t {
    const uint32_t context = state.works[r].context_tokens + 1;
    const bool block = blocks_for(state, context) > state.sequences[state.works[r].slot].blocks;
    return uint64_t{block} << 32 | pieces_of(context, span);
  };
  const auto advance = [&](uint32_t r, uint64_t before) { advance_row(state, r, before, span); };
  // The next step has the same size, so that its graph can be launched meanwhile.
  const uint64_t sum = exec.scan_and(rows, share, advance, [&] { launch(state.header); });
  if (state.header.logprobs != 0) publish_logprobs(exec, state);
  exec.each_and(
      channels, [&](uint32_t c) { advance_channel(state, c, now_ns); },
      [&] {
        advance_counts(state, sum, span);
        advance_telemetry(state);
      });
  return true;
}

}  // namespace blink
