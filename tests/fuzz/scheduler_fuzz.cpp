// Feeds arbitrary bytes to the scheduler through the inbound region, as a broken or hostile front end would, and
// checks the scheduler's invariants after every step. One sentence: whatever stands in the inbound region, a step
// touches no memory that is not its own and leaves the tables whole.
//
// `scheduler_fuzz SEED ITERATIONS` runs by itself; with libFuzzer, build with -DBLINK_LIBFUZZER -fsanitize=fuzzer.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

#include "blink_proto/arena.h"
#include "scheduler/host.h"

namespace {

using blink::arena::ChannelIn;
using blink::arena::SubmitRecord;
using blink::layout::SchedulerConfig;

// Exactly as large as the layout says, so that the address sanitizer sees the first byte beyond.
struct Region {
  explicit Region(size_t size) : bytes(size), data(static_cast<uint8_t*>(aligned_alloc(64, size))) {
    memset(data, 0, size);
  }
  ~Region() { free(data); }
  size_t bytes;
  uint8_t* data;
};

SchedulerConfig small_config() {
  SchedulerConfig config{};
  config.channels = 2;
  config.submit_slots = config.cancel_slots = 4;
  config.log_slots = 8;
  config.heap_tokens = 64;
  config.vocab_size = 100;
  config.max_model_tokens = 48;
  config.max_sequences = 6;
  config.max_running = 4;
  config.token_budget = 8;
  config.block_tokens = 4;
  config.prefix_cache = 1;
  config.blocks = 20;
  config.blocks_per_sequence = 12;
  config.eos_count = 1;
  config.bucket_count = 1;
  config.buckets[0] = 8;
  config.intake_tokens = 64;
  config.lease_timeout_ns = 1000;
  return config;
}

// A stream of bytes that never ends: what it lacks is zero.
struct Bytes {
  const uint8_t* data;
  size_t size;
  size_t at = 0;
  uint8_t next() { return at < size ? data[at++] : 0; }
  void fill(void* to, size_t count) {
    for (size_t i = 0; i < count; ++i) static_cast<uint8_t*>(to)[i] = next();
  }
};

void check(const blink_scheduler* scheduler) {
  if (const char* broken = blink_scheduler_audit(scheduler)) {
    fprintf(stderr, "invariant: %s\n", broken);
    abort();
  }
}

// Half of the records get a plausible body or commit word: pure noise would never pass the first test.
void write_something(Bytes& bytes, Region& inbound, const blink::arena::InboundLayout& layout, const Region& outbound,
                     const blink::arena::OutboundLayout& out) {
  const uint32_t c = bytes.next() % 2;
  uint8_t* channel = inbound.data + layout.channel_offset(c);
  const auto* shown = reinterpret_cast<const blink::arena::ChannelOut*>(outbound.data + out.channel_offset(c) +
                                                                        out.channel_control_offset);
  // Mostly the lease that shows: what is written before is cleared when a lease begins.
  const uint64_t lease = shown->lease + (bytes.next() % 4 == 0);
  auto* control = reinterpret_cast<ChannelIn*>(channel + layout.channel_control_offset);
  auto* submit = reinterpret_cast<SubmitRecord*>(channel + layout.channel_submit_offset);
  auto* cancel = reinterpret_cast<blink::arena::CancelRecord*>(channel + layout.channel_cancel_offset);
  switch (bytes.next() % 9) {
    case 0:
      control->lease = bytes.next() % 4;
      break;
    case 1:
      bytes.fill(control, sizeof(*control));
      break;
    case 2:
      control->log_read += bytes.next() % 16;
      ++control->heartbeat;
      break;
    case 3:
      bytes.fill(submit + bytes.next() % 4, sizeof(*submit));
      break;
    case 4:
    case 5: {
      SubmitRecord* record = submit + bytes.next() % 4;
      memset(static_cast<void*>(record), 0, sizeof(*record));
      record->prompt_offset = bytes.next() % 70;
      record->prompt_tokens = bytes.next() % 40;
      record->max_tokens = bytes.next() % 30;
      record->top_p = bytes.next() / 128.0f;
      record->stop_count = bytes.next() % 10;
      if (bytes.next() % 2 == 0) {
        record->flags = bytes.next() % 8;
        record->logprobs = bytes.next() % 9;
        record->min_tokens = bytes.next() % 32;
        record->priority = static_cast<int8_t>(bytes.next());
        record->bias_offset = bytes.next() % 70;
        record->bias_count = bytes.next() % 6;
        record->ban_words = bytes.next() % 12;
        record->min_p = bytes.next() / 200.0f;
        record->presence_penalty = bytes.next() / 100.0f;
      }
      record->commit = blink::arena::CommitWord{1ull + bytes.next() % 4, lease}.pack();
      break;
    }
    case 6:
      cancel[bytes.next() % 4] = {bytes.next() % 8u, blink::arena::CommitWord{1ull + bytes.next() % 4, lease}.pack()};
      break;
    case 7:
      bytes.fill(channel + layout.channel_heap_offset + bytes.next() % 128, 64);
      break;
    default: {
      auto* heap = reinterpret_cast<uint32_t*>(channel + layout.channel_heap_offset);
      heap[bytes.next() % 64] = blink::arena::BAN_LENGTH + bytes.next() % 6;
    }
  }
}

void run(const uint8_t* data, size_t size) {
  const SchedulerConfig config = small_config();
  const blink::arena::Sizes sizes{config.channels, config.submit_slots, config.cancel_slots, config.log_slots,
                                  config.heap_tokens};
  const blink::arena::InboundLayout layout(sizes);
  Region inbound(layout.total_bytes);
  const blink::arena::OutboundLayout out(sizes);
  Region outbound(out.total_bytes);
  blink_scheduler* scheduler =
      blink_scheduler_create(&config, inbound.data, inbound.bytes, outbound.data, outbound.bytes);
  if (scheduler == nullptr) abort();
  blink_plan_view plan;
  blink_scheduler_plan(scheduler, &plan);
  Bytes bytes{data, size};
  uint64_t now = 0;
  while (bytes.at < bytes.size) {
    for (int k = bytes.next() % 4; k >= 0; --k) write_something(bytes, inbound, layout, outbound, out);
    for (uint32_t r = 0; r < plan.header->rows; ++r) plan.sampled[r] = static_cast<int8_t>(bytes.next());
    now += bytes.next();
    blink_scheduler_step(scheduler, now, bytes.next() % 16 == 0 ? 1 : 0);
    check(scheduler);
  }
  blink_scheduler_destroy(scheduler);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  run(data, size);
  return 0;
}

#ifndef BLINK_LIBFUZZER
int main(int argc, char** argv) {
  if (argc != 3) return 2;
  std::mt19937_64 random(strtoull(argv[1], nullptr, 10));
  const unsigned long iterations = strtoul(argv[2], nullptr, 10);
  for (unsigned long i = 0; i < iterations; ++i) {
    uint8_t data[4096];
    for (uint8_t& byte : data) byte = static_cast<uint8_t>(random());
    run(data, 64 + random() % (sizeof(data) - 64));
  }
  printf("%lu inputs\n", iterations);
}
#endif
