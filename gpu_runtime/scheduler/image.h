// The first state of a scheduler that runs in a device's memory, made on the host.
#pragma once
#include "scheduler/host.h"

extern "C" {

// Device memory that a scheduler takes: an image with the first `image_bytes` of its content, then zeros.
struct blink_image_sizes {
  uint64_t image_bytes;
  uint64_t total_bytes;
};

void blink_image_measure(const blink::layout::SchedulerConfig* config, blink_image_sizes* sizes);

// Fills `image` (image_bytes, 64-byte aligned) for device memory at `base`, where the State comes first, and regions at
// `inbound` and `outbound`, all of them device addresses; so are those in `view`. Null, or what is wrong with the
// configuration.
const char* blink_image_make(const blink::layout::SchedulerConfig* config, uint64_t base, uint64_t inbound,
                             uint64_t outbound, uint8_t* image, blink_plan_view* view);

}  // extern "C"
