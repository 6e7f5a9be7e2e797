// Sampling on the host: `sampling_core.h`, row by row. Compiled with -ffp-contract=off, see there.
#include <memory>

#include "kernels/host_row.h"
#include "kernels/sampling_core.h"
#include "kernels/simd.h"

namespace blink::sampling {
namespace {

// `flatten` brings the whole core into each clone, so that it takes the clone's instruction set.
BLINK_CLONES __attribute__((flatten)) int32_t sample_row(const HostRow& exec, Scratch& scratch, const float* logits,
                                                         uint32_t vocab, const layout::SampleRow& row) {
  return sample(exec, scratch, logits, vocab, row);
}

}  // namespace
}  // namespace blink::sampling

extern "C" {

// logits: [count][vocab]; rows: [count]; tokens: [count], -1 where a row holds no number above minus infinity.
BLINK_EXPORT void blink_sample(const float* logits, int64_t vocab, const blink::layout::SampleRow* rows, int64_t count,
                               int32_t* tokens) {
#pragma omp parallel if (count > 1)
  {
    const blink::sampling::HostRow exec;
    const auto scratch = std::make_unique<blink::sampling::Scratch>();
#pragma omp for schedule(dynamic, 1)
    for (int64_t r = 0; r < count; ++r) {
      tokens[r] =
          blink::sampling::sample_row(exec, *scratch, logits + r * vocab, static_cast<uint32_t>(vocab), rows[r]);
    }
  }
}

BLINK_EXPORT void blink_philox(uint32_t* counter, uint32_t key0, uint32_t key1) { blink::philox(counter, key0, key1); }

BLINK_EXPORT double blink_uniform(uint64_t seed, uint32_t position) {
  return static_cast<double>(blink::random_bits(seed, position)) * 0x1p-53;
}

// A token's weight for a distance of so many octaves below the best one, in units of 2^-40.
BLINK_EXPORT uint64_t blink_sampling_weight(float octaves) { return blink::sampling::weight_of(octaves); }

}  // extern "C"
