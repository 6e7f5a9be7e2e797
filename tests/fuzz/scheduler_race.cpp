// A front-end worker on one thread and the scheduler on another, both on one arena, for the thread sanitizer: every
// word that crosses is written and read with the ordering that the contract asks for, and nothing else is shared. The
// worker takes one lease after another, and before each it leaves records under that lease, as an earlier holder could:
// none of them is taken, and none of its own is cleared, since it writes those when it is told of the lease.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "blink_proto/arena.h"
#include "scheduler/host.h"

namespace {

using namespace blink::arena;

constexpr Sizes kSizes{1, 8, 8, 64, 256};
constexpr uint64_t kLeases = 50;
constexpr uint64_t kRequests = 12;  // of a lease
constexpr uint32_t kTokens = 5;

uint64_t acquire(const uint64_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
void release(uint64_t* word, uint64_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

struct Channel {
  Channel(uint8_t* inbound, uint8_t* outbound) {
    const InboundLayout in(kSizes);
    const OutboundLayout out(kSizes);
    uint8_t* own = inbound + in.channel_offset(0);
    uint8_t* theirs = outbound + out.channel_offset(0);
    control = reinterpret_cast<ChannelIn*>(own + in.channel_control_offset);
    submit = reinterpret_cast<SubmitRecord*>(own + in.channel_submit_offset);
    heap = reinterpret_cast<uint32_t*>(own + in.channel_heap_offset);
    status = reinterpret_cast<ChannelOut*>(theirs + out.channel_control_offset);
    log = reinterpret_cast<TokenRecord*>(theirs + out.channel_log_offset);
  }
  ChannelIn* control;
  SubmitRecord* submit;
  uint32_t* heap;
  ChannelOut* status;
  TokenRecord* log;
};

void write_submission(Channel& channel, uint64_t position, uint64_t lease, uint32_t tokens) {
  const uint32_t offset = static_cast<uint32_t>(position % 8) * 4;
  for (uint32_t i = 0; i < 4; ++i) __atomic_store_n(channel.heap + offset + i, 7u, __ATOMIC_RELAXED);
  SubmitRecord record{};
  record.prompt_offset = offset;
  record.prompt_tokens = 4;
  record.max_tokens = tokens;
  record.top_p = 1.0f;
  uint64_t words[sizeof(record) / 8];
  memcpy(words, &record, sizeof(record));
  auto* to = reinterpret_cast<uint64_t*>(channel.submit + position % 8);
  for (size_t i = 0; i + 1 < sizeof(record) / 8; ++i) __atomic_store_n(to + i, words[i], __ATOMIC_RELAXED);
  release(&channel.submit[position % 8].commit, CommitWord{1 + position / 8, lease}.pack());
}

// Takes a lease, submits everything and reads every token; returns the number of last records seen.
uint64_t hold(Channel& channel, uint64_t lease) {
  const uint64_t next = acquire(&channel.status->submit_read);
  for (uint64_t i = 0; i < 8; ++i) write_submission(channel, next + i, lease, kTokens + 1);
  release(&channel.control->lease, lease);
  while (acquire(&channel.status->lease) != lease || acquire(&channel.status->live) == 0) std::this_thread::yield();
  const uint64_t first = acquire(&channel.status->submit_read), start = acquire(&channel.status->log_start);
  if (first != next) abort();
  uint64_t submitted = 0, read = start, ended = 0;
  while (ended < kRequests) {
    const bool room = submitted - ended < 8 && first + submitted - acquire(&channel.status->submit_read) < 8;
    if (submitted < kRequests && room) write_submission(channel, first + submitted++, lease, kTokens);
    const TokenRecord* record = channel.log + read % 64;
    const TokenHead head = TokenHead::unpack(acquire(&record->head));
    const TokenBody body = TokenBody::unpack(acquire(&record->body));
    const uint64_t lap = 1 + read / 64 % 65535;
    if (head.lap != lap || body.lap != lap) {
      std::this_thread::yield();
      continue;
    }
    if (head.kind != static_cast<uint64_t>(RecordKind::TOKEN) || body.token != 9) abort();
    ended += head.finish != 0;
    release(&channel.control->log_read, ++read);
    release(&channel.control->heartbeat, read);
  }
  if (read != start + kRequests * kTokens || acquire(&channel.status->submit_read) != first + kRequests) abort();
  return ended;
}

uint64_t front_end(Channel channel) {
  uint64_t ended = 0;
  for (uint64_t lease = 1; lease <= kLeases; ++lease) ended += hold(channel, lease);
  return ended;
}

}  // namespace

int main() {
  auto* inbound = static_cast<uint8_t*>(aligned_alloc(4096, InboundLayout(kSizes).total_bytes));
  auto* outbound = static_cast<uint8_t*>(aligned_alloc(4096, OutboundLayout(kSizes).total_bytes));
  memset(inbound, 0, InboundLayout(kSizes).total_bytes);
  memset(outbound, 0, OutboundLayout(kSizes).total_bytes);
  blink::layout::SchedulerConfig config{};
  config.channels = kSizes.channels;
  config.submit_slots = kSizes.submit_slots;
  config.cancel_slots = kSizes.cancel_slots;
  config.log_slots = kSizes.log_slots;
  config.heap_tokens = kSizes.heap_tokens;
  config.vocab_size = 100;
  config.max_model_tokens = 64;
  config.max_sequences = config.max_running = 4;
  config.token_budget = config.buckets[0] = 8;
  config.bucket_count = 1;
  config.block_tokens = 4;
  config.prefix_cache = 1;
  config.blocks = 65;
  config.blocks_per_sequence = 16;
  config.intake_tokens = 64;
  config.lease_timeout_ns = ~0ull;
  blink_scheduler* scheduler = blink_scheduler_create(&config, inbound, InboundLayout(kSizes).total_bytes, outbound,
                                                      OutboundLayout(kSizes).total_bytes);
  if (scheduler == nullptr) return 2;
  blink_plan_view plan;
  blink_scheduler_plan(scheduler, &plan);
  bool done = false;
  uint64_t ended = 0;
  std::thread worker([&] {
    ended = front_end(Channel(inbound, outbound));
    __atomic_store_n(&done, true, __ATOMIC_RELEASE);
  });
  for (uint64_t now = 1; !__atomic_load_n(&done, __ATOMIC_ACQUIRE); ++now) {
    for (uint32_t r = 0; r < plan.header->rows; ++r) plan.sampled[r] = 9;
    blink_scheduler_step(scheduler, now, 0);
    if (plan.header->tokens == 0) blink_scheduler_poll(scheduler, nullptr, 0, 100000);
  }
  worker.join();
  blink_scheduler_destroy(scheduler);
  free(inbound);
  free(outbound);
  printf("%lu sequences\n", ended);
}
