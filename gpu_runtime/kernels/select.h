// Which tokens of a row are its best ones: so many of them, or as many as hold so much of the weight.
//
// The text is read by every thread of a row's block (the host's block has one thread). An executor offers
//   walk(row, size, step)       step(index, value) for this thread's share of the row
//   each(n, f)                  f(i) for this thread's share of n items
//   barrier()                   what was written before is seen by all threads after
//   max(x), sum(x)              over all threads' x, the same result for all
//   scan(n, value, use)         use(i, sum of value(j) for j < i) for every i; returns the sum over all
//   totals(row, size, value)    sum of value(index, logit) over the row, remembered in parts for:
//   locate(row, size, value, target)   the first index whose inclusive sum of value is above target (< the total)
//   add(word, x)                atomic, on memory that the block shares; returns the value before
// Members that return something, and scan, end with a barrier; walk and each do not.
#pragma once
#include "kernels/weights.h"

// A function of its own on the GPU too: what few rows need does not take registers from the rest.
#ifdef __CUDACC__
#define BLINK_APART __host__ __device__ __noinline__
#else
#define BLINK_APART
#endif

namespace blink::sampling {

inline constexpr uint32_t kBinsPerOctave = 32;
inline constexpr uint32_t kBins = 42 * kBinsPerOctave;  // lower weights are 0
inline constexpr uint32_t kEveryBin = 0xFFFFFFFFu;
inline constexpr uint32_t kDigits = 256;
inline constexpr uint32_t kList = 1024;
inline constexpr float kNear = 16.0f;  // octaves below the best token in which most cuts lie
inline constexpr float kFar = 64.0f;

BLINK_FN uint32_t bin_of(float octaves) {
  return static_cast<uint32_t>(static_cast<int32_t>(product(octaves, -static_cast<float>(kBinsPerOctave))));
}

// Sums by bin, shared by the block. A sum is two words because shared memory adds 32 bits at a time.
template <uint32_t N>
struct Histogram {
  uint32_t count[N];
  uint32_t low[N];
  uint32_t high[N];

  template <class Exec>
  BLINK_FN void clear(const Exec& exec) {
    exec.each(N, [&](uint32_t i) { count[i] = low[i] = high[i] = 0; });
    exec.barrier();
  }

  template <class Exec>
  BLINK_FN void add(const Exec& exec, uint32_t bin, uint64_t weight) {
    exec.add(&count[bin], 1);
    const uint32_t addend = static_cast<uint32_t>(weight);
    const uint32_t carry = exec.add(&low[bin], addend) > ~addend;
    const uint32_t above = static_cast<uint32_t>(weight >> 32) + carry;
    if (above != 0) exec.add(&high[bin], above);
  }

  BLINK_FN uint64_t sum(uint32_t bin) const { return uint64_t{high[bin]} << 32 | low[bin]; }
};

// What the threads of a row's block share.
struct Scratch {
  Histogram<kBins> bins;
  Histogram<kDigits> digits;
  uint64_t list[kList];
  uint32_t listed;
  uint32_t crossing;
  uint64_t before;
};

// A share of the row by one of two measures: number of tokens, or sum of weights.
struct Measure {
  uint64_t count;
  uint64_t sum;
};

struct Want {
  bool by_count;
  uint64_t need;

