// The scheduler on a GPU behind the host's C interface (host.h), one kernel launch for each step: for tests that
// compare it with the twin, and for measuring the kernel. In a step graph the same kernel is the last node.
#include <cuda_runtime.h>

#include <cstring>
#include <new>
#include <vector>

#include "scheduler/audit.h"
#include "scheduler/block_exec.cuh"
#include "scheduler/host.h"
#include "scheduler/poll.h"
#include "scheduler/setup.h"
#include "scheduler/step.h"

#define BLINK_EXPORT __attribute__((visibility("default")))

using blink::State;
using blink::layout::SchedulerConfig;

namespace {

constexpr uint32_t kThreads = 320;

__global__ void __launch_bounds__(kThreads) step_kernel(State* state, uint64_t now_ns, uint32_t command) {
  __shared__ blink::BlockScratch scratch;
  blink::step(blink::BlockExec{&scratch}, *state, now_ns, static_cast<blink::layout::Command>(command));
}

bool ok(cudaError_t status) { return status == cudaSuccess; }

}  // namespace

// `mirror` has the device's state with pointers into `copy`, the host's copy of all arrays.
struct blink_scheduler {
  SchedulerConfig config{};
  uint8_t* inbound = nullptr;
  uint8_t* outbound = nullptr;
  size_t inbound_bytes = 0, outbound_bytes = 0;
  uint8_t *device_inbound = nullptr, *device_outbound = nullptr, *device_arrays = nullptr;
  State* device_state = nullptr;
  State mirror{};
  std::vector<uint8_t> copy;
  cudaEvent_t begin = nullptr, end = nullptr;
  float last_step_ms = 0;
};

namespace {

// Rebases a pointer into the device's arrays onto the host's copy.
template <class T>
void rebase(const blink_scheduler& scheduler, T*& pointer) {
  const auto offset = reinterpret_cast<const uint8_t*>(pointer) - scheduler.device_arrays;
  pointer = reinterpret_cast<T*>(const_cast<uint8_t*>(scheduler.copy.data()) + offset);
}

// What the audit reads of the prefix cache.
void rebase_cache(blink_scheduler& scheduler) {
  State& mirror = scheduler.mirror;
  rebase(scheduler, mirror.cached);
  rebase(scheduler, mirror.cached_tokens);
  rebase(scheduler, mirror.buckets);
  rebase(scheduler, mirror.idle);
  rebase(scheduler, mirror.prefixes);
  rebase(scheduler, mirror.history);
}

bool copy_back(blink_scheduler& scheduler) {
  State& mirror = scheduler.mirror;
  if (!ok(cudaMemcpy(&mirror, scheduler.device_state, sizeof(State), cudaMemcpyDeviceToHost))) return false;
  if (!ok(cudaMemcpy(scheduler.copy.data(), scheduler.device_arrays, scheduler.copy.size(), cudaMemcpyDeviceToHost)))
    return false;
  rebase(scheduler, mirror.sequences);
  rebase(scheduler, mirror.channels);
  rebase(scheduler, mirror.order);
  rebase(scheduler, mirror.order_next);
  rebase(scheduler, mirror.free_slots);
  rebase(scheduler, mirror.free_blocks);
  rebase(scheduler, mirror.block_table);
  rebase_cache(scheduler);
  mirror.inbound = scheduler.inbound;
  mirror.outbound = scheduler.outbound;
  return ok(
      cudaMemcpy(scheduler.outbound, scheduler.device_outbound, scheduler.outbound_bytes, cudaMemcpyDeviceToHost));
}

// Of the inbound region the scheduler wipes rings and heaps of channels whose lease begins.
bool copy_inbound_back(const blink_scheduler& scheduler) {
  return ok(cudaMemcpy(scheduler.inbound, scheduler.device_inbound, scheduler.inbound_bytes, cudaMemcpyDeviceToHost));
}

bool build(blink_scheduler& scheduler) {
  State state{};
  state.config = scheduler.config;
  state.inbound_layout = blink::arena::InboundLayout(blink::sizes_of(scheduler.config));
  state.outbound_layout = blink::arena::OutboundLayout(blink::sizes_of(scheduler.config));
  scheduler.copy.assign(blink::carve(state, nullptr), 0);
  // Pools are filled in the host's copy; then the same offsets are taken on the device.
  blink::carve(state, scheduler.copy.data());
  blink::fill_pools(state);
  if (!ok(cudaMalloc(&scheduler.device_arrays, scheduler.copy.size()))) return false;
  if (!ok(cudaMalloc(&scheduler.device_state, sizeof(State)))) return false;
  if (!ok(cudaMalloc(&scheduler.device_inbound, scheduler.inbound_bytes))) return false;
  if (!ok(cudaMalloc(&scheduler.device_outbound, scheduler.outbound_bytes))) return false;
  if (!ok(cudaEventCreate(&scheduler.begin)) || !ok(cudaEventCreate(&scheduler.end))) return false;
  if (!ok(cudaMemset(scheduler.device_outbound, 0, scheduler.outbound_bytes))) return false;
  if (!ok(cudaMemcpy(scheduler.device_arrays, scheduler.copy.data(), scheduler.copy.size(), cudaMemcpyHostToDevice)))
    return false;
  blink::carve(state, scheduler.device_arrays);
  state.inbound = scheduler.device_inbound;
  state.outbound = scheduler.device_outbound;
  if (!ok(cudaMemcpy(scheduler.device_state, &state, sizeof(State), cudaMemcpyHostToDevice))) return false;
  return copy_back(scheduler);
}

template <class T>
T* in_copy(const blink_scheduler& scheduler, T* device_pointer) {
  const auto offset = reinterpret_cast<const uint8_t*>(device_pointer) - scheduler.device_arrays;
  return reinterpret_cast<T*>(const_cast<uint8_t*>(scheduler.copy.data()) + offset);
}

}  // namespace

