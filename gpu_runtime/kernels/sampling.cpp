// Sampling on the host: the core, row by row. Compiled with -ffp-contract=off, see `weights.h`.
#include "kernels/sampling.h"

#include <cmath>
#include <memory>
#include <vector>

#include "blink_proto/arena.h"
#include "kernels/host_row.h"
#include "kernels/logprobs.h"
#include "kernels/simd.h"

namespace blink::sampling {
namespace {

// `flatten` brings the whole core into each clone, so that it takes the clone's instruction set.
BLINK_CLONES __attribute__((flatten)) int32_t sample_on_host(const HostRow& exec, Scratch& scratch, const Row& row,
                                                             layout::RowLogprobs* out) {
  return sample_row(exec, scratch, row, out);
}

}  // namespace
}  // namespace blink::sampling

extern "C" {

BLINK_EXPORT void blink_sample(const blink_sample_job* job) {
  using namespace blink::sampling;
  const auto vocab = static_cast<uint32_t>(job->vocab);
#pragma omp parallel if (job->count > 1)
  {
    const HostRow exec;
    const auto scratch = std::make_unique<Scratch>();
    std::vector<float> adjusted;
#pragma omp for schedule(dynamic, 1)
    for (int64_t r = 0; r < job->count; ++r) {
      const uint64_t slot = job->rows[r].slot;
      Row row{job->logits + r * job->vocab, vocab, job->rows[r], nullptr, nullptr, nullptr, nullptr, nullptr};
      if (row.how.flags != 0) {
        adjusted.resize(vocab);
        row.extras = job->extras + slot;
        row.bias = job->bias + slot * blink::arena::MAX_BIAS;
        row.bans = job->bans + slot * blink::arena::MAX_BAN_WORDS;
        row.history = job->history + slot * static_cast<uint64_t>(job->window);
        row.adjusted = adjusted.data();
      }
      job->tokens[r] = sample_on_host(exec, *scratch, row, job->logprobs == nullptr ? nullptr : job->logprobs + r);
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