  BLINK_FN uint64_t of(const Measure& measure) const { return by_count ? measure.count : measure.sum; }
};

// The tokens with keys from `key` on, and what they hold.
struct Cut {
  uint64_t key = 0;
  Measure kept{0, 0};
};

// Finds the bin in which the wanted amount is reached, counting from bin 0 on what `above` does not hold yet; `above`
// grows by the bins before it. kNoToken when all bins together do not reach it.
template <class Exec, uint32_t N>
BLINK_FN uint32_t find_crossing(const Exec& exec, Scratch& scratch, const Histogram<N>& bins, const Want& want,
                                Measure& above) {
  const uint64_t have = want.of(above);
  const auto value = [&](uint32_t i) -> uint64_t { return want.by_count ? bins.count[i] : bins.sum(i); };
  const auto other = [&](uint32_t i) -> uint64_t { return want.by_count ? bins.sum(i) : bins.count[i]; };
  const uint64_t all = exec.scan(N, value, [&](uint32_t i, uint64_t before) {
    if (have + before >= want.need || have + before + value(i) < want.need) return;
    scratch.crossing = i;
    scratch.before = before;
  });
  if (have + all < want.need) return kNoToken;
  const uint32_t crossing = scratch.crossing;
  const uint64_t before = scratch.before;
  uint64_t rest = 0;
  exec.each(crossing, [&](uint32_t i) { rest += other(i); });
  rest = exec.sum(rest);
  above.count += want.by_count ? before : rest;
  above.sum += want.by_count ? rest : before;
  return crossing;
}

BLINK_FN uint64_t shifted(uint64_t key, uint32_t shift) { return shift >= 64 ? 0 : key >> shift; }

BLINK_FN uint32_t width_of(uint64_t value) {
  uint32_t width = 0;
  for (; value != 0; value >>= 1) ++width;
  return width;
}

// Goes through the candidates' keys digit by digit, the largest first, until the wanted amount is reached.
// `candidates(f)` calls f(key) for this thread's share; all of them together reach it.
template <class Exec, class Candidates>
BLINK_FN Cut select_key(const Exec& exec, Scratch& scratch, const Scale& scale, const Want& want, Measure above,
                        Candidates candidates) {
  uint64_t high = 0, low = 0;
  candidates([&](uint64_t key) {
    if (key > high) high = key;
    if (~key > low) low = ~key;
  });
  high = exec.max(high);
  low = ~exec.max(low);
  uint32_t shift = width_of(high ^ low);
  uint64_t prefix = shifted(high, shift);
  bool alone = shift == 0;
  while (shift > 0 && !alone) {
    const uint32_t next = shift > 8 ? shift - 8 : 0;
    const uint32_t mask = (1u << (shift - next)) - 1;
    scratch.digits.clear(exec);
    candidates([&](uint64_t key) {
      if (shifted(key, shift) != prefix) return;
      const uint32_t digit = static_cast<uint32_t>(key >> next) & mask;
      scratch.digits.add(exec, mask - digit, weight_of(scale.octaves(logit_of(key))));
    });
    exec.barrier();
    const uint32_t bin = find_crossing(exec, scratch, scratch.digits, want, above);
    prefix = prefix << (shift - next) | (mask - bin);
    alone = scratch.digits.count[bin] == 1;
    shift = next;
    exec.barrier();  // all have read the bin before the next round clears it
  }
  uint64_t key = 0;
  candidates([&](uint64_t each) {
    if (shifted(each, shift) == prefix) key = each;
  });
  key = exec.max(key);
  const uint64_t weight = weight_of(scale.octaves(logit_of(key)));
  return Cut{key, Measure{above.count + 1, above.sum + weight}};
}

// One row under one scale, and its histogram.
template <class Exec>
struct Selector {
  const Exec& exec;
  Scratch& scratch;
  const float* row;
  uint32_t size;
  Scale scale;

  // Fills the bins with the tokens no further than `reach` octaves below the best one; returns the sum of all weights.
  BLINK_APART uint64_t fill(float reach) const {
    scratch.bins.clear(exec);
    uint64_t sum = 0;
    exec.walk(row, size, [&](uint32_t, float logit) {
      const float octaves = scale.octaves(logit);
      const uint64_t weight = weight_of(octaves);
      sum += weight;
      if (weight != 0 && octaves > -reach) scratch.bins.add(exec, bin_of(octaves), weight);
    });
    return exec.sum(sum);
  }

  // The smallest set of best tokens that reaches the wanted amount, by the bins; false when those do not reach it.
  BLINK_APART bool cut(const Want& want, Cut& found) const {
    Measure above{0, 0};
    const uint32_t bin = find_crossing(exec, scratch, scratch.bins, want, above);
    if (bin == kNoToken) return false;
    const uint32_t count = scratch.bins.count[bin];
    if (count > kList) {
      found = cut_row(want, above, bin);
      return true;
    }
    gather([&](uint64_t key) { return is_in(bin, logit_of(key)); });
    found = select_key(exec, scratch, scale, want, above,
                       [&](auto use) { exec.each(count, [&](uint32_t i) { use(scratch.list[i]); }); });
    return true;
  }

  // The same over the row's own tokens: those in a bin, or all, those without weight too.
  BLINK_APART Cut cut_row(const Want& want, const Measure& above, uint32_t bin = kEveryBin) const {
    return select_key(exec, scratch, scale, want, above, [&](auto use) {
      exec.walk(row, size, [&](uint32_t token, float logit) {
        if (bin == kEveryBin || is_in(bin, logit)) use(key_of(logit, token));
      });
    });
  }

  BLINK_FN bool is_in(uint32_t bin, float logit) const {
    const float octaves = scale.octaves(logit);
    return octaves > -kFar && bin_of(octaves) == bin && weight_of(octaves) != 0;
  }

  // Lists the keys that `wanted` takes, in any order; there are at most kList.
  template <class Wanted>
  BLINK_APART void gather(Wanted wanted) const {
    exec.each(1, [&](uint32_t) { scratch.listed = 0; });
    exec.barrier();
    exec.walk(row, size, [&](uint32_t token, float logit) {
      const uint64_t key = key_of(logit, token);
      if (!wanted(key)) return;
      const uint32_t at = exec.add(&scratch.listed, 1);
      if (at < kList) scratch.list[at] = key;
    });
    exec.barrier();
  }
};

// What top-k, then top-p among those, leave of the row.
template <class Exec>
BLINK_FN Cut truncate(const Selector<Exec>& selector, uint32_t top_k, float top_p) {
  for (float reach = kNear;; reach = kFar) {
    const bool last = reach == kFar;
    Cut cut;
    cut.kept.sum = selector.fill(reach);
    // Fewer tokens with a weight than top_k: nothing to cut.
    if (top_k != 0 && !selector.cut(Want{true, top_k}, cut) && !last) continue;
    if (top_p >= 1.0f) return cut;
    if (selector.cut(Want{false, share_of(top_p, cut.kept.sum)}, cut) || last) return cut;
  }
}

}  // namespace blink::sampling
