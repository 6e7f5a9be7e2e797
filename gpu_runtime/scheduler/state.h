// Everything that the scheduler remembers from step to step, and where it lies.
#pragma once
#include <cstdint>

#include "blink_proto/arena.h"
#include "scheduler/exec.h"
#include "scheduler/layout.h"

namespace blink {

enum class Status : uint32_t {
  kFree = 0,
  kWaiting,  // taken, holds no blocks
  kRunning,  // admitted
  kEnding,   // over; its END record waits for room in the log
};

struct alignas(16) Sequence {
  Status status;
  uint32_t channel;
  uint64_t position;  // of its submission in the submit ring
  uint32_t prompt_tokens;
  uint32_t max_tokens;
  uint32_t length;    // tokens known: prompt + generated
  uint32_t computed;  // of those, in the KV cache
  uint32_t blocks;    // entries of its block table row in use
  uint32_t reserved;  // blocks it may come to need
  uint32_t query;     // tokens of it in the planned step
  uint32_t room;      // tokens that it may bring in the planned step, sampled or scored
  arena::Finish finish;
  arena::ErrorCode error;
  uint32_t flags;
  uint32_t top_k;
  float temperature;
  float top_p;
  uint64_t seed;
  uint32_t logprobs;    // LOGPROB records that come with each of its tokens
  uint32_t min_tokens;  // its stop tokens are masked before so many are generated
  int32_t priority;     // class by which it is admitted, the lowest first
  uint16_t extras;      // the slot's SampleExtras count
  uint16_t stop_count;
  uint32_t stop_tokens[arena::MAX_STOP_TOKENS];
};
static_assert(sizeof(Sequence) == 128, "two sectors of 64 bytes: a step reads each live one");

struct alignas(16) Channel {
  uint64_t lease;       // last accepted
  uint64_t lease_seen;  // last word read, to count a wrong one once
  uint32_t live;
  uint32_t ending;  // its sequences that wait for room for their END record
  uint32_t drop;    // a lease has just ended; live: the next one begins
  uint64_t heartbeat;
  uint64_t heartbeat_ns;  // when that value was first seen
  uint64_t submit_next;
  uint64_t cancel_next;
  uint64_t log_start;
  uint64_t log_next;
  uint64_t log_read;
  uint64_t log_read_seen;
  uint64_t heartbeat_now, log_read_now;  // scratch of a steady step: what its look has read
  uint64_t rejected;
  uint64_t protocol_errors;
};

struct Cancel {
  uint32_t channel;
  uint64_t target;
};

// The submission that intake is looking at: read once by one thread, then the same for all.
struct Staged {
  uint32_t present;
  uint32_t slot;
  uint32_t passes;         // it may have to stand before others in the order
  arena::ErrorCode error;  // of what is checked before the prompt's tokens
  arena::ErrorCode late;   // of what is checked after them
  arena::SubmitRecord record;
};

// What the prefix cache knows of a block; all zero: nothing. An indexed block can be found by what it holds. Its
// parent, the block with the tokens before, is indexed for as long as it is.
struct alignas(16) CachedBlock {
  uint64_t key;      // of all tokens of the sequence up to the block's last one
  uint64_t salt;     // of the submission, when there is no block before
  uint64_t idle_at;  // place in the queue of idle blocks; 0 while sequences hold it
  uint32_t parent;   // kNoBlock: there is no block before
  uint32_t parent_generation;
  uint32_t generation;  // how often it was evicted
  uint32_t next;        // in its bucket; kNoBlock: it is the last one
  uint32_t holders;     // sequences that hold it
  uint32_t indexed;
  uint32_t released_by;  // scratch of a release
};

// The scratch block is in no index and in no sequence's row.
inline constexpr uint32_t kNoBlock = layout::SCRATCH_BLOCK;

// What the prefix cache knows of a sequence.
struct Prefix {
  uint64_t salt;
  uint64_t key;      // of no tokens
  uint32_t hashed;   // entries of its row of keys
  uint32_t indexed;  // first blocks of its row that are indexed; each is the parent of the next. Others are its own
  uint32_t found;    // blocks that it was admitted with
};

struct Counters {
  uint64_t heartbeat, steps, prompt_tokens, generated_tokens;
  uint64_t prefix_queries, prefix_hits;
  uint64_t finished[5];  // by arena::Finish
  uint64_t log_stalls;
};

struct Foreseen;

// All arrays are sized by the configuration and lie behind the State itself, in one piece of memory.
struct alignas(16) State {
  layout::SchedulerConfig config;
  arena::InboundLayout inbound_layout;
  arena::OutboundLayout outbound_layout;
  uint8_t* inbound;  // read, but for what is wiped when a lease begins
  uint8_t* outbound;

