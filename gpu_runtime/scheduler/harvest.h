// harvest: takes in the tokens that the step sampled. publish: tells the front ends.
#pragma once
#include "scheduler/table.h"

namespace blink {

BLINK_FN bool is_stop_token(const State& state, const Sequence& sequence, uint32_t token) {
  const bool eos_counts = !has_flag(sequence.flags, arena::SubmitFlag::IGNORE_EOS);
  for (uint32_t i = 0; eos_counts && i < state.config.eos_count; ++i) {
    if (state.config.eos_tokens[i] == token) return true;
  }
  for (uint32_t i = 0; i < sequence.stop_count; ++i) {
    if (sequence.stop_tokens[i] == token) return true;
  }
  return false;
}

// Appends one sampled token and decides whether the sequence goes on.
BLINK_FN void take_token(State& state, uint32_t slot, uint32_t token) {
  Sequence& sequence = state.sequences[slot];
  if (token >= state.config.vocab_size) {
    sequence.finish = arena::Finish::ERROR;
    sequence.error = arena::ErrorCode::BAD_SAMPLE;
    return;
  }
  history_of(state, slot)[sequence.length++] = token;
  if (is_stop_token(state, sequence, token)) {
    sequence.finish = arena::Finish::STOP;
  } else if (sequence.length == sequence.prompt_tokens + sequence.max_tokens) {
    sequence.finish = arena::Finish::LENGTH;
  }
}

// Prompt tokens among those that a work computed.
BLINK_FN uint64_t prompt_tokens_of(const State& state, const layout::Work& work) {
  const Sequence& sequence = state.sequences[work.slot];
  const uint32_t before = sequence.computed;
  const uint32_t after = before + work.query_tokens;
  const uint32_t prompt = sequence.prompt_tokens;
  return (after < prompt ? after : prompt) - (before < prompt ? before : prompt);
}

// Whether the row's token is one of the prompt, which was only scored.
BLINK_FN bool is_known(const State& state, uint32_t r) {
  return state.scoring != 0 && (state.rows[r].flags & static_cast<uint32_t>(layout::RowFlag::KNOWN)) != 0;
}

// Whether the row is the last one of a sequence that only scores its prompt.
BLINK_FN bool ends_scoring(const State& state, uint32_t r, const Sequence& sequence) {
  return sequence.max_tokens == 0 && state.rows[r].position + 1 == sequence.prompt_tokens;
}

// A row of a known token comes to no token only where the logits are no numbers: that ends the sequence.
BLINK_FN void check_known(State& state, uint32_t r) {
  if (is_known(state, r) && sampled_token(state, r) >= state.config.vocab_size) {
    Sequence& sequence = state.sequences[state.rows[r].slot];
    sequence.finish = arena::Finish::ERROR;  // the same words from any thread
    sequence.error = arena::ErrorCode::BAD_SAMPLE;
  }
}

BLINK_FN void take_row(State& state, uint32_t r) {
  const uint32_t slot = state.rows[r].slot;
  Sequence& sequence = state.sequences[slot];
  const bool known = is_known(state, r);
  if (known && !ends_scoring(state, r, sequence)) return;  // another row of the sequence decides
  if (sequence.finish == arena::Finish::ERROR) return;
  if (known) {
    sequence.finish = arena::Finish::LENGTH;
  } else {
    take_token(state, slot, sampled_token(state, r));
  }
}

template <class Exec>
BLINK_FN void harvest(const Exec& exec, State& state) {
  const uint64_t prompt_tokens = exec.scan(
      state.header.works, [&](uint32_t w) { return prompt_tokens_of(state, state.works[w]); },
      [](uint32_t, uint64_t) {});
  exec.leader([&] { state.counters.prompt_tokens += prompt_tokens; });
  exec.each(state.header.works, [&](uint32_t w) {
    Sequence& sequence = state.sequences[state.works[w].slot];
    sequence.computed += state.works[w].query_tokens;
  });
  if (state.scoring != 0) exec.each(state.header.rows, [&](uint32_t r) { check_known(state, r); });
  exec.each(state.header.rows, [&](uint32_t r) { take_row(state, r); });
}

// Whether nothing is said of a row: all but the first row of a sequence that ended by an error.
BLINK_FN bool is_silent(const State& state, uint32_t r, const Sequence& sequence) {
  return sequence.finish == arena::Finish::ERROR && r > 0 && state.rows[r - 1].slot == state.rows[r].slot;
}

// What a row adds to the counters, in four fields of 16 bits: ends by STOP, LENGTH and ERROR, and sampled tokens.
BLINK_FN uint64_t tally(const State& state, uint32_t r) {
  const Sequence& sequence = state.sequences[state.rows[r].slot];
  if (is_silent(state, r, sequence)) return 0;
  if (is_known(state, r) && sequence.finish != arena::Finish::ERROR) {
    return ends_scoring(state, r, sequence) ? uint64_t{1} << 16 : 0;
  }
  switch (sequence.finish) {
    case arena::Finish::STOP:
      return uint64_t{1} << 48 | 1;
    case arena::Finish::LENGTH:
      return uint64_t{1} << 48 | uint64_t{1} << 16;
    case arena::Finish::ERROR:
      return uint64_t{1} << 32;
    default:
      return uint64_t{1} << 48;
  }
}

inline constexpr uint64_t kEndedMask = 0x0000FFFFFFFFFFFFull;

BLINK_FN void count_finishes(State& state, uint64_t told) {
  state.counters.finished[static_cast<uint32_t>(arena::Finish::STOP)] += told & 0xFFFF;
  state.counters.finished[static_cast<uint32_t>(arena::Finish::LENGTH)] += told >> 16 & 0xFFFF;
  state.counters.finished[static_cast<uint32_t>(arena::Finish::ERROR)] += told >> 32 & 0xFFFF;
  state.counters.generated_tokens += told >> 48;
}

// Takes back what the sequences hold that have ended by themselves; the order is the caller's to compact.
template <class Exec>
BLINK_FN void free_finished(const Exec& exec, State& state) {
  const auto over = [&](uint32_t slot) {
    const Sequence& sequence = state.sequences[slot];
    return sequence.status == Status::kRunning && sequence.finish != arena::Finish::NONE;
  };
  release_blocks(exec, state, over);
  exec.each(state.live, [&](uint32_t i) {
    if (over(state.order[i])) state.sequences[state.order[i]].status = Status::kFree;
  });
}

// The LOGPROB records of all rows, each beside the others.
template <class Exec>
BLINK_FN void publish_logprobs(const Exec& exec, const State& state) {
  exec.each(state.header.rows * layout::MAX_ROW_LOGPROBS, [&](uint32_t i) {
    const uint32_t r = i / layout::MAX_ROW_LOGPROBS;
    const uint32_t k = i % layout::MAX_ROW_LOGPROBS;
    const Sequence& sequence = state.sequences[state.rows[r].slot];
    if (k >= sequence.logprobs || sequence.finish == arena::Finish::ERROR) return;
    const Logprob record = sampled_logprob(state, r, k);
    write_logprob(state, sequence.channel, state.log_at[r] + 1 + k, record);
  });
}

// Records that a row brings.
BLINK_FN uint32_t records_of(const State& state, uint32_t r, const Sequence& sequence) {
  if (sequence.finish == arena::Finish::ERROR) return !is_silent(state, r, sequence);
  return records_per_token(sequence) + ends_scoring(state, r, sequence);
}

// With its first token, the blocks that a sequence was admitted with.
BLINK_FN uint32_t found_blocks(const State& state, uint32_t r, const Sequence& sequence) {
  const bool first = sequence.length == sequence.prompt_tokens + 1;
  if (!state.config.prefix_cache || !first) return 0;
  const uint32_t found = state.prefixes[state.rows[r].slot].found;
  return found < kMostFound ? found : kMostFound;
}

// What a row's first record says; its LOGPROB records follow.
BLINK_FN Record record_of(const State& state, uint32_t r, const Sequence& sequence) {
  using arena::RecordKind;
  if (sequence.finish == arena::Finish::ERROR) {
    return {RecordKind::END, sequence.finish, sequence.error, sequence.position, 0};
  }
  if (is_known(state, r)) {
    const uint32_t token = history_of(state, state.rows[r].slot)[state.rows[r].position];
    return {RecordKind::PROMPT_TOKEN, arena::Finish::NONE, arena::ErrorCode::NONE, sequence.position, token};
  }
  return {RecordKind::TOKEN, sequence.finish,         sequence.error,
          sequence.position, sampled_token(state, r), found_blocks(state, r, sequence)};
}

BLINK_FN void publish_row(State& state, uint32_t r, const Sequence& sequence, uint32_t rank) {
  if (is_silent(state, r, sequence)) return;
  const uint64_t at = state.channels[sequence.channel].log_next + rank;
  if (sequence.logprobs != 0) state.log_at[r] = at;
  write_record(state, sequence.channel, at, record_of(state, r, sequence));
  if (sequence.finish == arena::Finish::ERROR || !ends_scoring(state, r, sequence)) return;
  const Record end{arena::RecordKind::END, sequence.finish, sequence.error, sequence.position, 0};
  write_record(state, sequence.channel, at + records_per_token(sequence), end);
}

template <class Exec>
BLINK_FN void publish(const Exec& exec, State& state) {
  const auto sequence_at = [&](uint32_t r) -> const Sequence& { return state.sequences[state.rows[r].slot]; };
  const auto channel_of = [&](uint32_t r) { return sequence_at(r).channel; };
  const auto records = [&](uint32_t r) -> uint32_t { return records_of(state, r, sequence_at(r)); };
  exec.rank(state.header.rows, state.config.channels, state.counts, channel_of, records,
            [&](uint32_t r, uint32_t rank) { publish_row(state, r, sequence_at(r), rank); });
  if (state.header.logprobs != 0) publish_logprobs(exec, state);
  exec.each(state.config.channels, [&](uint32_t c) { state.channels[c].log_next += state.counts[c]; });
  const uint64_t told =
      exec.scan(state.header.rows, [&](uint32_t r) { return tally(state, r); }, [](uint32_t, uint64_t) {});
  exec.leader([&] { count_finishes(state, told); });
  const bool ended = (told & kEndedMask) != 0;
  if (ended) free_finished(exec, state);
  const uint64_t ending = exec.scan(
      state.config.channels, [&](uint32_t c) -> uint64_t { return state.channels[c].ending; },
      [](uint32_t, uint64_t) {});
  if (ending != 0) {
    flush_ending(exec, state);
  } else if (ended) {
    compact_order(exec, state);
  }
}

}  // namespace blink
