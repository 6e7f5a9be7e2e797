// Before the first step: checks a configuration and lays out the state in one piece of memory. On the host.
#pragma once
#include "scheduler/foreseen.h"
#include "scheduler/idle_blocks.h"

namespace blink {

inline arena::Sizes sizes_of(const layout::SchedulerConfig& config) {
  return {config.channels, config.submit_slots, config.cancel_slots, config.log_slots, config.heap_tokens};
}

inline bool power_of_two(uint32_t value) { return value != 0 && (value & (value - 1)) == 0; }

inline const char* check_rings(const layout::SchedulerConfig& config) {
  if (config.channels == 0 || config.channels > arena::MAX_CHANNELS) return "channels out of range";
  if (!power_of_two(config.submit_slots) || config.submit_slots > 1u << 20) return "submit_slots: no power of two";
  if (!power_of_two(config.cancel_slots) || config.cancel_slots > 1u << 20) return "cancel_slots: no power of two";
  if (!power_of_two(config.log_slots) || config.log_slots > 1u << 24) return "log_slots: no power of two";
  if (config.heap_tokens == 0 || config.heap_tokens > 1u << 30) return "heap_tokens out of range";
  return nullptr;
}

inline const char* check_buckets(const layout::SchedulerConfig& config) {
  if (config.bucket_count == 0 || config.bucket_count > layout::MAX_BUCKETS) return "bucket_count out of range";
  for (uint32_t b = 0; b < config.bucket_count; ++b) {
    const uint32_t below = b == 0 ? 0 : config.buckets[b - 1];
    if (config.buckets[b] <= below) return "buckets do not ascend";
  }
  if (config.buckets[config.bucket_count - 1] < config.token_budget) return "the last bucket is below token_budget";
  return nullptr;
}

inline const char* check_limits(const layout::SchedulerConfig& config) {
  if (config.vocab_size == 0 || config.vocab_size > 0x7FFFFFFFu) return "vocab_size out of range";
  if (config.max_model_tokens < 2 || config.max_model_tokens > 1u << 28) return "max_model_tokens out of range";
  if (config.max_sequences == 0 || config.max_sequences > 1u << 16) return "max_sequences out of range";
  if (config.max_running == 0 || config.max_running > config.max_sequences) return "max_running out of range";
  if (config.max_running > 0xFFFFu) return "max_running out of range";
  if (config.token_budget < config.max_running || config.token_budget > 1u << 24) return "token_budget out of range";
  if (config.block_tokens == 0 || config.block_tokens > 4096) return "block_tokens out of range";
  if (config.blocks < 2 || uint64_t{config.blocks} * config.block_tokens > 0x7FFFFFFFu) return "blocks out of range";
  if (config.blocks_per_sequence == 0) return "blocks_per_sequence out of range";
  if (config.eos_count > layout::MAX_EOS_TOKENS) return "eos_count out of range";
  if (config.intake_tokens == 0) return "intake_tokens out of range";
  if (config.prefix_cache > 1) return "prefix_cache out of range";
  if (uint64_t{config.max_running} * config.blocks_per_sequence > 0xFFFFFFFFu)
    return "blocks_per_sequence out of range";
  return nullptr;
}

// Lays arrays one behind the other; with no memory it only counts.
class Carver {
 public:
  explicit Carver(uint8_t* memory) : memory_(memory) {}

  template <class T>
  void take(T*& array, uint64_t count) {
    at_ = arena::align_up(at_, 64);
    if (memory_ != nullptr) array = reinterpret_cast<T*>(memory_ + at_);
    at_ += count * sizeof(T);
  }

  uint64_t bytes() const { return at_; }

 private:
  uint8_t* memory_;
  uint64_t at_ = 0;
};

inline uint64_t max_decode_tiles(uint64_t works) {
  return works + (works * 2 > layout::SPARE_TILES ? works * 2 : layout::SPARE_TILES);
}

inline uint64_t max_chunk_tiles(const layout::SchedulerConfig& config) {
  return config.buckets[config.bucket_count - 1] / layout::CHUNK_TILE + config.max_running;
}

inline void carve_cache(State& state, Carver& carver) {
  const layout::SchedulerConfig& config = state.config;
  const uint64_t on = config.prefix_cache;
  carver.take(state.cached, on * config.blocks);
  carver.take(state.cached_tokens, on * config.blocks * config.block_tokens);
  carver.take(state.buckets, on * bucket_count(config));
  carver.take(state.bucket_owners, on * bucket_count(config));
  carver.take(state.idle, on * bucket_count(config));
  carver.take(state.idle_next, on * bucket_count(config));
  carver.take(state.prefixes, on * config.max_sequences);
  carver.take(state.keys, on * config.max_sequences * config.blocks_per_sequence);
  carver.take(state.matches, on * config.blocks_per_sequence);
}

inline uint64_t carve(State& state, uint8_t* memory) {
  const layout::SchedulerConfig& config = state.config;
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
  carver.take(state.row_ranks, config.max_running);
  carver.take(state.row_counts, config.channels);
  carver.take(state.works, config.max_running);
  carver.take(state.rows, config.max_running);
  carver.take(state.decode_tiles, max_decode_tiles(config.max_running));
  carver.take(state.chunk_tiles, max_chunk_tiles(config));
  carver.take(state.token_ids, step_tokens);
  carver.take(state.positions, step_tokens);
  carver.take(state.kv_slots, step_tokens);
  int32_t* sampled = nullptr;
  carver.take(sampled, config.max_running);
  state.sampled = sampled;
  layout::RowLogprobs* sampled_logprobs = nullptr;
  carver.take(sampled_logprobs, config.max_running);
  state.sampled_logprobs = sampled_logprobs;
  carver.take(state.log_at, config.max_running);
  carver.take(state.listed, sequences);
  carver.take(state.spans, sequences);
  carver.take(state.foreseen, 1);
  carver.take(state.extras, sequences);
  carver.take(state.block_table, sequences * config.blocks_per_sequence);  // all that follows is zero at first
  carve_cache(state, carver);
  carver.take(state.bias, sequences * arena::MAX_BIAS);
  carver.take(state.bans, sequences * arena::MAX_BAN_WORDS);
  carver.take(state.history, sequences * config.max_model_tokens);
  return carver.bytes();
}

// Fills the pools so that low ids are given out first.
inline void fill_pools(State& state) {
  const layout::SchedulerConfig& config = state.config;
  for (uint32_t i = 0; i < config.max_sequences; ++i) state.free_slots[i] = config.max_sequences - 1 - i;
  state.free_slot_count = config.max_sequences;
  for (uint32_t i = 0; i + 1 < config.blocks; ++i) state.free_blocks[i] = config.blocks - 1 - i;
  state.free_block_count = config.blocks - 1;
  state.bucket_mask = bucket_count(config) - 1;
  state.idle_head = state.idle_tail = 1;
}

// Null, or what is wrong with a configuration.
inline const char* check_config(const layout::SchedulerConfig& config) {
  if (const char* wrong = check_rings(config)) return wrong;
  if (const char* wrong = check_limits(config)) return wrong;
  return check_buckets(config);
}

}  // namespace blink