  Sequence* sequences;    // [max_sequences]
  Channel* channels;      // [channels]
  uint32_t* order;        // [max_sequences] slots of live sequences, by arrival, the waiting ones by class first
  uint32_t* order_next;   // scratch for changing it
  uint32_t* free_slots;   // stack
  uint32_t* free_blocks;  // stack
  uint32_t* history;      // [max_sequences][max_model_tokens] token ids
  uint32_t* counts;       // [channels] scratch
  uint32_t* row_ranks;    // [max_running] place of each planned row's record in its channel's log, for a steady step
  uint32_t* row_counts;   // [channels] records of each channel's planned rows, for a steady step
  Foreseen* foreseen;     // [1] what is known of the next step before the tokens are (foreseen.h)
  uint64_t* log_at;       // [max_running] position of a row's record in its token log, when rows want log-probabilities
  uint32_t* listed;       // [max_sequences] scratch: slots of the sequences that a phase goes through
  uint64_t* spans;        // [max_sequences] scratch: items of the sequences before (items.h)

  // The prefix cache (prefix_table.h, prefix_cache.h, idle_blocks.h); of no length without one.
  CachedBlock* cached;      // [blocks]
  uint32_t* cached_tokens;  // [blocks][block_tokens] what an indexed block holds
  uint32_t* buckets;        // [bucket_count(config)] first block of each
  uint32_t* bucket_owners;  // [bucket_count(config)] scratch
  uint32_t* idle;           // [bucket_count(config)] queue of idle blocks: indexed, held by no sequence
  uint32_t* idle_next;      // scratch for closing its gaps
  Prefix* prefixes;         // [max_sequences]
  uint64_t* keys;           // [max_sequences][blocks_per_sequence] key of each full block
  uint32_t* matches;        // [blocks_per_sequence] scratch: indexed blocks with the tokens of a sequence's
  uint32_t matched;         // scratch: how many of them are its prefix
  uint64_t bucket_mask;     // bucket_count(config) - 1
  uint64_t idle_head;       // place of the queue's first entry
  uint64_t idle_tail;       // place after its last one, never 0
  uint64_t evict_head;      // scratch

  Cancel cancels[layout::MAX_CANCELS_PER_STEP];
  uint32_t cancel_count;
  Staged staged;

  uint32_t live;             // entries of order
  uint32_t free_slot_count;  // entries of free_slots
  uint32_t free_block_count;
  uint32_t held_blocks;      // blocks that sequences hold, each counted once
  uint32_t reserved_blocks;  // those, and what running sequences may come to need beyond what they hold
  uint32_t running;
  uint32_t round_start;  // channel that intake begins with
  uint32_t draining;
  uint32_t steady;            // the next step may be a steady one (steady.h)
  uint32_t scoring;           // the plan may have rows of known tokens
  uint64_t decode_positions;  // KV positions that the planned decodes read
  Counters counters;

