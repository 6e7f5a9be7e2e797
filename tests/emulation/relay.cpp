// The relay between an arena in host memory and the one that the scheduler looks at, on emulated threads, behind the
// host library's interface: the regions that a caller gives are the front ends' side, the scheduler has its own.
#include <cstdlib>
#include <cstring>
#include <map>

#include "fibers.h"

// After the emulation of CUDA. All of the host's interface but these four is taken as it is.
#define blink_scheduler_create blink_scheduler_create_on_host
#define blink_scheduler_destroy blink_scheduler_destroy_on_host
#define blink_scheduler_step blink_scheduler_step_on_host
#define blink_scheduler_poll blink_scheduler_poll_on_host
#include "scheduler/host.cpp"
#undef blink_scheduler_create
#undef blink_scheduler_destroy
#undef blink_scheduler_step
#undef blink_scheduler_poll
#include "chain/relay.cuh"

namespace {

constexpr uint32_t kThreads = 256;

struct Relay {
  uint8_t* inbound;
  uint8_t* outbound;
  blink::layout::ChainBoard board{};
  uint64_t now_ns = 0;
};

std::map<blink_scheduler*, Relay> relays;

fibers::Block& block() {
  static fibers::Block made(kThreads, 11);
  return made;
}

// The relay takes a submission over once. The histories' front ends change prompts of submissions that wait, and their
// twin reads them when it takes them: so that both read the same, whatever waits is taken over again.
void forget_waiting(const State& state) {
  for (uint32_t c = 0; c < state.config.channels; ++c) {
    const auto* ring =
        blink::inbound_part<blink::arena::SubmitRecord>(state, c, state.inbound_layout.channel_submit_offset);
    for (uint32_t slot = 0; slot < state.config.submit_slots; ++slot) {
      const_cast<blink::arena::SubmitRecord*>(ring)[slot].commit = 0;
    }
  }
}

void pull(blink_scheduler* scheduler) {
  Relay& relay = relays.at(scheduler);
  forget_waiting(scheduler->state);
  relay.now_ns += blink::kLongestTrustNs;  // the histories ring no bell
  block().run([&] { blink::pull(scheduler->state, relay.board, relay.now_ns); });
}

void push(blink_scheduler* scheduler) {
  Relay& relay = relays.at(scheduler);
  block().run([&] {
    const State& state = scheduler->state;
    for (uint32_t c = threadIdx.x / blink::kLanes; c < state.config.channels; c += kThreads / blink::kLanes) {
      blink::push_records(state, relay.board, c);
    }
    __syncthreads();
    if (threadIdx.x < state.config.channels) blink::push_words(state, relay.board, threadIdx.x);
    if (threadIdx.x < sizeof(blink::arena::Telemetry) / 8) blink::push_telemetry(state, relay.board, threadIdx.x);
  });
}

uint8_t* zeroed(size_t bytes) {
  auto* made = static_cast<uint8_t*>(std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096));
  std::memset(made, 0, bytes);
  return made;
}

}  // namespace

extern "C" {

BLINK_EXPORT blink_scheduler* blink_scheduler_create(const SchedulerConfig* config, const uint8_t* inbound,
                                                     size_t inbound_bytes, uint8_t* outbound, size_t outbound_bytes) {
  Relay relay{zeroed(inbound_bytes), zeroed(outbound_bytes)};
  relay.board.host_inbound = reinterpret_cast<uintptr_t>(inbound);
  relay.board.host_outbound = reinterpret_cast<uintptr_t>(outbound);
  auto* made = blink_scheduler_create_on_host(config, relay.inbound, inbound_bytes, relay.outbound, outbound_bytes);
  if (made == nullptr) return nullptr;
  relays[made] = relay;
  return made;
}

BLINK_EXPORT void blink_scheduler_destroy(blink_scheduler* scheduler) {
  const auto found = relays.find(scheduler);
  if (found == relays.end()) return;
  blink_scheduler_destroy_on_host(scheduler);
  std::free(found->second.inbound);
  std::free(found->second.outbound);
  relays.erase(found);
}

BLINK_EXPORT void blink_scheduler_step(blink_scheduler* scheduler, uint64_t now_ns, uint32_t command) {
  pull(scheduler);
  blink_scheduler_step_on_host(scheduler, now_ns, command);
  push(scheduler);
}

// One pull as the chain makes it, which trusts the bell; whether the idle poll would go on waiting after it.
BLINK_EXPORT int blink_relay_pull(blink_scheduler* scheduler, uint64_t now_ns) {
  Relay& relay = relays.at(scheduler);
  block().run([&] { blink::pull(scheduler->state, relay.board, now_ns); });
  return blink::bell_of(scheduler->state, relay.board) == relay.board.bell_polled;
}

// A step without a pull in front.
BLINK_EXPORT void blink_relay_step(blink_scheduler* scheduler, uint64_t now_ns) {
  blink_scheduler_step_on_host(scheduler, now_ns, 0);
  push(scheduler);
}

BLINK_EXPORT int blink_scheduler_poll(blink_scheduler* scheduler, const uint64_t* command, uint64_t expected,
                                      uint64_t timeout_ns) {
  pull(scheduler);
  return blink_scheduler_poll_on_host(scheduler, command, expected, timeout_ns);
}

}  // extern "C"
