// Second half of intake: submissions become waiting sequences.
#pragma once
#include "scheduler/leases.h"
#include "scheduler/validate.h"

namespace blink {

BLINK_FN uint64_t commit_word(const Channel& channel, uint64_t position, uint32_t slots) {
  return arena::CommitWord{1 + rounds_before(position, slots) % 0xFFFFFFFFull, channel.lease}.pack();
}

BLINK_FN const arena::SubmitRecord* submit_slot(const State& state, uint32_t c) {
  return submit_ring(state, c) + (state.channels[c].submit_next & (state.config.submit_slots - 1));
}

BLINK_FN bool submission_is_there(const State& state, uint32_t c) {
  const Channel& channel = state.channels[c];
  const uint64_t expected = commit_word(channel, channel.submit_next, state.config.submit_slots);
  return load_acquire(&submit_slot(state, c)->commit) == expected;
}

// Copies the prompt into the history of a slot; false when a token is not in the vocabulary.
template <class Exec>
BLINK_FN bool copy_prompt(const Exec& exec, State& state, uint32_t c, uint32_t slot, const arena::SubmitRecord& from) {
  const auto* heap = inbound_part<uint32_t>(state, c, state.inbound_layout.channel_heap_offset);
  uint32_t* history = history_of(state, slot);
  const uint64_t bad = exec.scan(
      from.prompt_tokens,
      [&](uint32_t i) -> uint64_t {
        const uint32_t token = load_relaxed(heap + from.prompt_offset + i);
        history[i] = token;
        return token >= state.config.vocab_size;
      },
      [](uint32_t, uint64_t) {});
  return bad == 0;
}

// Copies the bias entries into the row of a slot; false when one is bad. Their order is checked in the copy.
template <class Exec>
BLINK_FN bool copy_bias(const Exec& exec, State& state, uint32_t c, uint32_t slot, const arena::SubmitRecord& from) {
  const auto* heap = inbound_part<uint32_t>(state, c, state.inbound_layout.channel_heap_offset);
  layout::BiasEntry* entries = bias_of(state, slot);
  const uint64_t bad = exec.scan(
      from.bias_count,
      [&](uint32_t i) -> uint64_t {
        const uint32_t token = load_relaxed(heap + from.bias_offset + 2 * i);
        const float value = float_of_bits(load_relaxed(heap + from.bias_offset + 2 * i + 1));
        entries[i] = layout::BiasEntry{token, value};
        return token >= state.config.vocab_size || !bias_value_is_sane(value);
      },
      [](uint32_t, uint64_t) {});
  if (bad != 0) return false;
  const auto falls = [&](uint32_t i) -> uint64_t { return i > 0 && entries[i].token <= entries[i - 1].token; };
  return exec.scan(from.bias_count, falls, [](uint32_t, uint64_t) {}) == 0;
}

// What a word of the copied banned sequences counts: the words of the sequence that it begins, or too much where it is
// not what may stand there. Lengths are told from tokens by a bit, so that each word can be looked at by itself.
BLINK_FN uint64_t words_begun(const layout::BanToken* words, uint32_t count, uint32_t i, uint32_t vocab_size) {
  constexpr uint64_t much = uint64_t{1} << 32;
  const uint32_t word = words[i].token;
  if ((word & arena::BAN_LENGTH) == 0) return i > 0 && word < vocab_size ? 0 : much;
  const uint64_t length = word & ~arena::BAN_LENGTH;
  const uint64_t next = i + 1 + length;
  const bool leads_on = next == count || (next < count && (words[next].token & arena::BAN_LENGTH) != 0);
  return length >= 2 && leads_on ? 1 + length : much;
}

// Copies the banned sequences into the row of a slot; false when a word of them is bad. Where each length leads to the
// next one, from the first word to the end, and all of them together count every word, there is no other.
template <class Exec>
BLINK_FN bool copy_bans(const Exec& exec, State& state, uint32_t c, uint32_t slot, const arena::SubmitRecord& from) {
  const auto* heap = inbound_part<uint32_t>(state, c, state.inbound_layout.channel_heap_offset) + from.bias_offset +
                     uint64_t{from.bias_count} * 2;
  layout::BanToken* words = bans_of(state, slot);
  exec.each(from.ban_words, [&](uint32_t i) { words[i].token = load_relaxed(heap + i); });
  const auto begun = [&](uint32_t i) { return words_begun(words, from.ban_words, i, state.config.vocab_size); };
  const uint64_t counted = exec.scan(from.ban_words, begun, [&](uint32_t i, uint64_t before) {
    words[i].behind = static_cast<uint32_t>(before) - 1 - i;  // its sequence ends where those begun before it do
  });
  if (counted != from.ban_words) return false;
  exec.each(from.ban_words, [&](uint32_t i) {
    if ((words[i].token & arena::BAN_LENGTH) != 0) words[i] = layout::BanToken{kNone, 0};
  });
  return true;
}

BLINK_FN bool wants_extras(const arena::SubmitRecord& record) {
  const bool penalties = record.repetition_penalty != 0.0f && record.repetition_penalty != 1.0f;
  return penalties || record.min_p != 0.0f || record.presence_penalty != 0.0f || record.frequency_penalty != 0.0f ||
         record.bias_count != 0 || record.ban_words != 0 || record.min_tokens != 0;
}

BLINK_FN void write_extras(State& state, uint32_t slot, const arena::SubmitRecord& record) {
  const bool ignore_eos = has_flag(record.flags, arena::SubmitFlag::IGNORE_EOS);
  layout::SampleExtras extras{};
  extras.min_p = record.min_p;
  extras.repetition_penalty = record.repetition_penalty == 0.0f ? 1.0f : record.repetition_penalty;
  extras.presence_penalty = record.presence_penalty;
  extras.frequency_penalty = record.frequency_penalty;
  extras.prompt_tokens = record.prompt_tokens;
  extras.bias_count = record.bias_count;
  extras.ban_words = record.ban_words;
  extras.allow_only = has_flag(record.flags, arena::SubmitFlag::ALLOW_ONLY);
  for (uint32_t i = 0; !ignore_eos && i < state.config.eos_count; ++i) {
    extras.stop_tokens[extras.stop_count++] = state.config.eos_tokens[i];
  }
  for (uint32_t i = 0; i < record.stop_count; ++i) extras.stop_tokens[extras.stop_count++] = record.stop_tokens[i];
  state.extras[slot] = extras;
}

// Whether the i-th sequence in the order waits in a later class.
BLINK_FN bool waits_later(const State& state, uint32_t i, int32_t priority) {
  const Sequence& sequence = state.sequences[state.order[i]];
  return sequence.status == Status::kWaiting && sequence.priority > priority;
}

// Whether a new sequence may not simply be the last one: waiting ones stand by class, behind the running ones, and only
// ending ones may stand anywhere.
BLINK_FN bool may_pass(const State& state, int32_t priority) {
  if (state.live == 0) return false;
  const bool ending = state.sequences[state.order[state.live - 1]].status == Status::kEnding;
  return ending || waits_later(state, state.live - 1, priority);
}

BLINK_FN void start_sequence(State& state, uint32_t c, uint32_t slot, const arena::SubmitRecord& record) {
  Sequence sequence{};
  sequence.status = Status::kWaiting;
  sequence.channel = c;
  sequence.position = state.channels[c].submit_next;
  sequence.prompt_tokens = sequence.length = record.prompt_tokens;
  sequence.max_tokens = record.max_tokens;
  sequence.reserved = blocks_for(state, positions_needed(record.prompt_tokens, record.max_tokens));
  sequence.flags = record.flags;
  sequence.top_k = record.top_k;
  sequence.temperature = record.temperature;
  sequence.top_p = record.top_p;
  sequence.seed = record.seed;
  sequence.logprobs = record.logprobs;
  sequence.min_tokens = record.min_tokens;
  sequence.priority = record.priority;
  sequence.extras = wants_extras(record);
  if (sequence.extras) write_extras(state, slot, record);
  if (state.config.prefix_cache) {
    state.prefixes[slot] = Prefix{record.cache_salt, first_key(state, record.cache_salt), 0, 0, 0};
  }
  sequence.stop_count = static_cast<uint16_t>(record.stop_count);
  for (uint32_t i = 0; i < record.stop_count; ++i) sequence.stop_tokens[i] = record.stop_tokens[i];
  state.sequences[slot] = sequence;
  --state.free_slot_count;
  state.staged.passes = may_pass(state, record.priority);
  if (!state.staged.passes) state.order[state.live++] = slot;
}

// Enters the staged sequence into the order before the first one that waits in a later class.
template <class Exec>
BLINK_FN void enter_by_class(const Exec& exec, State& state) {
  const uint32_t slot = state.staged.slot;
  const int32_t priority = state.staged.record.priority;
  const auto is_later = [&](uint32_t i) -> uint64_t { return waits_later(state, i, priority); };
  const uint64_t later = exec.scan(state.live, is_later, [&](uint32_t i, uint64_t before) {
    const bool shifted = before != 0 || is_later(i);
    state.order_next[i + shifted] = state.order[i];
    if (shifted && before == 0) state.order_next[i] = slot;
  });
  exec.leader([&] {
    if (later == 0) state.order_next[state.live] = slot;
    ++state.live;
    uint32_t* order = state.order;
    state.order = state.order_next;
    state.order_next = order;
  });
}

BLINK_FN void reject(State& state, uint32_t c, arena::ErrorCode error) {
  Channel& channel = state.channels[c];
  const Record record{arena::RecordKind::REJECT, arena::Finish::ERROR, error, channel.submit_next, 0};
  write_record(state, c, channel.log_next++, record);
  ++channel.rejected;
}

// Whether a submission of the channel could be taken now: the table has a slot, and the log a record for a refusal.
BLINK_FN bool can_take(const State& state, const Channel& channel) {
  return channel.live && state.free_slot_count > 0 && log_room_to_spare(state, channel) > 0;
}

// Copies the channel's next submission, if there is one and it need not wait, and checks all but what lies in the heap.
BLINK_FN void stage_submission(State& state, uint32_t c) {
  const Channel& channel = state.channels[c];
  Staged& staged = state.staged;
  staged.present = can_take(state, channel) && submission_is_there(state, c);
  if (!staged.present) return;
  staged.record = copy_record(submit_slot(state, c));
  staged.slot = state.free_slots[state.free_slot_count - 1];
  staged.error = check_submission(state, staged.record);
  staged.late = check_late(state, staged.record);
}

// Copies and checks what the staged submission has in the heap, in the order of ErrorCode with the rest.
template <class Exec>
BLINK_FN arena::ErrorCode copy_staged(const Exec& exec, State& state, uint32_t c) {
  using arena::ErrorCode;
  const Staged& staged = state.staged;
  if (staged.error != ErrorCode::NONE) return staged.error;
  if (!copy_prompt(exec, state, c, staged.slot, staged.record)) return ErrorCode::BAD_TOKEN;
  if (staged.late != ErrorCode::NONE) return staged.late;
  const arena::SubmitRecord& record = staged.record;
  if (record.bias_count != 0 && !copy_bias(exec, state, c, staged.slot, record)) return ErrorCode::BAD_BIAS;
  if (record.ban_words == 0) return ErrorCode::NONE;
  const bool sane = bans_are_sane(state, record) && copy_bans(exec, state, c, staged.slot, record);
  return sane ? ErrorCode::NONE : ErrorCode::BAD_BAN;
}

// What a step's intake has taken, and the prompt tokens that it looked at for that.
struct Taken {
  uint32_t submissions;
  uint64_t tokens;
};

// Takes the channel's next submission, if there is one and it need not wait, and counts it. `taken` is the same on all
// threads.
template <class Exec>
BLINK_FN bool take_submission(const Exec& exec, State& state, uint32_t c, Taken& taken) {
  exec.leader([&] { stage_submission(state, c); });
  const Staged& staged = state.staged;
  const bool present = staged.present != 0;
  const uint32_t tokens = staged.error == arena::ErrorCode::NONE ? staged.record.prompt_tokens : 0;
  const uint32_t slot = staged.slot;
  exec.barrier();  // all have read it before the leader stages the next one
  if (!present) return false;
  ++taken.submissions;
  taken.tokens += tokens;
  const arena::ErrorCode error = copy_staged(exec, state, c);
  exec.leader([&] {
    if (error == arena::ErrorCode::NONE) {
      start_sequence(state, c, staged.slot, staged.record);
    } else {
      reject(state, c, error);
    }
    ++state.channels[c].submit_next;
  });
  if (error != arena::ErrorCode::NONE) return true;
  if (staged.passes) enter_by_class(exec, state);
  if (state.config.prefix_cache) find_keys(exec, state, slot, tokens / state.config.block_tokens);
  return true;
}

// Both are bounded, so that no front end makes a step long for the others.
BLINK_FN bool may_take_more(const State& state, const Taken& taken) {
  return taken.submissions < layout::MAX_INTAKE_PER_STEP && taken.tokens < state.config.intake_tokens;
}

// Round by round over the channels, from a starting channel that moves on by one each step.
template <class Exec>
BLINK_FN void intake(const Exec& exec, State& state) {
  // One look at all channels spares most steps the rounds. What comes later is seen in the next step.
  const auto ready = [&](uint32_t c) -> uint64_t {
    return state.draining == 0 && can_take(state, state.channels[c]) && submission_is_there(state, c);
  };
  Taken taken{0, 0};
  bool found = exec.scan(state.config.channels, ready, [](uint32_t, uint64_t) {}) != 0;
  while (found && may_take_more(state, taken)) {
    found = false;
    for (uint32_t k = 0; k < state.config.channels && may_take_more(state, taken); ++k) {
      const uint32_t c = (state.round_start + k) % state.config.channels;
      found = take_submission(exec, state, c, taken) || found;
    }
  }
  exec.leader([&] { state.round_start = (state.round_start + 1) % state.config.channels; });
}

}  // namespace blink
