// The step of a steady state: every live sequence decodes, none ends, and no front end wants anything. Its outcome is
// that of the full step. Nearly all of it can be worked out before the step's tokens are there: `foresee` does that
// while the GPU computes the logits, and `settle`, which the next step waits for, checks the tokens and puts them where
// they belong.
#pragma once
#include "scheduler/emit.h"
#include "scheduler/foreseen.h"
#include "scheduler/harvest.h"
#include "scheduler/intake.h"
#include "scheduler/telemetry.h"

namespace blink {

// After a plan was written: whether the next step can be a steady one, and the rank of each row in its channel's log.
template <class Exec>
BLINK_FN void prepare_steady(const Exec& exec, State& state) {
  const layout::StepHeader& header = state.header;
  const bool possible = header.works != 0 && header.rows == header.works && header.decode_works == header.works &&
                        state.live == header.works && header.rows <= kSteadyRows;
  exec.leader([&] { state.steady = possible; });
  if (!possible) return;
  exec.rank(
      header.rows, state.config.channels, state.row_counts, [&](uint32_t r) { return state.works[r].channel; },
      [&](uint32_t r) { return 1 + state.rows[r].logprobs; },
      [&](uint32_t r, uint32_t rank) { state.row_ranks[r] = rank; });
}

// One more token does not end the sequence by itself.
BLINK_FN bool row_goes_on(const State& state, uint32_t r) {
  const Sequence& sequence = state.sequences[state.works[r].slot];
  return sequence.computed >= sequence.prompt_tokens &&
         sequence.length + 1 < sequence.prompt_tokens + sequence.max_tokens;
}

// No lease, submission or cancel record is new, and the log has room for this step's records and the next one's. All
// words are read at once; whatever is new is read again, in order, by the full step. That the log is overwritten only
// after the cursor was read follows from the decision in between.
BLINK_FN bool foresee_channel(const State& state, uint32_t c, Foreseen& foreseen) {
  Channel& channel = state.channels[c];
  const arena::ChannelIn* in = channel_in(state, c);
  const uint32_t slots = state.config.cancel_slots;
  const arena::CancelRecord* cancels = cancel_ring(state, c);
  const uint64_t lease = load_relaxed(&in->lease);
  const uint64_t heartbeat = load_relaxed(&in->heartbeat);
  const uint64_t read = load_relaxed(&in->log_read);
  const uint64_t submission = load_relaxed(&submit_slot(state, c)->commit);
  const uint64_t cancel = load_relaxed(&cancels[channel.cancel_next & (slots - 1)].commit);
  const uint64_t log_next = channel.log_next + state.row_counts[c];
  foreseen.channels[c] = {&channel, channel_out(state, c), log_next, heartbeat, read};
  if (lease != channel.lease_seen || channel.drop != 0) return false;
  if (!channel.live) return true;
  const bool sane = read >= channel.log_read && read <= log_next;
  const bool beats =
      heartbeat != channel.heartbeat || foreseen.now_ns - channel.heartbeat_ns < state.config.lease_timeout_ns;
  const bool quiet = cancel != commit_word(channel, channel.cancel_next, slots) &&
                     submission != commit_word(channel, channel.submit_next, state.config.submit_slots);
  return sane && beats && quiet && log_next + state.row_counts[c] - read <= state.config.log_slots;
}

BLINK_FN void foresee_record(const State& state, uint32_t r, const layout::Work& work, ForeseenRow& row) {
  const uint64_t at = state.channels[work.channel].log_next + state.row_ranks[r];
  const Record record{arena::RecordKind::TOKEN, arena::Finish::NONE, arena::ErrorCode::NONE, work.position, 0};
  row.record = record_at(state, work.channel, at);
  row.head = head_of(state, at, record);
  row.body = body_of(state, at, record);
  if (row.sequence->logprobs != 0) state.log_at[r] = at;
}

BLINK_FN void foresee_stops(ForeseenRow& row) {
  const Sequence& sequence = *row.sequence;
  row.checks_eos = (sequence.flags & static_cast<uint32_t>(arena::SubmitFlag::IGNORE_EOS)) == 0;
  row.stop_count = sequence.stop_count;
  for (uint32_t i = 0; i < sequence.stop_count; ++i) row.stop_tokens[i] = sequence.stop_tokens[i];
}

// Writes what the next step's layers read of a row, which this step's have ended to read. `before`: blocks taken (high
// half) and tiles (low half) of the rows before it. Should the step not be a steady one after all, then all of it is
// written anew, and the block's entry lies behind those that are in use.
BLINK_FN void foresee_row(State& state, uint32_t r, uint64_t before, uint32_t span, Foreseen& foreseen) {
  ForeseenRow& row = foreseen.rows[r];
  layout::Work& work = state.works[r];
  Sequence& sequence = state.sequences[work.slot];
  const uint32_t position = sequence.length;
  row.sequence = &sequence;
  row.length = position + 1;
  const uint32_t flags = row_flags(sequence, row.length);
  row.flags = flags != state.rows[r].flags ? flags : kNone;
  row.history = history_of(state, work.slot) + position;
  foresee_record(state, r, work, row);
  foresee_stops(row);
  int32_t* blocks = blocks_of(state, work.slot);
  row.blocks = 0;
  if (blocks_for(state, row.length) > sequence.blocks) {
    row.blocks = sequence.blocks + 1;
    blocks[sequence.blocks] = static_cast<int32_t>(*(state.free_blocks + state.free_block_count - 1 - (before >> 32)));
  }
  work.context_tokens = row.length;
  write_place(state, r, position, blocks);
  write_tiles_of(state.decode_tiles, r, static_cast<uint32_t>(before), pieces_of(row.length, span), span);
}

BLINK_FN void foresee_counts(State& state, uint64_t sum, uint32_t span, Foreseen& foreseen) {
  const Counters& counters = state.counters;
  const uint32_t rows = state.header.rows;
  state.header.decode_tiles = static_cast<uint32_t>(sum);
  state.header.decode_span = span;
  const auto taken = static_cast<uint32_t>(sum >> 32);
  auto* page = reinterpret_cast<arena::Telemetry*>(state.outbound + state.outbound_layout.telemetry_offset);
  foreseen.counts = {&state,
                     page,
                     state.decode_positions + rows,
                     counters.generated_tokens + rows,
                     counters.steps + 1,
                     counters.heartbeat + 1,
                     state.round_start + 1 == state.config.channels ? 0 : state.round_start + 1,
                     state.free_block_count - taken,
                     state.held_blocks + taken};
}

BLINK_FN void foresee_bounds(const State& state, uint64_t now_ns, Foreseen& foreseen) {
  foreseen.row_count = state.header.rows;
  foreseen.channel_count = state.config.channels;
  foreseen.vocab_size = state.config.vocab_size;
  foreseen.eos_count = state.config.eos_count;
  for (uint32_t i = 0; i < state.config.eos_count; ++i) foreseen.eos_tokens[i] = state.config.eos_tokens[i];
  foreseen.now_ns = now_ns;
  foreseen.logprobs = state.header.logprobs;
  foreseen.sampled = state.sampled;
  foreseen.token_ids = state.token_ids;
  foreseen.sample_rows = state.rows;
}

// The full step would evict cached blocks.
BLINK_FN bool lacks_free_blocks(const State& state) {
  return state.free_block_count < least_free(state) && idle_blocks(state) != 0;
}

// For when the step's layers have ended. Changes nothing that the full step would miss.
template <class Exec>
BLINK_FN void foresee(const Exec& exec, State& state, uint64_t now_ns) {
  Foreseen& foreseen = *state.foreseen;
  exec.leader([&] {
    foreseen.possible = 0;
    foresee_bounds(state, now_ns, foreseen);
  });
  if (!state.steady || state.draining != 0 || lacks_free_blocks(state)) return;
  const uint32_t rows = state.header.rows;
  const bool possible = exec.all(
      rows, [&](uint32_t r) { return row_goes_on(state, r); }, state.config.channels,
      [&](uint32_t c) { return foresee_channel(state, c, foreseen); });
  if (!possible) return;
  const uint32_t span = decode_span_of(state.decode_positions + rows, rows);
  const auto share = [&](uint32_t r) -> uint64_t {
    const Sequence& sequence = state.sequences[state.works[r].slot];
    const bool block = blocks_for(state, sequence.length + 1) > sequence.blocks;
    return uint64_t{block} << 32 | pieces_of(sequence.length + 1, span);
  };
  const uint64_t sum =
      exec.scan(rows, share, [&](uint32_t r, uint64_t before) { foresee_row(state, r, before, span, foreseen); });
  exec.leader([&] {
    foresee_counts(state, sum, span, foreseen);
    foreseen.possible = 1;
  });
}

// Reads a row's token; whether the sequence goes on with it.
BLINK_FN bool token_goes_on(Foreseen& foreseen, uint32_t r) {
  ForeseenRow& row = foreseen.rows[r];
  row.token = load_relaxed(reinterpret_cast<const uint32_t*>(foreseen.sampled) + r);
  bool ends = row.token >= foreseen.vocab_size;
  for (uint32_t i = 0; row.checks_eos && i < foreseen.eos_count; ++i) ends |= row.token == foreseen.eos_tokens[i];
  for (uint32_t i = 0; i < row.stop_count; ++i) ends |= row.token == row.stop_tokens[i];
  return !ends;
}

BLINK_FN void settle_row(const Foreseen& foreseen, uint32_t r) {
  const ForeseenRow& row = foreseen.rows[r];
  arena::TokenBody body = arena::TokenBody::unpack(row.body);
  body.token = row.token;
  store_relaxed(&row.record->body, body.pack());
  store_relaxed(&row.record->head, row.head);
  foreseen.token_ids[r] = static_cast<int32_t>(row.token);
  *row.history = row.token;
  row.sequence->length = row.length;
  row.sequence->computed = row.length - 1;
  foreseen.sample_rows[r].position = row.length;
  if (row.blocks != 0) row.sequence->blocks = row.blocks;
  if (row.flags != kNone) foreseen.sample_rows[r].flags = row.flags;
}

// Of the words that front ends see, only one changes: the position after the records. They need not be there when it is
// seen, since each carries its lap.
BLINK_FN void settle_channel(const Foreseen& foreseen, uint32_t c) {
  const ForeseenChannel& seen = foreseen.channels[c];
  Channel& channel = *seen.channel;
  channel.log_next = seen.log_next;
  if (!channel.live) return;
  if (seen.heartbeat != channel.heartbeat) {
    channel.heartbeat = seen.heartbeat;
    channel.heartbeat_ns = foreseen.now_ns;
  }
  channel.log_read = channel.log_read_seen = seen.log_read;
  store_relaxed(&seen.out->log_written, seen.log_next);
}

// Of the telemetry page, the words that change.
BLINK_FN void settle_counts(const Foreseen& foreseen) {
  const ForeseenCounts& counts = foreseen.counts;
  State& state = *counts.state;
  state.header.step = state.counters.steps = counts.steps;
  state.decode_positions = counts.positions;
  state.free_block_count = counts.free_blocks;
  state.held_blocks = counts.blocks_used;
  state.counters.generated_tokens = counts.generated;
  state.counters.heartbeat = counts.heartbeat;
  state.round_start = counts.round_start;
  store_relaxed(&counts.page->steps, counts.steps);
  store_relaxed(&counts.page->blocks_used, uint64_t{counts.blocks_used});
  store_relaxed(&counts.page->generated_tokens, counts.generated);
  store_relaxed(&counts.page->heartbeat, counts.heartbeat);
}

// False, with nothing changed, when the state is not a steady one. `runs()`: whether the command is to go on;
// `launch()` starts the next step, whose graph is that of this one. Each is called on one thread.
template <class Exec, class Runs, class Launch>
BLINK_FN bool settle(const Exec& exec, Foreseen& foreseen, Runs runs, Launch launch) {
  const bool steady = exec.all(
      foreseen.possible ? foreseen.row_count : 0, [&](uint32_t r) { return token_goes_on(foreseen, r); }, 1,
      [&](uint32_t) { return runs() && foreseen.possible != 0; });
  if (!steady) return false;
  const bool logprobs = foreseen.logprobs != 0;  // before the last barrier, after which the next step may be foreseen
  exec.beside(
      foreseen.row_count, [&](uint32_t r) { settle_row(foreseen, r); }, foreseen.channel_count,
      [&](uint32_t c) { settle_channel(foreseen, c); }, [&] { settle_counts(foreseen); }, launch);
  if (logprobs) publish_logprobs(exec, *foreseen.counts.state);
  return true;
}

}  // namespace blink