extern "C" {

BLINK_EXPORT const char* blink_scheduler_check(const SchedulerConfig* config) { return blink::check_config(*config); }

BLINK_EXPORT blink_scheduler* blink_scheduler_create(const SchedulerConfig* config, uint8_t* inbound,
                                                     size_t inbound_bytes, uint8_t* outbound, size_t outbound_bytes) {
  if (blink::check_config(*config) != nullptr) return nullptr;
  auto* scheduler = new (std::nothrow) blink_scheduler;
  if (scheduler == nullptr) return nullptr;
  scheduler->config = *config;
  scheduler->inbound = inbound;
  scheduler->outbound = outbound;
  scheduler->inbound_bytes = inbound_bytes;
  scheduler->outbound_bytes = outbound_bytes;
  if (!build(*scheduler)) {
    blink_scheduler_destroy(scheduler);
    return nullptr;
  }
  return scheduler;
}

BLINK_EXPORT void blink_scheduler_destroy(blink_scheduler* scheduler) {
  if (scheduler == nullptr) return;
  cudaFree(scheduler->device_arrays);
  cudaFree(scheduler->device_state);
  cudaFree(scheduler->device_inbound);
  cudaFree(scheduler->device_outbound);
  if (scheduler->begin != nullptr) cudaEventDestroy(scheduler->begin);
  if (scheduler->end != nullptr) cudaEventDestroy(scheduler->end);
  delete scheduler;
}

BLINK_EXPORT void blink_scheduler_plan(const blink_scheduler* scheduler, blink_plan_view* view) {
  const State& mirror = scheduler->mirror;
  *view = {const_cast<blink::layout::StepHeader*>(&mirror.header),
           in_copy(*scheduler, mirror.works),
           in_copy(*scheduler, mirror.rows),
           in_copy(*scheduler, mirror.token_ids),
           in_copy(*scheduler, mirror.positions),
           in_copy(*scheduler, mirror.kv_slots),
           mirror.block_table,
           const_cast<int32_t*>(in_copy(*scheduler, mirror.sampled)),
           in_copy(*scheduler, mirror.decode_tiles),
           in_copy(*scheduler, mirror.chunk_tiles),
           mirror.history,
           in_copy(*scheduler, mirror.extras),
           in_copy(*scheduler, mirror.bias),
           in_copy(*scheduler, mirror.bans),
           const_cast<blink::layout::RowLogprobs*>(in_copy(*scheduler, mirror.sampled_logprobs))};
}

BLINK_EXPORT void blink_scheduler_step(blink_scheduler* scheduler, uint64_t now_ns, uint32_t command) {
  const State& mirror = scheduler->mirror;
  int32_t* sampled = const_cast<int32_t*>(mirror.sampled);
  auto* logprobs = const_cast<blink::layout::RowLogprobs*>(mirror.sampled_logprobs);
  const bool sent =
      ok(cudaMemcpy(scheduler->device_inbound, scheduler->inbound, scheduler->inbound_bytes, cudaMemcpyHostToDevice)) &&
      ok(cudaMemcpy(sampled, in_copy(*scheduler, sampled), mirror.header.rows * sizeof(int32_t),
                    cudaMemcpyHostToDevice)) &&
      ok(cudaMemcpy(logprobs, in_copy(*scheduler, logprobs), mirror.header.rows * sizeof(*logprobs),
                    cudaMemcpyHostToDevice));
  cudaEventRecord(scheduler->begin);
  step_kernel<<<1, kThreads>>>(scheduler->device_state, now_ns, command);
  cudaEventRecord(scheduler->end);
  const bool ran = sent && ok(cudaGetLastError()) && ok(cudaDeviceSynchronize()) && copy_back(*scheduler) &&
                   copy_inbound_back(*scheduler);
  cudaEventElapsedTime(&scheduler->last_step_ms, scheduler->begin, scheduler->end);
  // A device error must not look like an idle plan.
  if (!ran) abort();
}

BLINK_EXPORT int blink_scheduler_poll(blink_scheduler* scheduler, const uint64_t* command, uint64_t expected,
                                      uint64_t) {
  return blink::has_news(scheduler->mirror) || (command != nullptr && *command != expected);
}

BLINK_EXPORT const char* blink_scheduler_audit(const blink_scheduler* scheduler) {
  return blink::audit(scheduler->mirror);
}

// Microseconds between the events around the last step's kernel.
BLINK_EXPORT double blink_scheduler_last_step_us(const blink_scheduler* scheduler) {
  return static_cast<double>(scheduler->last_step_ms) * 1e3;
}

}  // extern "C"
