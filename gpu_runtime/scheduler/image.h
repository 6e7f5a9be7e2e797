// The first state of a scheduler that runs in a device's memory, made on the host.
#pragma once
#include "scheduler/host.h"

extern "C" {

// Device memory that a scheduler takes: an image with the first `image_bytes` of its content, then zeros.
struct blink_image_sizes {
  uint64_t image_bytes;
  uint64_t total_bytes;
  uint64_t shared_bytes;  // shared memory of the kernel that runs a step
};

// Addresses in device memory. `cold` is a blink::ColdArrays.
struct blink_image_view {
  blink_plan_view plan;
  uint8_t cold[48];
};

void blink_image_measure(const blink::layout::SchedulerConfig* config, blink_image_sizes* sizes);

// Fills `image` (image_bytes, 64-byte aligned) for device memory at `base` and regions at `inbound` and `outbound`,
// all of them device addresses. Null, or what is wrong with the configuration.
const char* blink_image_make(const blink::layout::SchedulerConfig* config, uint64_t base, uint64_t inbound,
                             uint64_t outbound, uint8_t* image, blink_image_view* view);

}  // extern "C"
