// emit: writes the plan where the step's kernels read it.
#pragma once
#include "scheduler/plan.h"

namespace blink {

// Free blocks below which idle ones are evicted: so that a steady step, which evicts none, finds as many as it can
// need.
BLINK_FN uint32_t least_free(const State& state) { return state.config.max_running; }

// Evicts idle blocks when free ones are short for so many, and then many at once.
template <class Exec>
BLINK_FN void provide_blocks(const Exec& exec, State& state, uint32_t needed) {
  const uint32_t free = state.free_block_count;
  const uint32_t idle = idle_blocks(state);
  const uint32_t least = needed > least_free(state) ? needed : least_free(state);
  if (free >= least || idle == 0) return;
  const uint32_t wanted = least - free + (state.config.blocks - 1) / layout::EVICTION_SHARE;
  evict(exec, state, wanted < idle ? wanted : idle);
}

// Gives every planned sequence the blocks for its new positions. The reservation made sure that there are enough.
template <class Exec>
BLINK_FN void allocate_blocks(const Exec& exec, State& state) {
  const auto need = [&](uint32_t i) -> uint64_t {
    const Sequence& sequence = state.sequences[state.order[i]];
    if (sequence.status != Status::kRunning || sequence.query == 0) return 0;
    return blocks_for(state, uint64_t{sequence.computed} + sequence.query) - sequence.blocks;
  };
  const auto taken = static_cast<uint32_t>(exec.scan(state.live, need, [](uint32_t, uint64_t) {}));
  provide_blocks(exec, state, taken);
  if (taken == 0) return;
  exec.scan(state.live, need, [&](uint32_t i, uint64_t before) {
    const uint32_t slot = state.order[i];
    const uint32_t count = static_cast<uint32_t>(need(i));
    const uint32_t* top = state.free_blocks + state.free_block_count - 1 - before;
    int32_t* row = blocks_of(state, slot) + state.sequences[slot].blocks;
    for (uint32_t b = 0; b < count; ++b) row[b] = static_cast<int32_t>(*(top - b));
  });
  exec.each(state.live, [&](uint32_t i) { state.sequences[state.order[i]].blocks += static_cast<uint32_t>(need(i)); });
  exec.leader([&] {
    state.free_block_count -= taken;
    state.held_blocks += taken;
  });
}

BLINK_FN bool samples(const Sequence& sequence) { return sequence.computed + sequence.query == sequence.length; }

// Sample rows of a planned sequence: one for each of its tokens while it scores its prompt.
BLINK_FN uint32_t rows_of(const Sequence& sequence) {
  return scores(sequence) ? sequence.query : static_cast<uint32_t>(samples(sequence));
}

// RowFlag bits of the row of a sequence's token at a position.
BLINK_FN uint32_t row_flags(const Sequence& sequence, uint32_t position) {
  if (position < sequence.length) return static_cast<uint32_t>(layout::RowFlag::KNOWN);
  const bool mask = position - sequence.prompt_tokens < sequence.min_tokens;
  return (sequence.extras ? static_cast<uint32_t>(layout::RowFlag::EXTRAS) : 0) |
         (mask ? static_cast<uint32_t>(layout::RowFlag::MASK_STOPS) : 0);
}

// The row of the token at a position of the sequence, from the logits of the step's token at `token_index`.
BLINK_FN void write_row(State& state, uint32_t slot, uint32_t row, uint32_t token_index, uint32_t position) {
  const Sequence& sequence = state.sequences[slot];
  state.rows[row] =
      layout::SampleRow{token_index,          slot,           position,      sequence.top_k,
                        sequence.temperature, sequence.top_p, sequence.seed, row_flags(sequence, position),
                        sequence.logprobs};
  if (sequence.logprobs != 0) state.header.logprobs = 1;  // the same word from any thread
}

// Enters a sequence into the work list at `index`, with its tokens from `start` and its rows, if it has any, from `row`
// on. Of a sequence that scores its prompt, the rows are written with the tokens.
BLINK_FN void write_work(State& state, uint32_t slot, uint32_t index, uint32_t start, uint32_t row) {
  const Sequence& sequence = state.sequences[slot];
  const uint32_t rows = rows_of(sequence);
  state.works[index] = layout::Work{slot,
                                    start,
                                    sequence.query,
                                    sequence.computed + sequence.query,
                                    rows != 0 ? row : kNone,
                                    sequence.channel,
                                    sequence.position};
  if (rows != 0 && !scores(sequence)) write_row(state, slot, row, start + sequence.query - 1, sequence.length);
}

// Decodes first, then prompt chunks, each by arrival. Sets the header's counts.
template <class Exec>
BLINK_FN void write_works(const Exec& exec, State& state) {
  const auto sequence_at = [&](uint32_t i) -> const Sequence& { return state.sequences[state.order[i]]; };
  const auto decodes = [&](uint32_t i) -> uint64_t { return is_decode(sequence_at(i)); };
  const auto has_chunk = [&](uint32_t i) {
    return sequence_at(i).status == Status::kRunning && !is_decode(sequence_at(i)) && sequence_at(i).query > 0;
  };
  const uint32_t decode_count = static_cast<uint32_t>(exec.scan(state.live, decodes, [&](uint32_t i, uint64_t at) {
    const uint32_t index = static_cast<uint32_t>(at);
    if (decodes(i)) write_work(state, state.order[i], index, index, index);
  }));
  // Three counts in one scan: works in the low 16 bits, rows in the next 16, tokens above.
  const auto share = [&](uint32_t i) -> uint64_t {
    if (!has_chunk(i)) return 0;
    return uint64_t{sequence_at(i).query} << 32 | uint64_t{rows_of(sequence_at(i))} << 16 | 1;
  };
  const uint64_t sum = exec.scan(state.live, share, [&](uint32_t i, uint64_t before) {
    if (!has_chunk(i)) return;
    const uint32_t index = decode_count + static_cast<uint32_t>(before & 0xFFFF);
    const uint32_t row = decode_count + static_cast<uint32_t>(before >> 16 & 0xFFFF);
    write_work(state, state.order[i], index, decode_count + static_cast<uint32_t>(before >> 32), row);
  });
  exec.leader([&] {
    state.header.decode_works = decode_count;
    state.header.works = decode_count + static_cast<uint32_t>(sum & 0xFFFF);
    state.header.rows = decode_count + static_cast<uint32_t>(sum >> 16 & 0xFFFF);
    state.header.tokens = decode_count + static_cast<uint32_t>(sum >> 32);
  });
}

BLINK_FN uint32_t pieces_of(uint32_t whole, uint32_t piece) { return (whole + piece - 1) / piece; }

// Enters a work's `count` tiles from `base` on, each over `span` positions or tokens.
BLINK_FN void write_tiles_of(layout::Tile* tiles, uint32_t work, uint32_t base, uint32_t count, uint32_t span) {
  for (uint32_t t = 0; t < count; ++t) tiles[base + t] = layout::Tile{work, t * span, base, count};
}

// KV positions of a decode tile: the contexts shared out evenly, so that one long context does not keep one
// multiprocessor busy while the others are done. With n works of c positions in all, ceil(c / spare) positions a tile
// make at most n + spare tiles. (Rounding up twice is rounding up once, and saves a division of 64 bits.)
BLINK_FN uint32_t decode_span_of(uint64_t positions, uint32_t works) {
  const uint32_t spare = works * 2 > layout::SPARE_TILES ? works * 2 : layout::SPARE_TILES;
  const auto steps = static_cast<uint32_t>((positions + layout::DECODE_TILE_STEP - 1) / layout::DECODE_TILE_STEP);
  return pieces_of(steps, spare) * layout::DECODE_TILE_STEP;
}

// The attention work list, one part for the decodes and one for the chunks.
template <class Exec>
BLINK_FN void write_tiles(const Exec& exec, State& state) {
  const uint32_t decodes = state.header.decode_works;
  const uint32_t chunks = state.header.works - decodes;
  const layout::Work* works = state.works;
  const uint64_t positions =
      exec.scan(decodes, [&](uint32_t w) -> uint64_t { return works[w].context_tokens; }, [](uint32_t, uint64_t) {});
  const uint32_t span = decode_span_of(positions, decodes);
  const auto decode_count = [&](uint32_t w) -> uint64_t { return pieces_of(works[w].context_tokens, span); };
  const uint64_t decode_tiles = exec.scan(decodes, decode_count, [&](uint32_t w, uint64_t base) {
    write_tiles_of(state.decode_tiles, w, static_cast<uint32_t>(base), static_cast<uint32_t>(decode_count(w)), span);
  });
  const auto chunk_count = [&](uint32_t k) -> uint64_t {
    return pieces_of(works[decodes + k].query_tokens, layout::CHUNK_TILE);
  };
  const uint64_t chunk_tiles = exec.scan(chunks, chunk_count, [&](uint32_t k, uint64_t base) {
    write_tiles_of(state.chunk_tiles, decodes + k, static_cast<uint32_t>(base), static_cast<uint32_t>(chunk_count(k)),
                   layout::CHUNK_TILE);
  });
  exec.leader([&] {
    state.header.decode_tiles = static_cast<uint32_t>(decode_tiles);
    state.header.decode_span = span;
    state.header.chunk_tiles = static_cast<uint32_t>(chunk_tiles);
    state.decode_positions = positions;
  });
}

// Position and KV slot of a step's token. `blocks`: the sequence's row of the block table.
BLINK_FN void write_place(State& state, uint32_t at, uint32_t position, const int32_t* blocks) {
  const auto block = static_cast<uint32_t>(blocks[position / state.config.block_tokens]);
  state.positions[at] = static_cast<int32_t>(position);
  state.kv_slots[at] = static_cast<int32_t>(block * state.config.block_tokens + position % state.config.block_tokens);
}

// Token, position and KV slot of the k-th query token of a work.
BLINK_FN void write_token(State& state, const layout::Work& work, uint32_t k) {
  const uint32_t position = work.context_tokens - work.query_tokens + k;
  const uint32_t at = work.query_start + k;
  state.token_ids[at] = static_cast<int32_t>(history_of(state, work.slot)[position]);
  write_place(state, at, position, blocks_of(state, work.slot));
}

template <class Exec>
BLINK_FN void write_tokens(const Exec& exec, State& state) {
  exec.each(state.header.decode_works, [&](uint32_t w) { write_token(state, state.works[w], 0); });
  for (uint32_t w = state.header.decode_works; w < state.header.works; ++w) {
    const layout::Work& work = state.works[w];
    const bool scoring = state.scoring != 0 && scores(state.sequences[work.slot]);
    const uint32_t before = work.context_tokens - work.query_tokens;
    exec.each(work.query_tokens, [&](uint32_t k) {
      write_token(state, work, k);
      if (scoring) write_row(state, work.slot, work.row + k, work.query_start + k, before + k + 1);
    });
  }
  const uint32_t padding = state.header.bucket - state.header.tokens;
  exec.each(padding, [&](uint32_t k) {
    const uint32_t at = state.header.tokens + k;
    state.token_ids[at] = 0;
    state.positions[at] = 0;
    state.kv_slots[at] = static_cast<int32_t>(layout::SCRATCH_BLOCK * state.config.block_tokens);
  });
}

BLINK_FN uint32_t bucket_for(const State& state, uint32_t tokens) {
  if (tokens == 0) return 0;
  uint32_t b = 0;
  while (b + 1 < state.config.bucket_count && state.config.buckets[b] < tokens) ++b;
  return state.config.buckets[b];
}

template <class Exec, class Launch>
BLINK_FN void emit(const Exec& exec, State& state, Launch launch) {
  allocate_blocks(exec, state);
  write_works(exec, state);
  exec.leader([&] {
    layout::StepHeader& header = state.header;
    header.bucket = bucket_for(state, header.tokens);
    header.live = state.live;
    header.step = state.counters.steps + (header.tokens > 0);
    state.counters.steps = header.step;
    launch(header);
  });
  write_tiles(exec, state);
  write_tokens(exec, state);
}

}  // namespace blink
