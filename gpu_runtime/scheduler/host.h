// The host's C interface to the scheduler.
#pragma once
#include <cstddef>
#include <cstdint>

#include "scheduler/layout.h"

extern "C" {

struct blink_scheduler;

// Where the plan lies; valid for the life of the scheduler.
struct blink_plan_view {
  blink::layout::StepHeader* header;
  blink::layout::Work* works;
  blink::layout::SampleRow* rows;
  int32_t* token_ids;
  int32_t* positions;
  int32_t* kv_slots;
  int32_t* block_table;
  int32_t* sampled;
  blink::layout::Tile* decode_tiles;
  blink::layout::Tile* chunk_tiles;
  uint32_t* history;
  blink::layout::SampleExtras* extras;
  blink::layout::BiasEntry* bias;
  blink::layout::BanToken* bans;
  blink::layout::RowLogprobs* sampled_logprobs;
};

// Null on success, else what is wrong with the configuration.
const char* blink_scheduler_check(const blink::layout::SchedulerConfig* config);

// The regions must stay mapped, be 64-byte aligned and have the sizes that the configuration gives. Null when the
// configuration is wrong or memory is short.
blink_scheduler* blink_scheduler_create(const blink::layout::SchedulerConfig* config, uint8_t* inbound,
                                        size_t inbound_bytes, uint8_t* outbound, size_t outbound_bytes);
void blink_scheduler_destroy(blink_scheduler* scheduler);

void blink_scheduler_plan(const blink_scheduler* scheduler, blink_plan_view* view);

// Takes in the tokens that were put into the plan's `sampled` and plans the next step.
void blink_scheduler_step(blink_scheduler* scheduler, uint64_t now_ns, uint32_t command);

// Waits until a step could do something, the word at `command` differs from `expected`, or the time is over.
// Returns 1 for news, 0 when the time is over.
int blink_scheduler_poll(blink_scheduler* scheduler, const uint64_t* command, uint64_t expected, uint64_t timeout_ns);

// Null, or which invariant is broken.
const char* blink_scheduler_audit(const blink_scheduler* scheduler);

}  // extern "C"
