// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11), a counter-based generator.
#pragma once
#include <cstdint>

#include "scheduler/exec.h"

namespace blink {

BLINK_FN void philox(uint32_t counter[4], uint32_t key0, uint32_t key1) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * counter[0];
    const uint64_t b = uint64_t{0xCD9E8D57u} * counter[2];
    const uint32_t next[4] = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key0, static_cast<uint32_t>(b),
                              static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key1, static_cast<uint32_t>(a)};
    for (int i = 0; i < 4; ++i) counter[i] = next[i];
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
}

// 53 random bits, keyed by (seed, position) alone: the same draw in any batch.
BLINK_FN uint64_t random_bits(uint64_t seed, uint32_t position) {
  uint32_t counter[4] = {position, 0, 0, 0};
  philox(counter, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
  return (uint64_t{counter[0]} << 32 | counter[1]) >> 11;
}

}  // namespace blink
