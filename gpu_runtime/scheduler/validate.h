// Checks of a submission. The front end may be broken or hostile: nothing of a record is used as an index, a count
// or a float before it passed here.
#pragma once
#include "scheduler/state.h"

namespace blink {

BLINK_FN bool finite(float value) { return value - value == 0.0f; }

BLINK_FN bool within(float value, float low, float high) { return finite(value) && value >= low && value <= high; }

BLINK_FN bool penalties_are_sane(const arena::SubmitRecord& record) {
  constexpr float most = static_cast<float>(arena::MAX_PENALTY);
  return within(record.repetition_penalty, 0.0f, static_cast<float>(arena::MAX_REPETITION_PENALTY)) &&
         within(record.presence_penalty, -most, most) && within(record.frequency_penalty, -most, most);
}

BLINK_FN bool sampling_is_sane(const arena::SubmitRecord& record) {
  return within(record.temperature, 0.0f, static_cast<float>(arena::MAX_TEMPERATURE)) &&
         within(record.top_p, 0.0f, 1.0f) && record.top_p > 0.0f && within(record.min_p, 0.0f, 1.0f) &&
         penalties_are_sane(record);
}

BLINK_FN bool stops_are_sane(const arena::SubmitRecord& record, uint32_t vocab_size) {
  if (record.stop_count > arena::MAX_STOP_TOKENS) return false;
  for (uint32_t i = 0; i < record.stop_count; ++i) {
    if (record.stop_tokens[i] >= vocab_size) return false;
  }
  return true;
}

BLINK_FN bool flags_are_sane(const arena::SubmitRecord& record) { return (record.flags & ~arena::kSubmitFlagAll) == 0; }

// KV positions that the sequence can come to need: its last token is never computed.
BLINK_FN uint64_t positions_needed(uint64_t prompt_tokens, uint64_t max_tokens) {
  return prompt_tokens + max_tokens - 1;
}

BLINK_FN bool scores_prompt(const arena::SubmitRecord& record) {
  return has_flag(record.flags, arena::SubmitFlag::PROMPT_LOGPROBS);
}

// A token and its log-probabilities must fit into an empty token log, with the END record where one must follow.
BLINK_FN bool logprobs_are_sane(const State& state, const arena::SubmitRecord& record) {
  if (record.logprobs == 0) return !scores_prompt(record);
  const uint32_t top = record.logprobs - 1;
  return top <= arena::MAX_TOP_LOGPROBS && top <= state.config.vocab_size &&
         record.logprobs + (record.max_tokens == 0) < state.config.log_slots;
}

// The bias entries but for their content.
BLINK_FN bool bias_is_sane(const State& state, const arena::SubmitRecord& record) {
  const uint64_t words = uint64_t{record.bias_count} * 2;
  const bool allow_only = has_flag(record.flags, arena::SubmitFlag::ALLOW_ONLY);
  if (record.bias_count == 0) return !allow_only;
  return record.bias_count <= arena::MAX_BIAS && record.bias_offset + words <= state.config.heap_tokens;
}

// The words of banned sequences but for their content; they stand behind the bias entries.
BLINK_FN bool bans_are_sane(const State& state, const arena::SubmitRecord& record) {
  const uint64_t end = uint64_t{record.bias_offset} + uint64_t{record.bias_count} * 2 + record.ban_words;
  return record.ban_words <= arena::MAX_BAN_WORDS && end <= state.config.heap_tokens;
}

BLINK_FN bool bias_value_is_sane(float value) { return finite(value) || value < 0.0f; }

// What is checked after the prompt's tokens and before the bias entries' content, in the order of ErrorCode.
BLINK_FN arena::ErrorCode check_late(const State& state, const arena::SubmitRecord& record) {
  using arena::ErrorCode;
  if (record.min_tokens > record.max_tokens) return ErrorCode::BAD_MIN_TOKENS;
  if (!logprobs_are_sane(state, record)) return ErrorCode::BAD_LOGPROBS;
  if (!bias_is_sane(state, record)) return ErrorCode::BAD_BIAS;
  return ErrorCode::NONE;
}

// What is checked before the prompt's tokens, in the order of ErrorCode; all sums in 64 bits.
BLINK_FN arena::ErrorCode check_submission(const State& state, const arena::SubmitRecord& record) {
  using arena::ErrorCode;
  const auto& config = state.config;
  const uint64_t prompt = record.prompt_tokens;
  if (!flags_are_sane(record)) return ErrorCode::BAD_FLAGS;
  if (prompt == 0 || record.prompt_offset + prompt > config.heap_tokens) return ErrorCode::BAD_PROMPT_RANGE;
  if (record.max_tokens == 0 && !(scores_prompt(record) && prompt > 1)) return ErrorCode::BAD_MAX_TOKENS;
  if (prompt + record.max_tokens > config.max_model_tokens) return ErrorCode::CONTEXT_LENGTH;
  const uint64_t blocks = blocks_for(state, positions_needed(prompt, record.max_tokens));
  if (blocks > config.blocks - 1 || blocks > config.blocks_per_sequence) return ErrorCode::TOO_LARGE;
  if (!sampling_is_sane(record)) return ErrorCode::BAD_SAMPLING;
  if (!stops_are_sane(record, config.vocab_size)) return ErrorCode::BAD_STOP;
  return ErrorCode::NONE;
}

}  // namespace blink
