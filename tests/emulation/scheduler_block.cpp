// The scheduler's step as the GPU runs it, on emulated threads, behind the host library's interface.
#include <cstdlib>
#include <cstring>

#include "fibers.h"

// After the emulation of CUDA. All of the host's interface but the step itself is taken as it is.
#define blink_scheduler_step blink_scheduler_step_on_host
#include "scheduler/host.cpp"
#undef blink_scheduler_step
#include "scheduler/block_exec.cuh"
#include "scheduler/rehearsal.cuh"

namespace {

constexpr uint32_t kThreads = 320;

// Shared memory begins with anything.
template <class T>
void scramble(T& shared) {
  std::memset(static_cast<void*>(&shared), 0xA5, sizeof(shared));
}

}  // namespace

// A rehearsal and then the step, as in the tail of a step graph.
extern "C" BLINK_EXPORT void blink_scheduler_step(blink_scheduler* scheduler, uint64_t now_ns, uint32_t command) {
  static fibers::Block block(kThreads, 7);
  static blink::BlockScratch scratch;
  static blink::Foreseen foreseen;
  static blink::Sink sink;
  scramble(scratch);
  scramble(foreseen);
  block.run([&] {
    const blink::BlockExec exec{&scratch};
    exec.leader([&] { blink::foresee_rehearsal(foreseen, sink); });
    const bool rehearsed = blink::settle(exec, foreseen, [] { return true; }, [] {});
    if (!rehearsed) std::abort();
    blink::step(exec, scheduler->state, now_ns, static_cast<blink::layout::Command>(command));
  });
}
