#include "scheduler/host.h"

#include <sys/mman.h>
#include <time.h>

#include <new>

#include "scheduler/audit.h"
#include "scheduler/plan_view.h"
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
  uint64_t busy_ns = 0;  // when there was last something to do
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

// Short sleeps while a next request is likely, longer ones the longer nothing came: an idle chain takes about 1 % of a
// core, where 20 µs all the time would take 10 %.
uint64_t pause_after(uint64_t idle_ns) {
  if (idle_ns < 5'000'000) return 5'000;
  if (idle_ns < 20'000'000) return 20'000;
  return idle_ns < 1'000'000'000 ? 200'000 : 500'000;
}

}  // namespace

extern "C" {

BLINK_EXPORT const char* blink_scheduler_check(const SchedulerConfig* config) { return blink::check_config(*config); }

BLINK_EXPORT blink_scheduler* blink_scheduler_create(const SchedulerConfig* config, uint8_t* inbound,
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
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  scheduler->memory = mmap(nullptr, scheduler->bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
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
  *view = blink::plan_view(state, const_cast<blink::layout::StepHeader*>(&state.header));
}

BLINK_EXPORT void blink_scheduler_step(blink_scheduler* scheduler, uint64_t now_ns, uint32_t command) {
  blink::step(blink::HostExec{}, scheduler->state, now_ns, static_cast<blink::layout::Command>(command));
}

BLINK_EXPORT int blink_scheduler_poll(blink_scheduler* scheduler, const uint64_t* command, uint64_t expected,
                                      uint64_t timeout_ns) {
  const uint64_t begin = monotonic_ns();
  if (scheduler->state.header.tokens > 0 || scheduler->busy_ns == 0) scheduler->busy_ns = begin;
  for (uint64_t now = begin;; now = monotonic_ns()) {
    const bool commanded = command != nullptr && blink::load_acquire(command) != expected;
    if (commanded || blink::has_news(scheduler->state)) {
      scheduler->busy_ns = now;
      return 1;
    }
    if (now - begin >= timeout_ns) return 0;
    sleep_ns(pause_after(now - scheduler->busy_ns));
  }
}

BLINK_EXPORT const char* blink_scheduler_audit(const blink_scheduler* scheduler) {
  return blink::audit(scheduler->state);
}

}  // extern "C"
