// A hostile writer on one thread and the scheduler on another. One sentence: words of the inbound region may change
// between any two reads of a step, and what was checked is still what is used.
//
// The writer flips words of valid submissions between a good and a bad value (lengths, offsets, stop counts, prompt
// tokens, banned sequences, cursors, leases), so that a word that the scheduler read twice would soon be good in the
// check and bad in the use. `scheduler_tearing SEED TOKENS` runs until that many tokens were generated and prints what
// was reached: steps, tokens, rejects.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>

#include "blink_proto/arena.h"
#include "scheduler/host.h"

namespace {

using namespace blink::arena;

constexpr Sizes kSizes{2, 4, 4, 8, 64};
constexpr uint32_t kVocabulary = 100;
constexpr uint64_t kMostSteps = 20000000;

blink::layout::SchedulerConfig small_config() {
  blink::layout::SchedulerConfig config{};
  config.channels = kSizes.channels;
  config.submit_slots = kSizes.submit_slots;
  config.cancel_slots = kSizes.cancel_slots;
  config.log_slots = kSizes.log_slots;
  config.heap_tokens = kSizes.heap_tokens;
  config.vocab_size = kVocabulary;
  config.max_model_tokens = 48;
  config.max_sequences = 6;
  config.max_running = 4;
  config.token_budget = config.buckets[0] = 16;
  config.bucket_count = 1;
  config.block_tokens = 4;
  config.prefix_cache = 1;
  config.blocks = 20;
  config.blocks_per_sequence = 12;
  config.intake_tokens = 64;
  config.lease_timeout_ns = ~0ull;
  return config;
}

void put(void* to, uint64_t value) { __atomic_store_n(static_cast<uint64_t*>(to), value, __ATOMIC_RELEASE); }
void put(void* to, uint32_t value) { __atomic_store_n(static_cast<uint32_t*>(to), value, __ATOMIC_RELAXED); }
uint64_t get(const uint64_t* from) { return __atomic_load_n(from, __ATOMIC_ACQUIRE); }

constexpr uint32_t kScore = static_cast<uint32_t>(blink::arena::SubmitFlag::PROMPT_LOGPROBS);

struct Writer {
  uint8_t* inbound;
  const uint8_t* outbound;
  std::mt19937_64 random;

  void flip(uint32_t* word, uint32_t good) { put(word, random() % 4 == 0 ? static_cast<uint32_t>(random()) : good); }

