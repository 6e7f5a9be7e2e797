// The scheduler's rehearsal as the GPU runs it, on emulated threads, in memory that stands for the device's.
#include <cstring>

#include "fibers.h"

// After the emulation of CUDA.
#include "scheduler/hot_state.cuh"

#define BLINK_EXPORT __attribute__((visibility("default")))

// Whether `count` rehearsals with the ColdArrays at `cold` all took the short way.
extern "C" BLINK_EXPORT int blink_rehearse(const uint8_t* cold_bytes, uint32_t count) {
  static fibers::Block block(320, 3);
  static blink::BlockScratch scratch;
  blink::ColdArrays cold;
  std::memcpy(&cold, cold_bytes, sizeof(cold));
  std::vector<uint4> shared(blink::hot_bytes(cold.max_sequences, cold.channel_count) / 16 + 1,
                            uint4{~0u, ~0u, ~0u, ~0u});
  bool all = true;
  for (uint32_t k = 0; k < count; ++k) {
    block.run([&] {
      const blink::HotState hot(cold, reinterpret_cast<uint8_t*>(shared.data()));
      const auto launch = [](const blink::layout::StepHeader&) {};
      const bool steady = blink::steady_step(blink::BlockExec{&scratch}, hot.state(), 1'700'000'000'000'000'000ull + k,
                                             blink::layout::Command::RUN, launch);
      if (!steady) all = false;
    });
  }
  return all;
}
