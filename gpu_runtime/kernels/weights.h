// The numbers of sampling: an order of tokens, and weights that are integers, e^((logit - top) / temperature) in units
// of 2^-40. Sums of them do not depend on the order of summation, so that one thread and a thousand come to the same
// token, and what is kept by top-p is exact.
#pragma once
#include "scheduler/bits.h"

namespace blink::sampling {

inline constexpr float kOctave = 1.44269504088896341f;  // log2(e)
inline constexpr uint64_t kFullWeight = uint64_t{1} << 40;
inline constexpr uint32_t kNoToken = 0xFFFFFFFFu;
inline constexpr uint32_t kMaxVocabulary = 1u << 23;  // sums of weights stay below 2^63

BLINK_FN float minus_infinity() { return float_of_bits(0xFF800000u); }

// A product that is rounded by itself, never fused with a sum: host and GPU must agree bit by bit.
BLINK_FN float product(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;  // the library is compiled with -ffp-contract=off
#endif
}

BLINK_FN float fused(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

BLINK_FN bool is_nan(float value) { return value != value; }

// Order of tokens: larger logit first, equal ones by id; a NaN counts as minus infinity. No two keys are equal.
BLINK_FN uint64_t key_of(float logit, uint32_t token) {
  const float value = is_nan(logit) ? minus_infinity() : logit + 0.0f;  // -0 becomes +0
  const uint32_t bits = bits_of_float(value);
  const uint32_t ordered = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  return uint64_t{ordered} << 32 | static_cast<uint32_t>(~token);
}

BLINK_FN uint32_t token_of(uint64_t key) { return ~static_cast<uint32_t>(key); }

BLINK_FN float logit_of(uint64_t key) {
  const uint32_t ordered = static_cast<uint32_t>(key >> 32);
  return float_of_bits((ordered & 0x80000000u) != 0 ? ordered & 0x7FFFFFFFu : ~ordered);
}

// From a logit to the octaves by which its token is less likely than the best one: a number <= 0, or NaN.
struct Scale {
  float top;
  float per_logit;

  BLINK_FN float octaves(float logit) const { return product(logit - top, per_logit); }
};

// 2^octaves in units of 2^-40, rounded down; 0 for NaN and below 2^-41. Relative error below 3e-7 plus a unit.
// 2^x on [-1/2, 1/2] is 1 + x * p(x) with p the minimax polynomial of degree 4 (error 1e-7).
BLINK_FN uint64_t weight_of(float octaves) {
  constexpr float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const float x = octaves > -63.0f ? octaves : -63.0f;
  const float rounded = x + magic;
  const float r = x - (rounded - magic);
  float p = 1.326472731307149e-3f;
  p = fused(p, r, 9.671512991189957e-3f);
  p = fused(p, r, 5.550733581185341e-2f);
  p = fused(p, r, 2.4022242426872253e-1f);
  p = fused(p, r, 6.931470036506653e-1f);
  p = fused(p, r, 1.0f);
  const uint32_t mantissa = static_cast<uint32_t>(static_cast<int32_t>(product(p, 16777216.0f)));
  return (uint64_t{mantissa} << 16) >> (bits_of_float(magic) - bits_of_float(rounded));
}

// The smallest integer that is not below share * total.
BLINK_FN uint64_t share_of(float share, uint64_t total) {
  const double wanted = static_cast<double>(share) * static_cast<double>(total);
  const uint64_t whole = static_cast<uint64_t>(wanted);
  const uint64_t need = whole + (static_cast<double>(whole) < wanted);
  return need < 1 ? 1 : need > total ? total : need;
}

}  // namespace blink::sampling
