#include "scheduler/host.h"

#include <sys/mman.h>
#include <time.h>

#include <new>

#include "scheduler/audit.h"
#include "scheduler/poll.h"
#include "scheduler/setup.h"
#include "scheduler/step.h"

#define BLINK_EXPORT __attribute__((visibility("default")))

using blink::State;
using blink::layout::SchedulerConfig;

struct blink_scheduler {
  State state{};
  void* memory = nullptr;
  size_t bytes = 0;
};

namespace {

uint64_t monotonic_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000000000ull + static_cast<uint64_t>(now.tv_nsec);
}

void sleep_ns(uint64_t duration) {
  const timespec wait{0, static_cast<long>(duration)};
  nanosleep(&wait, nullptr);
}

}  // namespace

extern "C" {

BLINK_EXPORT const char* blink_scheduler_check(const SchedulerConfig* config) { return blink::check_config(*config); }

BLINK_EXPORT blink_scheduler* blink_scheduler_create(const SchedulerConfig* config, const uint8_t* inbound,
                                                     size_t inbound_bytes, uint8_t* outbound, size_t outbound_bytes) {
  if (blink::check_config(*config) != nullptr) return nullptr;
  const blink::arena::InboundLayout in(blink::sizes_of(*config));
  const blink::arena::OutboundLayout out(blink::sizes_of(*config));
  const auto misaligned = reinterpret_cast<uintptr_t>(inbound) % 64 + reinterpret_cast<uintptr_t>(outbound) % 64;
  if (inbound_bytes < in.total_bytes || outbound_bytes < out.total_bytes || misaligned != 0) return nullptr;
  auto* scheduler = new (std::nothrow) blink_scheduler;
  if (scheduler == nullptr) return nullptr;
  State& state = scheduler->state;
  state.config = *config;
  state.inbound_layout = in;
  state.outbound_layout = out;
  state.inbound = inbound;
  state.outbound = outbound;
  // Anonymous memory is zero and, for the long rows of short sequences, never touched.
  scheduler->bytes = blink::carve(state, nullptr);
  scheduler->memory = mmap(nullptr, scheduler->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (scheduler->memory == MAP_FAILED) {
    delete scheduler;
    return nullptr;
  }
  blink::carve(state, static_cast<uint8_t*>(scheduler->memory));
  blink::fill_pools(state);
  return scheduler;
}

BLINK_EXPORT void blink_scheduler_destroy(blink_scheduler* scheduler) {
  if (scheduler == nullptr) return;
  munmap(scheduler->memory, scheduler->bytes);
  delete scheduler;
}

BLINK_EXPORT void blink_scheduler_plan(const blink_scheduler* scheduler, blink_plan_view* view) {
  const State& state = scheduler->state;
  *view = {const_cast<blink::layout::StepHeader*>(&state.header),
           state.works,
           state.rows,
           state.token_ids,
           state.positions,
           state.kv_slots,
           state.block_table,
           const_cast<int32_t*>(state.sampled)};
}

BLINK_EXPORT void blink_scheduler_step(blink_scheduler* scheduler, uint64_t now_ns, uint32_t command) {
  blink::step(blink::HostExec{}, scheduler->state, now_ns, static_cast<blink::layout::Command>(command));
}

BLINK_EXPORT int blink_scheduler_poll(const blink_scheduler* scheduler, const uint64_t* command, uint64_t expected,
                                      uint64_t timeout_ns) {
  const uint64_t begin = monotonic_ns();
  for (;;) {
    if (blink::has_news(scheduler->state)) return 1;
    if (command != nullptr && blink::load_acquire(command) != expected) return 1;
    const uint64_t waited = monotonic_ns() - begin;
    if (waited >= timeout_ns) return 0;
    // Short sleeps while a next request is likely, longer ones once idle: 20 µs costs some 4 % of a core, 200 µs
    // under 1 %.
    sleep_ns(waited < 20'000'000 ? 20'000 : 200'000);
  }
}

BLINK_EXPORT const char* blink_scheduler_audit(const blink_scheduler* scheduler) {
  return blink::audit(scheduler->state);
}

}  // extern "C"