  // The plan, read by the step's kernels.
  layout::StepHeader header;
  layout::Work* works;                          // [max_running]
  layout::SampleRow* rows;                      // [max_running]
  layout::Tile* decode_tiles;                   // [max_decode_tiles(max_running)]
  layout::Tile* chunk_tiles;                    // [max_chunk_tiles(config)]
  int32_t* token_ids;                           // [last bucket]
  int32_t* positions;                           // [last bucket]
  int32_t* kv_slots;                            // [last bucket]
  int32_t* block_table;                         // [max_sequences][blocks_per_sequence]
  const int32_t* sampled;                       // [max_running] tokens that the last step sampled, one for each row
  const layout::RowLogprobs* sampled_logprobs;  // [max_running] filled for rows that want them
  layout::SampleExtras* extras;                 // [max_sequences]
  layout::BiasEntry* bias;                      // [max_sequences][MAX_BIAS]
  layout::BanToken* bans;                       // [max_sequences][MAX_BAN_WORDS]
};

BLINK_FN bool has_flag(uint32_t flags, arena::SubmitFlag flag) { return (flags & static_cast<uint32_t>(flag)) != 0; }

// Each token that it computes next brings the log-probabilities of the prompt's token behind it.
BLINK_FN bool scores(const Sequence& sequence) {
  return has_flag(sequence.flags, arena::SubmitFlag::PROMPT_LOGPROBS) && sequence.computed + 1 < sequence.prompt_tokens;
}

// Tokens that it has yet to compute, of those that are known. The last token of a prompt that is only scored is none.
BLINK_FN uint32_t tokens_left(const Sequence& sequence) {
  return sequence.length - (sequence.max_tokens == 0) - sequence.computed;
}

BLINK_FN uint32_t* history_of(const State& state, uint32_t slot) {
  return state.history + uint64_t{slot} * state.config.max_model_tokens;
}

BLINK_FN layout::BiasEntry* bias_of(const State& state, uint32_t slot) {
  return state.bias + uint64_t{slot} * arena::MAX_BIAS;
}

BLINK_FN layout::BanToken* bans_of(const State& state, uint32_t slot) {
  return state.bans + uint64_t{slot} * arena::MAX_BAN_WORDS;
}

BLINK_FN int32_t* blocks_of(const State& state, uint32_t slot) {
  return state.block_table + uint64_t{slot} * state.config.blocks_per_sequence;
}

// Indexed blocks that no sequence holds: those that may be evicted.
BLINK_FN uint32_t idle_blocks(const State& state) {
  return state.config.blocks - 1 - state.free_block_count - state.held_blocks;
}

BLINK_FN uint32_t blocks_for(const State& state, uint64_t tokens) {
  return static_cast<uint32_t>((tokens + state.config.block_tokens - 1) / state.config.block_tokens);
}

template <class T>
BLINK_FN T* inbound_part(const State& state, uint32_t channel, uint64_t part_offset) {
  return reinterpret_cast<T*>(state.inbound + state.inbound_layout.channel_offset(channel) + part_offset);
}

template <class T>
BLINK_FN T* outbound_part(const State& state, uint32_t channel, uint64_t part_offset) {
  return reinterpret_cast<T*>(state.outbound + state.outbound_layout.channel_offset(channel) + part_offset);
}

BLINK_FN arena::SubmitRecord* submit_ring(const State& state, uint32_t channel) {
  return inbound_part<arena::SubmitRecord>(state, channel, state.inbound_layout.channel_submit_offset);
}

BLINK_FN arena::CancelRecord* cancel_ring(const State& state, uint32_t channel) {
  return inbound_part<arena::CancelRecord>(state, channel, state.inbound_layout.channel_cancel_offset);
}

BLINK_FN arena::ChannelIn* channel_in(const State& state, uint32_t channel) {
  return inbound_part<arena::ChannelIn>(state, channel, state.inbound_layout.channel_control_offset);
}

BLINK_FN arena::ChannelOut* channel_out(const State& state, uint32_t channel) {
  return outbound_part<arena::ChannelOut>(state, channel, state.outbound_layout.channel_control_offset);
}

}  // namespace blink