  // Both ends of the ring stay committed for the position that the scheduler waits for.
  void act() {
    const uint32_t c = static_cast<uint32_t>(random() % kSizes.channels);
    const InboundLayout in(kSizes);
    const OutboundLayout out(kSizes);
    uint8_t* own = inbound + in.channel_offset(c);
    auto* control = reinterpret_cast<ChannelIn*>(own + in.channel_control_offset);
    auto* status = reinterpret_cast<const ChannelOut*>(outbound + out.channel_offset(c) + out.channel_control_offset);
    auto* heap = reinterpret_cast<uint32_t*>(own + in.channel_heap_offset);
    const uint64_t lease = get(&status->lease), written = get(&status->log_written);
    const uint64_t position = get(&status->submit_read), cancelled = get(&status->cancel_read);
    auto* submit = reinterpret_cast<SubmitRecord*>(own + in.channel_submit_offset) + position % kSizes.submit_slots;
    auto* cancel = reinterpret_cast<CancelRecord*>(own + in.channel_cancel_offset) + cancelled % kSizes.cancel_slots;
    switch (random() % 16) {
      case 0:
        put(&control->lease, random() % 64 == 0 ? random() : random() % 4 == 0 || lease == 0 ? lease + 1 : lease);
        break;
      case 1:
        put(&control->log_read, random() % 4 == 0 ? random() : written);
        break;
      case 2:
        put(&cancel->target, random() % 2 == 0 ? random() : position - random() % 4);
        put(&cancel->commit, CommitWord{1 + cancelled / kSizes.cancel_slots, lease}.pack());
        break;
      case 3:
        flip(heap + random() % kSizes.heap_tokens, 7);
        break;
      case 4:
        flip(&submit->stop_count, 2);
        flip(&submit->stop_tokens[random() % 8], 9);
        break;
      case 5:
        flip(&submit->max_tokens, 6);
        flip(&submit->min_tokens, 2);
        flip(&submit->logprobs, 2);
        flip(&submit->flags, kScore);
        break;
      case 6:
        flip(&submit->bias_count, 1);
        flip(&submit->bias_offset, 20);
        flip(&submit->ban_words, 6);
        for (uint32_t i = 0; i < 6; ++i) flip(heap + 22 + i, i % 3 == 0 ? BAN_LENGTH + 2 : 7);
        put(&submit->priority, static_cast<uint32_t>(random()));
        break;
      default:
        flip(&submit->prompt_offset, 3);
        flip(&submit->prompt_tokens, 11);
        put(&submit->max_tokens, 5u);
        if (random() % 2 == 0) put(&submit->ban_words, 0u);  // six more words seldom all are good
        put(&submit->flags, random() % 4 == 0 ? kScore : 0u);
        put(&submit->top_p, 0x3F800000u);  // 1.0
        put(&submit->commit, CommitWord{1 + position / kSizes.submit_slots, lease}.pack());
        flip(&submit->prompt_tokens, 11);
        flip(&submit->prompt_offset, 3);
    }
  }
};

// Entries as they were checked: of the vocabulary, ascending, and not too many.
const char* check_bias(const blink_plan_view& plan) {
  for (uint32_t r = 0; r < plan.header->rows; ++r) {
    if ((plan.rows[r].flags & static_cast<uint32_t>(blink::layout::RowFlag::EXTRAS)) == 0) continue;
    const uint32_t slot = plan.rows[r].slot;
    const uint32_t count = plan.extras[slot].bias_count;
    if (count > MAX_BIAS) return "too many bias entries are used";
    const blink::layout::BiasEntry* entries = plan.bias + uint64_t{slot} * MAX_BIAS;
    for (uint32_t i = 0; i < count; ++i) {
      if (entries[i].token >= kVocabulary) return "a bias entry's token is outside the vocabulary";
      if (i > 0 && entries[i].token <= entries[i - 1].token) return "the bias entries do not ascend";
    }
  }
  return nullptr;
}

// Banned sequences as they were checked: a place for each length, then tokens of the vocabulary, counted down.
const char* check_bans(const blink_plan_view& plan) {
  for (uint32_t r = 0; r < plan.header->rows; ++r) {
    if ((plan.rows[r].flags & static_cast<uint32_t>(blink::layout::RowFlag::EXTRAS)) == 0) continue;
    const uint32_t slot = plan.rows[r].slot;
    const uint32_t count = plan.extras[slot].ban_words;
    if (count > MAX_BAN_WORDS) return "too many words of banned sequences are used";
    const blink::layout::BanToken* bans = plan.bans + uint64_t{slot} * MAX_BAN_WORDS;
    uint32_t behind = 0;  // of the token before
    for (uint32_t i = 0; i < count; ++i) {
      const bool length = bans[i].token == ~0u && bans[i].behind == 0;
      if (!length && bans[i].token >= kVocabulary) return "a banned token is outside the vocabulary";
      if (length ? behind != 0 : behind != 0 && bans[i].behind != behind - 1) return "a banned sequence has a hole";
      behind = bans[i].behind;
    }
    if (behind != 0) return "a banned sequence has no end";
  }
  return nullptr;
}

// Known tokens of the prompt are looked up in the logits by their ids.
const char* check_known(const blink_plan_view& plan, uint32_t window) {
  for (uint32_t r = 0; r < plan.header->rows; ++r) {
    const blink::layout::SampleRow& row = plan.rows[r];
    if (row.flags != static_cast<uint32_t>(blink::layout::RowFlag::KNOWN)) continue;
    if (row.position >= window || plan.history[uint64_t{row.slot} * window + row.position] >= kVocabulary) {
      return "a known token is outside the vocabulary";
    }
  }
  return nullptr;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const uint64_t tokens = strtoull(argv[2], nullptr, 10);
  const size_t in_bytes = InboundLayout(kSizes).total_bytes, out_bytes = OutboundLayout(kSizes).total_bytes;
  auto* inbound = static_cast<uint8_t*>(aligned_alloc(64, in_bytes));
  auto* outbound = static_cast<uint8_t*>(aligned_alloc(64, out_bytes));
  memset(inbound, 0, in_bytes);
  memset(outbound, 0, out_bytes);
  const auto config = small_config();
  blink_scheduler* scheduler = blink_scheduler_create(&config, inbound, in_bytes, outbound, out_bytes);
  if (scheduler == nullptr) return 2;
  blink_plan_view plan;
  blink_scheduler_plan(scheduler, &plan);
  std::atomic<bool> done{false};
  std::thread writer([&] {
    Writer hostile{inbound, outbound, std::mt19937_64(strtoull(argv[1], nullptr, 10))};
    while (!done.load()) hostile.act();
  });
  const auto* telemetry = reinterpret_cast<const Telemetry*>(outbound + OutboundLayout(kSizes).telemetry_offset);
  const char* broken = nullptr;
  for (uint64_t now = 1; now < kMostSteps && telemetry->generated_tokens < tokens && broken == nullptr; ++now) {
    for (uint32_t r = 0; r < plan.header->rows; ++r) plan.sampled[r] = static_cast<int32_t>(now % kVocabulary);
    blink_scheduler_step(scheduler, now, 0);
    broken = blink_scheduler_audit(scheduler);
    if (broken == nullptr) broken = check_bias(plan);
    if (broken == nullptr) broken = check_bans(plan);
    if (broken == nullptr) broken = check_known(plan, config.max_model_tokens);
    for (uint32_t t = 0; t < plan.header->tokens; ++t) {
      if (static_cast<uint32_t>(plan.token_ids[t]) >= kVocabulary)
        broken = "a token outside the vocabulary is computed";
    }
  }
  done.store(true);
  writer.join();
  printf("%llu %llu %llu\n", static_cast<unsigned long long>(telemetry->steps),
         static_cast<unsigned long long>(telemetry->generated_tokens),
         static_cast<unsigned long long>(telemetry->rejected));
  blink_scheduler_destroy(scheduler);
  free(inbound);
  free(outbound);
  if (broken != nullptr) fprintf(stderr, "invariant: %s\n", broken);
  return broken == nullptr ? 0 : 1;
}
