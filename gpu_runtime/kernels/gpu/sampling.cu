// Sampling on the GPU: `kernels/sampling_core.h`, one block for each row of the grid.
#include "kernels/gpu/block_row.cuh"
#include "kernels/sampling_core.h"
#include "scheduler/layout.h"

using blink::layout::SampleRow;
using blink::layout::StepHeader;

// logits: [grid][vocab]; rows, sampled: [max_running]. Blocks beyond the plan's rows do nothing.
extern "C" __global__ void __launch_bounds__(blink::sampling::kThreads, 1)
    blink_sample_rows(const StepHeader* header, const SampleRow* rows, const float* logits, uint32_t vocab,
                      int32_t* sampled) {
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (blockIdx.x >= header->rows) return;
  __shared__ blink::sampling::RowScratch row_scratch;
  __shared__ blink::sampling::Scratch scratch;
  const SampleRow row = rows[blockIdx.x];
  const float* own = logits + uint64_t{blockIdx.x} * vocab;
  const int32_t token = blink::sampling::sample(blink::sampling::BlockRow{&row_scratch}, scratch, own, vocab, row);
  if (threadIdx.x == 0) sampled[blockIdx.x] = token;
}
