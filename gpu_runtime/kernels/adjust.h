// What a submission changes about the logits before one is drawn: bias, allowed tokens, penalties, masked stop tokens,
// ends of banned sequences. Written on the executor of `select.h`.
#pragma once
#include "blink_proto/arena.h"
#include "kernels/sampling_core.h"

namespace blink::sampling {

// What belongs to one row of logits.
struct Row {
  const float* logits;  // [vocab]
  uint32_t vocab;
  layout::SampleRow how;
  const layout::SampleExtras* extras;  // of the row's slot, like the rest
  const layout::BiasEntry* bias;       // [extras->bias_count]
  const layout::BanToken* bans;        // [extras->ban_words]
  const uint32_t* history;             // [how.position], and the row's own token where it is KNOWN
  float* adjusted;                     // [vocab] room for the changed logits

  BLINK_FN bool has(layout::RowFlag flag) const { return (how.flags & static_cast<uint32_t>(flag)) != 0; }
};

// A token's logit after the bias. Every change starts from here, so that threads that meet the same token in the
// history write the same value.
BLINK_FN float biased(const Row& row, uint32_t token) {
  uint32_t low = 0;
  uint32_t high = row.extras->bias_count;
  while (low < high) {
    const uint32_t middle = (low + high) / 2;
    if (row.bias[middle].token < token) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  const bool found = low < row.extras->bias_count && row.bias[low].token == token;
  if (found) return row.logits[token] + row.bias[low].value;
  return row.extras->allow_only ? minus_infinity() : row.logits[token];
}

BLINK_FN float repeated(float logit, float penalty) {
  if (penalty == 1.0f) return logit;
  return logit > 0.0f ? logit / penalty : product(logit, penalty);
}

// Repetition penalty for all tokens of the history, presence and frequency penalty for the generated ones.
template <class Exec>
BLINK_FN void penalise(const Exec& exec, const Row& row) {
  const layout::SampleExtras& extras = *row.extras;
  const uint32_t prompt = extras.prompt_tokens;
  const uint32_t generated = row.how.position - prompt;
  const auto once = [&](uint32_t token, float presence) {
    if (token < row.vocab) row.adjusted[token] = repeated(biased(row, token), extras.repetition_penalty) - presence;
  };
  if (extras.repetition_penalty != 1.0f) {
    exec.each(prompt, [&](uint32_t i) { once(row.history[i], 0.0f); });
    exec.barrier();  // a token of the prompt may have been generated too: that counts
  }
  if (extras.repetition_penalty != 1.0f || extras.presence_penalty != 0.0f) {
    exec.each(generated, [&](uint32_t i) { once(row.history[prompt + i], extras.presence_penalty); });
    exec.barrier();
  }
  if (extras.frequency_penalty != 0.0f) {
    exec.each(generated, [&](uint32_t i) {
      const uint32_t token = row.history[prompt + i];
      if (token < row.vocab) exec.add(&row.adjusted[token], -extras.frequency_penalty);
    });
    exec.barrier();
  }
}

template <class Exec>
BLINK_FN void mask_stops(const Exec& exec, const Row& row) {
  exec.each(row.extras->stop_count, [&](uint32_t i) {
    const uint32_t token = row.extras->stop_tokens[i];
    if (token < row.vocab) row.adjusted[token] = minus_infinity();
  });
  exec.barrier();
}

// Forbids the last token of each banned sequence whose others are those generated last. All tokens of all sequences are
// compared at once, so that neither long sequences nor many take longer; the scratch's bins, free until a token is
// drawn, lend each a word.
template <class Exec>
BLINK_FN void ban(const Exec& exec, Scratch& scratch, const Row& row) {
  static_assert(arena::MAX_BAN_WORDS <= kBins);
  const uint32_t count = row.extras->ban_words;
  const uint32_t generated = row.how.position - row.extras->prompt_tokens;
  uint32_t* misses = scratch.bins.count;  // by the index of a sequence's last token
  exec.each(count, [&](uint32_t i) { misses[i] = 0; });
  exec.barrier();
  exec.each(count, [&](uint32_t i) {
    const layout::BanToken ban = row.bans[i];
    if (ban.behind == 0) return;
    const bool met = ban.behind <= generated && row.history[row.how.position - ban.behind] == ban.token;
    if (!met) exec.add(&misses[i + ban.behind], 1);
  });
  exec.barrier();
  exec.each(count, [&](uint32_t i) {
    const layout::BanToken ban = row.bans[i];
    if (ban.behind == 0 && ban.token < row.vocab && misses[i] == 0) row.adjusted[ban.token] = minus_infinity();
  });
  exec.barrier();
}

// Fills row.adjusted: allowed tokens and bias, then penalties, then what may not come: stop tokens that are too early,
// and the ends of banned sequences.
template <class Exec>
BLINK_APART void adjust(const Exec& exec, Scratch& scratch, const Row& row) {
  const layout::SampleExtras& extras = *row.extras;
  const bool allow_only = extras.allow_only != 0;
  exec.walk(row.logits, row.vocab,
            [&](uint32_t token, float logit) { row.adjusted[token] = allow_only ? minus_infinity() : logit; });
  exec.barrier();
  exec.each(extras.bias_count, [&](uint32_t i) {
    const layout::BiasEntry entry = row.bias[i];
    if (entry.token < row.vocab) row.adjusted[entry.token] = row.logits[entry.token] + entry.value;
  });
  exec.barrier();
  penalise(exec, row);
  if (row.has(layout::RowFlag::MASK_STOPS)) mask_stops(exec, row);
  if (extras.ban_words != 0) ban(exec, scratch, row);
}

}  // namespace blink::sampling
