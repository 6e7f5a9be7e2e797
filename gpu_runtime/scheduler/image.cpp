#include "scheduler/image.h"

#include <cstring>

#include "scheduler/plan_view.h"
#include "scheduler/setup.h"

#define BLINK_EXPORT __attribute__((visibility("default")))

using blink::State;
using blink::layout::SchedulerConfig;

namespace {

constexpr uint64_t kArraysAt = blink::arena::align_up(sizeof(State), 64);

State blank_state(const SchedulerConfig& config) {
  State state{};
  state.config = config;
  state.inbound_layout = blink::arena::InboundLayout(blink::sizes_of(config));
  state.outbound_layout = blink::arena::OutboundLayout(blink::sizes_of(config));
  return state;
}

// A device address, of which only the device may follow it.
uint8_t* device_pointer(uint64_t address) { return reinterpret_cast<uint8_t*>(static_cast<uintptr_t>(address)); }

}  // namespace

extern "C" {

BLINK_EXPORT void blink_image_measure(const SchedulerConfig* config, blink_image_sizes* sizes) {
  State state = blank_state(*config);
  sizes->total_bytes = kArraysAt + blink::carve(state, nullptr);
  // The block table and the history are zero at first.
  blink::carve(state, device_pointer(kArraysAt));
  sizes->image_bytes = reinterpret_cast<uintptr_t>(state.block_table);
}

BLINK_EXPORT const char* blink_image_make(const SchedulerConfig* config, uint64_t base, uint64_t inbound,
                                          uint64_t outbound, uint8_t* image, blink_plan_view* view) {
  if (const char* wrong = blink::check_config(*config)) return wrong;
  State state = blank_state(*config);
  blink_image_sizes sizes;
  blink_image_measure(config, &sizes);
  std::memset(image, 0, sizes.image_bytes);
  blink::carve(state, image + kArraysAt);
  blink::fill_pools(state);
  blink::carve(state, device_pointer(base + kArraysAt));
  state.inbound = device_pointer(inbound);
  state.outbound = device_pointer(outbound);
  std::memcpy(image, &state, sizeof(State));
  auto* on_device = reinterpret_cast<State*>(device_pointer(base));
  *view = blink::plan_view(state, &on_device->header);
  return nullptr;
}

}  // extern "C"
