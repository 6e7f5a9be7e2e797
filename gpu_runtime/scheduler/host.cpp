#include "scheduler/host.h"

#include <sys/mman.h>
#include <time.h>

#include <new>

#include "scheduler/audit.h"
#include "scheduler/poll.h"
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

blink::arena::Sizes sizes_of(const SchedulerConfig& config) {
  return {config.channels, config.submit_slots, config.cancel_slots, config.log_slots, config.heap_tokens};
}

bool power_of_two(uint32_t value) { return value != 0 && (value & (value - 1)) == 0; }

const char* check_rings(const SchedulerConfig& config) {
  if (config.channels == 0 || config.channels > blink::arena::MAX_CHANNELS) return "channels out of range";
  if (!power_of_two(config.submit_slots) || config.submit_slots > 1u << 20) return "submit_slots: no power of two";
  if (!power_of_two(config.cancel_slots) || config.cancel_slots > 1u << 20) return "cancel_slots: no power of two";
  if (!power_of_two(config.log_slots) || config.log_slots > 1u << 24) return "log_slots: no power of two";
  if (config.heap_tokens == 0 || config.heap_tokens > 1u << 30) return "heap_tokens out of range";
  return nullptr;
}

const char* check_buckets(const SchedulerConfig& config) {
  if (config.bucket_count == 0 || config.bucket_count > blink::layout::MAX_BUCKETS) return "bucket_count out of range";
  for (uint32_t b = 0; b < config.bucket_count; ++b) {
    const uint32_t below = b == 0 ? 0 : config.buckets[b - 1];
    if (config.buckets[b] <= below) return "buckets do not ascend";
  }
  if (config.buckets[config.bucket_count - 1] < config.token_budget) return "the last bucket is below token_budget";
  return nullptr;
}

const char* check_limits(const SchedulerConfig& config) {
  if (config.vocab_size == 0 || config.vocab_size > 0x7FFFFFFFu) return "vocab_size out of range";
  if (config.max_model_tokens < 2 || config.max_model_tokens > 1u << 28) return "max_model_tokens out of range";
  if (config.max_sequences == 0 || config.max_sequences > 1u << 16) return "max_sequences out of range";
  if (config.max_running == 0 || config.max_running > config.max_sequences) return "max_running out of range";
  if (config.max_running > 0xFFFFu) return "max_running out of range";
  if (config.token_budget < config.max_running || config.token_budget > 1u << 24) return "token_budget out of range";
  if (config.block_tokens == 0 || config.block_tokens > 4096) return "block_tokens out of range";
  if (config.blocks < 2 || uint64_t{config.blocks} * config.block_tokens > 0x7FFFFFFFu) return "blocks out of range";
  if (config.blocks_per_sequence == 0) return "blocks_per_sequence out of range";
  if (config.eos_count > blink::layout::MAX_EOS_TOKENS) return "eos_count out of range";
  return nullptr;
}

// Lays arrays one behind the other; with no memory it only counts.
class Carver {
 public:
  explicit Carver(uint8_t* memory) : memory_(memory) {}

  template <class T>
  void take(T*& array, uint64_t count) {
    at_ = blink::arena::align_up(at_, 64);
    if (memory_ != nullptr) array = reinterpret_cast<T*>(memory_ + at_);
    at_ += count * sizeof(T);
  }

  uint64_t bytes() const { return at_; }

 private:
  uint8_t* memory_;
  uint64_t at_ = 0;
};

uint64_t carve(State& state, uint8_t* memory) {
  const SchedulerConfig& config = state.config;
  const uint64_t sequences = config.max_sequences;
  const uint64_t step_tokens = config.buckets[config.bucket_count - 1];
  Carver carver(memory);
  carver.take(state.sequences, sequences);
  carver.take(state.channels, config.channels);
  carver.take(state.order, sequences);
  carver.take(state.order_next, sequences);
  carver.take(state.free_slots, sequences);
  carver.take(state.free_blocks, config.blocks);
  carver.take(state.counts, config.channels);
  carver.take(state.works, config.max_running);
  carver.take(state.rows, config.max_running);
  carver.take(state.token_ids, step_tokens);
  carver.take(state.positions, step_tokens);
  carver.take(state.kv_slots, step_tokens);
  int32_t* sampled = nullptr;
  carver.take(sampled, config.max_running);
  state.sampled = sampled;
  carver.take(state.block_table, sequences * config.blocks_per_sequence);
  carver.take(state.history, sequences * config.max_model_tokens);
  return carver.bytes();
}

// Fills the pools so that low ids are given out first.
void fill_pools(State& state) {
  const SchedulerConfig& config = state.config;
  for (uint32_t i = 0; i < config.max_sequences; ++i) state.free_slots[i] = config.max_sequences - 1 - i;
  state.free_slot_count = config.max_sequences;
  for (uint32_t i = 0; i + 1 < config.blocks; ++i) state.free_blocks[i] = config.blocks - 1 - i;
  state.free_block_count = config.blocks - 1;
}

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

BLINK_EXPORT const char* blink_scheduler_check(const SchedulerConfig* config) {
  if (const char* wrong = check_rings(*config)) return wrong;
  if (const char* wrong = check_limits(*config)) return wrong;
  return check_buckets(*config);
}

BLINK_EXPORT blink_scheduler* blink_scheduler_create(const SchedulerConfig* config, const uint8_t* inbound,
                                                     size_t inbound_bytes, uint8_t* outbound, size_t outbound_bytes) {
  if (blink_scheduler_check(config) != nullptr) return nullptr;
  const blink::arena::InboundLayout in(sizes_of(*config));
  const blink::arena::OutboundLayout out(sizes_of(*config));
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
  scheduler->bytes = carve(state, nullptr);
  scheduler->memory = mmap(nullptr, scheduler->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (scheduler->memory == MAP_FAILED) {
    delete scheduler;
    return nullptr;
  }
  carve(state, static_cast<uint8_t*>(scheduler->memory));
  fill_pools(state);
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
