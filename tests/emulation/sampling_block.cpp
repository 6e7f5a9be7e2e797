// The GPU's executor of the sampling core on emulated threads, behind the host library's interface.
#include "fibers.h"

// After the emulation of CUDA.
#include <cmath>
#include <cstring>

#include "blink_proto/arena.h"
#include "kernels/gpu/block_row.cuh"
#include "kernels/logprobs.h"
#include "kernels/sampling.h"

extern "C" {

__attribute__((visibility("default"))) void blink_sample(const blink_sample_job* job) {
  using namespace blink::sampling;
  const auto vocab = static_cast<uint32_t>(job->vocab);
  std::vector<float> adjusted(static_cast<size_t>(job->count * job->vocab), NAN);
  fibers::Block block(kThreads, 1);
  for (int64_t r = 0; r < job->count; ++r) {
    const blink::layout::SampleRow how = job->rows[r];
    const uint64_t slot = how.slot;
    const Row row{job->logits + r * job->vocab,
                  vocab,
                  how,
                  job->extras + slot,
                  job->bias + slot * blink::arena::MAX_BIAS,
                  job->bans + slot * blink::arena::MAX_BAN_WORDS,
                  job->history + slot * static_cast<uint64_t>(job->window),
                  adjusted.data() + r * job->vocab};
    static RowScratch row_scratch;
    static Scratch scratch;
    memset(&scratch, 0x5A, sizeof(scratch));  // shared memory begins with anything
    memset(&row_scratch, 0x5A, sizeof(row_scratch));
    block.run([&] {
      const int32_t token = sample_row(BlockRow{&row_scratch}, scratch, row, job->logprobs + r);
      if (threadIdx.x == 0) job->tokens[r] = token;
    });
  }
}

}  // extern "C"
