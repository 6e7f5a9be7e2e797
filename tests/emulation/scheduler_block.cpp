// The scheduler's step as the GPU runs it, on emulated threads, behind the host library's interface.
#include "fibers.h"

// After the emulation of CUDA. All of the host's interface but the step itself is taken as it is.
#define blink_scheduler_step blink_scheduler_step_on_host
#include "scheduler/host.cpp"
#undef blink_scheduler_step
#include "scheduler/hot_state.cuh"

namespace {

constexpr uint32_t kThreads = 320;

blink::ColdArrays cold_arrays(State& state) {
  return {&state,
          state.sequences,
          state.channels,
          state.order,
          state.free_slots,
          state.config.max_sequences,
          state.config.channels};
}

}  // namespace

extern "C" BLINK_EXPORT void blink_scheduler_step(blink_scheduler* scheduler, uint64_t now_ns, uint32_t command) {
  static fibers::Block block(kThreads, 7);
  static blink::BlockScratch scratch;
  State& state = scheduler->state;
  const blink::ColdArrays cold = cold_arrays(state);
  const uint32_t bytes = blink::hot_bytes(state.config.max_sequences, state.config.channels);
  std::vector<uint4> shared((bytes + 15) / 16, uint4{~0u, ~0u, ~0u, ~0u});  // shared memory begins with anything
  block.run([&] {
    const auto launch = [](const blink::layout::StepHeader&) {};
    blink::device_step(blink::BlockExec{&scratch}, cold, reinterpret_cast<uint8_t*>(shared.data()), now_ns,
                       static_cast<blink::layout::Command>(command), launch);
  });
}
