// The prefix cache: sequences whose first tokens are the same share the blocks with their KV, also one after the other.
#pragma once
#include "scheduler/idle_blocks.h"

namespace blink {

// Whether a sequence goes on in the indexed block that was found for its k-th one, after that for the one before.
BLINK_FN bool continues(const State& state, uint32_t slot, uint32_t first, uint32_t k) {
  const uint32_t block = state.matches[k];
  if (block == kNoBlock) return false;
  const CachedBlock& cached = state.cached[block];
  if (k == 0) return cached.parent == kNoBlock && cached.salt == state.prefixes[slot].salt;
  const uint32_t parent = k == first ? static_cast<uint32_t>(blocks_of(state, slot)[k - 1]) : state.matches[k - 1];
  return parent != kNoBlock && cached.parent == parent && cached.parent_generation == state.cached[parent].generation;
}

// Looks the blocks of a sequence up, from the `first` one to before `end`; those before are indexed. Returns the number
// of its leading blocks that are: `matches` then has those from `first` on. Every block is looked for at once.
template <class Exec>
BLINK_FN uint32_t match_blocks(const Exec& exec, State& state, uint32_t slot, uint32_t first, uint32_t end) {
  if (end <= first) return first;
  exec.leader([&] { state.matched = end; });
  exec.each(end - first, [&](uint32_t j) { state.matches[first + j] = find_block(state, slot, first + j); });
  const auto breaks = [&](uint32_t j) -> uint64_t { return !continues(state, slot, first, first + j); };
  exec.scan(end - first, breaks, [&](uint32_t j, uint64_t before) {
    if (before == 0 && breaks(j)) state.matched = first + j;
  });
  const uint32_t matched = state.matched;
  exec.barrier();  // all have read it before the next search
  return matched;
}

// Has a sequence hold the indexed block that was found for its k-th one. Returns nothing of the one it held instead.
BLINK_FN void hold_match(State& state, uint32_t slot, uint32_t k) {
  CachedBlock& cached = state.cached[state.matches[k]];
  ++cached.holders;
  cached.idle_at = 0;
  blocks_of(state, slot)[k] = static_cast<int32_t>(state.matches[k]);
}

// Of the found blocks from `first` to before `end`, how many no sequence holds.
template <class Exec>
BLINK_FN uint32_t count_idle(const Exec& exec, State& state, uint32_t first, uint32_t end) {
  const auto idle = [&](uint32_t j) -> uint64_t { return state.cached[state.matches[first + j]].holders == 0; };
  return static_cast<uint32_t>(exec.scan(end - first, idle, [](uint32_t, uint64_t) {}));
}

// Enters the computed blocks of a sequence into the index, up to `end`. Of those that are there already it takes what
// is there and gives its own back.
template <class Exec>
BLINK_FN void index_sequence(const Exec& exec, State& state, uint32_t slot, uint32_t end) {
  find_keys(exec, state, slot, end);
  const uint32_t first = state.prefixes[slot].indexed;
  const uint32_t matched = match_blocks(exec, state, slot, first, end);
  const uint32_t shared = matched - first - count_idle(exec, state, first, matched);
  uint32_t* stack = state.free_blocks + state.free_block_count;
  exec.each(matched - first, [&](uint32_t j) {
    stack[j] = static_cast<uint32_t>(blocks_of(state, slot)[first + j]);
    hold_match(state, slot, first + j);
  });
  exec.each(end - matched, [&](uint32_t j) { link_block(state, slot, matched + j); });
  exec.leader([&] {
    state.free_block_count += matched - first;
    state.held_blocks -= shared;
    state.reserved_blocks -= shared;
    state.prefixes[slot].indexed = end;
  });
}

// The same for all sequences that are to have more blocks indexed than they have: up to `end_of(slot)`, by arrival, of
// the first `most` of them.
template <class Exec, class End>
BLINK_FN void index_blocks(const Exec& exec, State& state, uint32_t most, End end_of) {
  if (!state.config.prefix_cache) return;
  const auto has_more = [&](uint32_t i) -> uint64_t {
    return end_of(state.order[i]) > state.prefixes[state.order[i]].indexed;
  };
  const uint64_t found = exec.scan(state.live, has_more, [&](uint32_t i, uint64_t before) {
    if (has_more(i)) state.listed[before] = state.order[i];
  });
  const uint32_t count = found < most ? static_cast<uint32_t>(found) : most;
  for (uint32_t j = 0; j < count; ++j) index_sequence(exec, state, state.listed[j], end_of(state.listed[j]));
}

// Blocks that a running sequence has filled, so far or of its prompt.
BLINK_FN uint32_t computed_blocks(const State& state, const Sequence& sequence) {
  const bool keeps = sequence.status == Status::kRunning && sequence.finish != arena::Finish::ERROR;
  return keeps ? sequence.computed / state.config.block_tokens : 0;
}

BLINK_FN uint32_t prompt_blocks(const State& state, const Sequence& sequence) {
  const uint32_t prompt = sequence.prompt_tokens / state.config.block_tokens;
  const uint32_t computed = computed_blocks(state, sequence);
  return computed < prompt ? computed : prompt;
}

// Prompts go to the index as they are computed, so that others may share them at once.
template <class Exec>
BLINK_FN void keep_prompts(const Exec& exec, State& state) {
  index_blocks(exec, state, kNone, [&](uint32_t slot) { return prompt_blocks(state, state.sequences[slot]); });
}

// What a sequence has computed, answer included, goes there when it ends.
template <class Exec, class Gone>
BLINK_FN void keep_answers(const Exec& exec, State& state, Gone gone) {
  index_blocks(exec, state, layout::MAX_KEPT_PER_STEP,
               [&](uint32_t slot) { return gone(slot) ? computed_blocks(state, state.sequences[slot]) : 0; });
}

// Blocks of a prompt that may be looked up: its last token is always computed, and so is every token whose
// log-probabilities are wanted.
BLINK_FN uint32_t blocks_to_look_up(const State& state, const Sequence& sequence) {
  if (!state.config.prefix_cache || has_flag(sequence.flags, arena::SubmitFlag::PROMPT_LOGPROBS)) return 0;
  return (sequence.prompt_tokens - 1) / state.config.block_tokens;
}

}  // namespace blink
