// Sampling of one token from one row of logits, written once for the host and for the GPU, on the executor of
// `select.h`.
#pragma once
#include "kernels/philox.h"
#include "kernels/select.h"
#include "scheduler/layout.h"

namespace blink::sampling {

inline constexpr float kGreedyBelow = 1e-3f;  // lower temperatures are greedy: the difference is beyond float32

// Token id of the best logit, key and all; 0 when no logit is a number above minus infinity.
template <class Exec>
BLINK_FN uint64_t best_key(const Exec& exec, const float* row, uint32_t size) {
  float best = minus_infinity();
  uint32_t token = kNoToken;
  exec.walk(row, size, [&](uint32_t i, float logit) {
    if (logit > best) {
      best = logit;
      token = i;
    }
  });
  return exec.max(token == kNoToken ? 0 : key_of(best, token));
}

// floor(uniform * total) for the 53-bit uniform of (seed, position).
BLINK_FN uint64_t draw_below(uint64_t total, uint64_t seed, uint32_t position) {
  const uint64_t random = random_bits(seed, position) << 11;
#ifdef __CUDA_ARCH__
  return __umul64hi(random, total);
#else
  return static_cast<uint64_t>(static_cast<unsigned __int128>(random) * total >> 64);
#endif
}

// Weights below are less likely than the share min_p of the best token.
BLINK_FN uint64_t least_weight(float min_p) { return share_of(min_p, kFullWeight); }

template <class Exec, class Value>
BLINK_APART int32_t draw(const Exec& exec, const float* row, uint32_t size, const layout::SampleRow& how, Value value) {
  const uint64_t total = exec.totals(row, size, value);
  return static_cast<int32_t>(exec.locate(row, size, value, draw_below(total, how.seed, how.position)));
}

// The sampled token of a row, or -1 when no logit is a number above minus infinity.
template <class Exec>
BLINK_FN int32_t sample(const Exec& exec, Scratch& scratch, const float* row, uint32_t size,
                        const layout::SampleRow& how, float min_p) {
  const uint64_t best = best_key(exec, row, size);
  if (best == 0) return -1;
  const int32_t greedy = static_cast<int32_t>(token_of(best));
  if (!(how.temperature >= kGreedyBelow) || how.top_k == 1) return greedy;
  const Scale scale{logit_of(best), kOctave / how.temperature};
  if (scale.top == -minus_infinity()) return greedy;  // plus infinity has all the mass
  const bool whole = how.top_k == 0 && how.top_p >= 1.0f;
  if (whole && min_p <= 0.0f) {
    return draw(exec, row, size, how, [=](uint32_t, float logit) { return weight_of(scale.octaves(logit)); });
  }
  const Selector<Exec> selector{exec, scratch, row, size, scale};
  const Cut cut = whole ? Cut{} : truncate(selector, how.top_k, how.top_p);
  const float lowest = cut.key == 0 ? minus_infinity() : logit_of(cut.key);
  const uint64_t least = least_weight(min_p);
  return draw(exec, row, size, how, [=](uint32_t token, float logit) -> uint64_t {
    if (!(logit >= lowest) || key_of(logit, token) < cut.key) return 0;
    const uint64_t weight = weight_of(scale.octaves(logit));
    return weight >= least ? weight : 0;
  });
}

}  // namespace blink::sampling
