// Log-probabilities of a row's token, sampled or known, and of the most likely ones, of the model's own distribution:
// before bias, penalties, bans, temperature and truncation. Written on the executor of `select.h`.
#pragma once
#include "kernels/adjust.h"

namespace blink::sampling {

// Lists the keys of the `count` best tokens in the scratch, in any order. Returns the sum of all weights.
template <class Exec>
BLINK_FN uint64_t list_best(const Selector<Exec>& selector, uint32_t count) {
  const Want want{true, count};
  const uint64_t sum = selector.fill(kNear);
  if (count == 0) return sum;
  Cut cut;
  if (!selector.cut(want, cut)) {
    selector.fill(kFar);
    if (!selector.cut(want, cut)) cut = selector.cut_row(want, Measure{0, 0});
  }
  selector.gather([&](uint64_t key) { return key >= cut.key; });
  return sum;
}

// How many tokens are not less likely than the one with that key, itself included.
template <class Exec>
BLINK_FN uint32_t rank_of(const Exec& exec, const Row& row, uint64_t key) {
  uint64_t above = 0;
  exec.walk(row.logits, row.vocab, [&](uint32_t token, float logit) { above += key_of(logit, token) > key; });
  return static_cast<uint32_t>(exec.sum(above)) + 1;
}

// Fills `out` for the row's token: its own log-probability and those of the how.logprobs - 1 best.
template <class Exec>
BLINK_APART void report(const Exec& exec, Scratch& scratch, const Row& row, uint32_t token, layout::RowLogprobs& out) {
  const float top = logit_of(best_key(exec, row.logits, row.vocab));
  const uint32_t count = row.how.logprobs - 1;
  const Selector<Exec> selector{exec, scratch, row.logits, row.vocab, Scale{top, kOctave}};
  const uint64_t sum = list_best(selector, count);
  // Where the best logit is plus infinity, no distance is a number and the sum stays 0: that token has all the mass.
  const double weights = static_cast<double>(sum < kFullWeight ? kFullWeight : sum) * 0x1p-40;
  const double log_sum = log(weights);
  const auto logprob = [&](float logit) {
    const double below = logit == top ? 0.0 : static_cast<double>(logit) - static_cast<double>(top);
    return static_cast<float>(is_nan(logit) ? static_cast<double>(minus_infinity()) : below - log_sum);
  };
  exec.each(count, [&](uint32_t i) {
    const uint64_t key = scratch.list[i];
    uint32_t place = 1;
    for (uint32_t k = 0; k < count; ++k) place += scratch.list[k] > key;
    out.tokens[place] = token_of(key);
    out.logprobs[place] = logprob(logit_of(key));
  });
  const uint32_t rank = rank_of(exec, row, key_of(row.logits[token], token));
  exec.each(1, [&](uint32_t) {
    out.tokens[0] = token;
    out.logprobs[0] = logprob(row.logits[token]);
    out.rank = rank;
  });
}

// The token of a row that samples, or -1 when there is none.
template <class Exec>
BLINK_FN int32_t sampled_of(const Exec& exec, Scratch& scratch, const Row& row) {
  const bool extras = row.has(layout::RowFlag::EXTRAS);
  if (extras) adjust(exec, scratch, row);
  const float* logits = extras ? row.adjusted : row.logits;
  return sample(exec, scratch, logits, row.vocab, row.how, extras ? row.extras->min_p : 0.0f);
}

// The known token of a row, or -1 when no logit is a number above minus infinity.
template <class Exec>
BLINK_FN int32_t known_of(const Exec& exec, const Row& row) {
  const uint32_t token = row.history[row.how.position];
  return best_key(exec, row.logits, row.vocab) == 0 || token >= row.vocab ? -1 : static_cast<int32_t>(token);
}

// The token of a row, sampled or known, with its log-probabilities if it asks for them; or -1.
template <class Exec>
BLINK_FN int32_t sample_row(const Exec& exec, Scratch& scratch, const Row& row, layout::RowLogprobs* out) {
  const int32_t token = row.has(layout::RowFlag::KNOWN) ? known_of(exec, row) : sampled_of(exec, scratch, row);
  if (row.how.logprobs != 0 && token >= 0) report(exec, scratch, row, static_cast<uint32_t>(token), *out);
  return token;
}

}  // namespace blink::sampling
