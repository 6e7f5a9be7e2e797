// Sampling of one token for each row of logits: temperature, then top-k, then top-p, then one draw.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "simd.h"

namespace blink {
namespace {

constexpr float kGreedyBelow = 1e-3f;  // lower temperatures are greedy: the difference is beyond float32

// The first fields of layout::SampleRow.
struct RowView {
  uint32_t token_index, slot, position, top_k;
  float temperature, top_p;
  uint64_t seed;
};

struct Candidate {
  float weight;
  int32_t token;
};

// Heavier first; equal weights by token, so that the order is total.
bool heavier(const Candidate& a, const Candidate& b) {
  return a.weight > b.weight || (a.weight == b.weight && a.token < b.token);
}

// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11).
void philox(uint32_t counter[4], uint32_t key0, uint32_t key1) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * counter[0];
    const uint64_t b = uint64_t{0xCD9E8D57u} * counter[2];
    const uint32_t next[4] = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key0, static_cast<uint32_t>(b),
                              static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key1, static_cast<uint32_t>(a)};
    std::copy(next, next + 4, counter);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
}

// Uniform in [0, 1), 53 bits, keyed by (seed, position) alone: the same draw in any batch.
double uniform(uint64_t seed, uint32_t position) {
  uint32_t counter[4] = {position, 0, 0, 0};
  philox(counter, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
  const uint64_t bits = (uint64_t{counter[0]} << 32 | counter[1]) >> 11;
  return static_cast<double>(bits) * 0x1p-53;
}

// Index of the largest logit, the first of equals, NaN never; -1 when there is none above minus infinity.
int32_t best_token(const float* logits, int64_t vocab) {
  float best = -std::numeric_limits<float>::infinity();
  int32_t token = -1;
  for (int64_t i = 0; i < vocab; ++i) {
    if (logits[i] > best) {
      best = logits[i];
      token = static_cast<int32_t>(i);
    }
  }
  return token;
}

// weights[i] = exp((logits[i] - top) / temperature), 0 for NaN.
BLINK_CLONES void weigh(const float* logits, int64_t vocab, float top, float temperature, float* weights) {
  const float inverse = 1.0f / temperature;
  int64_t i = 0;
  for (; i + kLanes <= vocab; i += kLanes) {
    Floats x;
    load(logits + i, x);
    x = (x - top) * inverse;
    x = x <= 0.0f ? x : Floats{} - 100.0f;  // NaN compares false
    exp_negative(x);
    store(weights + i, x);
  }
  for (; i < vocab; ++i) {
    const float x = (logits[i] - top) * inverse;
    weights[i] = x <= 0.0f && x >= -87.0f ? std::exp(x) : 0.0f;
  }
}

int32_t draw_in_order(const std::vector<float>& weights, double u) {
  double total = 0;
  for (float weight : weights) total += static_cast<double>(weight);
  const double target = u * total;
  double sum = 0;
  int32_t last = -1;
  for (size_t i = 0; i < weights.size(); ++i) {
    if (weights[i] <= 0.0f) continue;
    sum += static_cast<double>(weights[i]);
    last = static_cast<int32_t>(i);
    if (sum > target) break;
  }
  return last;
}

// How many of the heaviest candidates, sorted in place as far as needed, hold `share` of the total weight.
size_t nucleus(std::vector<Candidate>& candidates, double total, double share) {
  double sum = 0;
  size_t sorted = 0;
  for (size_t chunk = 64; sorted < candidates.size(); chunk *= 8) {
    const size_t end = std::min(candidates.size(), sorted + chunk);
    const auto begin = candidates.begin() + static_cast<std::ptrdiff_t>(sorted);
    std::partial_sort(begin, candidates.begin() + static_cast<std::ptrdiff_t>(end), candidates.end(), heavier);
    for (; sorted < end; ++sorted) {
      sum += static_cast<double>(candidates[sorted].weight);
      if (sum >= share * total) return sorted + 1;
    }
  }
  return candidates.size();
}

int32_t draw_truncated(const std::vector<float>& weights, const RowView& row, double u) {
  std::vector<Candidate> candidates;
  candidates.reserve(weights.size());
  for (size_t i = 0; i < weights.size(); ++i) {
    if (weights[i] > 0.0f) candidates.push_back({weights[i], static_cast<int32_t>(i)});
  }
  if (row.top_k != 0 && row.top_k < candidates.size()) {
    std::nth_element(candidates.begin(), candidates.begin() + row.top_k, candidates.end(), heavier);
    candidates.resize(row.top_k);
  }
  double total = 0;
  for (const Candidate& candidate : candidates) total += static_cast<double>(candidate.weight);
  if (row.top_p < 1.0f) candidates.resize(nucleus(candidates, total, static_cast<double>(row.top_p)));
  // By token, so that the draw does not depend on how far the candidates were sorted.
  std::sort(candidates.begin(), candidates.end(),
            [](const Candidate& a, const Candidate& b) { return a.token < b.token; });
  total = 0;
  for (const Candidate& candidate : candidates) total += static_cast<double>(candidate.weight);
  double sum = 0;
  for (const Candidate& candidate : candidates) {
    sum += static_cast<double>(candidate.weight);
    if (sum > u * total) return candidate.token;
  }
  return candidates.back().token;
}

int32_t sample(const float* logits, int64_t vocab, const RowView& row) {
  const int32_t best = best_token(logits, vocab);
  if (best < 0 || !(row.temperature >= kGreedyBelow) || row.top_k == 1) return best;
  if (std::isinf(logits[best])) return best;
  std::vector<float> weights(static_cast<size_t>(vocab));
  weigh(logits, vocab, logits[best], row.temperature, weights.data());
  const double u = uniform(row.seed, row.position);
  if (row.top_k == 0 && row.top_p >= 1.0f) return draw_in_order(weights, u);
  return draw_truncated(weights, row, u);
}

}  // namespace
}  // namespace blink

extern "C" {

// logits: [count][vocab]; `rows` are records of `row_bytes` that begin with a RowView; tokens: [count], -1 where a
// row holds no number above minus infinity.
BLINK_EXPORT void blink_sample(const float* logits, int64_t vocab, const void* rows, int64_t count, int64_t row_bytes,
                               int32_t* tokens) {
#pragma omp parallel for schedule(dynamic, 1) if (count > 1)
  for (int64_t r = 0; r < count; ++r) {
    blink::RowView row;
    memcpy(&row, static_cast<const char*>(rows) + r * row_bytes, sizeof(row));
    tokens[r] = blink::sample(logits + r * vocab, vocab, row);
  }
}

BLINK_EXPORT void blink_philox(uint32_t* counter, uint32_t key0, uint32_t key1) { blink::philox(counter, key0, key1); }

BLINK_EXPORT double blink_uniform(uint64_t seed, uint32_t position) { return blink::uniform(seed, position); }

}  // extern "C"
