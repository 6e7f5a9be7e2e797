// Sampling on the GPU: the core of `kernels/`, one block for each row of the grid.
#include "blink_proto/arena.h"
#include "kernels/gpu/block_row.cuh"
#include "kernels/logprobs.h"
#include "scheduler/layout.h"

using namespace blink::layout;

// Arrays by slot: extras [slots], bias [slots][MAX_BIAS], bans [slots][MAX_BAN_WORDS], history [slots][window]. By row:
// rows, sampled, logprobs [max_running]; logits and adjusted (room) [grid][vocab]. Blocks beyond the plan's rows do
// nothing.
extern "C" __global__ void __launch_bounds__(blink::sampling::kThreads, 1)
    blink_sample_rows(const StepHeader* header, const SampleRow* rows, const float* logits, uint32_t vocab,
                      const SampleExtras* extras, const BiasEntry* bias, const BanToken* bans, const uint32_t* history,
                      uint32_t window, float* adjusted, RowLogprobs* logprobs, int32_t* sampled) {
  using namespace blink::sampling;
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const uint32_t r = blockIdx.x;
  if (r >= header->rows) return;
  __shared__ RowScratch row_scratch;
  __shared__ Scratch scratch;
  const SampleRow how = rows[r];
  const uint64_t slot = how.slot;
  const uint64_t start = uint64_t{r} * vocab;
  const Row row{logits + start,
                vocab,
                how,
                extras + slot,
                bias + slot * blink::arena::MAX_BIAS,
                bans + slot * blink::arena::MAX_BAN_WORDS,
                history + slot * window,
                adjusted + start};
  const int32_t token = sample_row(BlockRow{&row_scratch}, scratch, row, logprobs + r);
  if (threadIdx.x == 0) sampled[r] = token;
}
