// Runs a block of CUDA threads on one host thread, for tests of device code without a device. Every thread is a fiber
// that runs until it must wait for others; which one goes on next is drawn at random, so that a missing barrier shows
// sooner or later. What CUDA would deadlock on ends the process.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#define __device__
#define __noinline__ __attribute__((noinline))

struct Dim {
  uint32_t x = 0, y = 0, z = 0;
};
inline Dim threadIdx, blockIdx, blockDim;

struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace fibers {

constexpr uint32_t kLanes = 32;
constexpr size_t kStackBytes = 128 << 10;

struct Fiber {
  ucontext_t first;
  jmp_buf at;
  std::unique_ptr<char[]> stack;
  bool started = false, done = false;
  const uint64_t* waits_for = nullptr;  // runs on when that generation is no longer `seen`
  uint64_t seen = 0;
};

// Those that wait for each other: the block, or a warp.
struct Group {
  uint32_t size = 0, arrived = 0;
  uint64_t generation = 0;
};

class Block {
 public:
  Block(uint32_t threads, uint64_t seed) : fibers_(threads), warps_(threads / kLanes), slots_(threads), random_(seed) {
    all_.size = threads;
    for (Group& warp : warps_) warp.size = kLanes;
    for (Fiber& fiber : fibers_) fiber.stack.reset(new char[kStackBytes]);
  }

  void run(std::function<void()> body) {
    body_ = std::move(body);
    blockDim.x = static_cast<uint32_t>(fibers_.size());
    current_block_ = this;
    for (Fiber& fiber : fibers_) fiber.started = fiber.done = false;
    std::vector<uint32_t> order(fibers_.size());
    std::iota(order.begin(), order.end(), 0);
    for (size_t left = fibers_.size(); left > 0;) {
      std::shuffle(order.begin(), order.end(), random_);
      bool moved = false;
      for (uint32_t t : order) {
        Fiber& fiber = fibers_[t];
        if (fiber.done || (fiber.waits_for != nullptr && *fiber.waits_for == fiber.seen)) continue;
        moved = true;
        resume(t);
        left -= fiber.done;
      }
      if (!moved) {
        fprintf(stderr, "the block's threads wait for each other\n");
        abort();
      }
    }
  }

  void sync_block() { wait(all_); }
  void sync_warp() { wait(warps_[current_ / kLanes]); }

  // Every lane's value, as of the last write of each.
  uint64_t& slot(uint32_t thread) { return slots_[thread]; }
  uint32_t current() const { return current_; }
  static Block& now() { return *current_block_; }

 private:
  void wait(Group& group) {
    if (++group.arrived == group.size) {
      group.arrived = 0;
      ++group.generation;
      return;
    }
    Fiber& fiber = fibers_[current_];
    fiber.waits_for = &group.generation;
    fiber.seen = group.generation;
    if (_setjmp(fiber.at) == 0) _longjmp(scheduler_, 1);
    fiber.waits_for = nullptr;
  }

  void resume(uint32_t t) {
    Fiber& fiber = fibers_[t];
    current_ = t;
    threadIdx.x = t;
    if (_setjmp(scheduler_) != 0) return;
    if (fiber.started) _longjmp(fiber.at, 1);
    fiber.started = true;
    fiber.waits_for = nullptr;
    getcontext(&fiber.first);
    fiber.first.uc_stack.ss_sp = fiber.stack.get();
    fiber.first.uc_stack.ss_size = kStackBytes;
    fiber.first.uc_link = nullptr;
    makecontext(&fiber.first, &Block::enter, 0);
    setcontext(&fiber.first);
  }

  static void enter() {
    Block& block = now();
    block.body_();
    block.fibers_[block.current_].done = true;
    _longjmp(block.scheduler_, 1);
  }

  static inline Block* current_block_ = nullptr;
  std::vector<Fiber> fibers_;
  std::vector<Group> warps_;
  std::vector<uint64_t> slots_;
  Group all_;
  std::mt19937_64 random_;
  std::function<void()> body_;
  jmp_buf scheduler_;
  uint32_t current_ = 0;
};

// What `find` makes of the values of the warp's lanes: two waits, so that no slot is written before all have read.
template <class Find>
auto in_warp(uint64_t value, Find find) {
  Block& block = Block::now();
  const uint32_t thread = block.current();
  block.slot(thread) = value;
  block.sync_warp();
  const auto found = find(&block.slot(thread / kLanes * kLanes));
  block.sync_warp();
  return found;
}

// Bit l of the result: whether `holds` for the value of lane l.
template <class Holds>
uint32_t lanes(uint64_t value, Holds holds) {
  return in_warp(value, [&](const uint64_t* values) {
    uint32_t mask = 0;
    for (uint32_t lane = 0; lane < kLanes; ++lane) mask |= static_cast<uint32_t>(holds(values[lane])) << lane;
    return mask;
  });
}

}  // namespace fibers

inline void __syncthreads() { fibers::Block::now().sync_block(); }

inline void __syncwarp() { fibers::Block::now().sync_warp(); }

// How many threads of the block hold something other than 0.
inline int __syncthreads_count(int value) {
  fibers::Block& block = fibers::Block::now();
  block.slot(block.current()) = value != 0;
  block.sync_block();
  int count = 0;
  for (uint32_t thread = 0; thread < blockDim.x; ++thread) count += block.slot(thread) != 0;
  block.sync_block();
  return count;
}

inline int __syncthreads_and(int value) { return __syncthreads_count(value) == static_cast<int>(blockDim.x); }

inline int __syncthreads_or(int value) { return __syncthreads_count(value) != 0; }

inline uint64_t __shfl_xor_sync(uint32_t, uint64_t value, uint32_t mask) {
  const uint32_t lane = threadIdx.x % fibers::kLanes;
  return fibers::in_warp(value, [&](const uint64_t* values) { return values[lane ^ mask]; });
}

inline uint64_t __shfl_up_sync(uint32_t, uint64_t value, uint32_t delta) {
  const uint32_t lane = threadIdx.x % fibers::kLanes;
  return fibers::in_warp(value, [&](const uint64_t* values) { return values[lane >= delta ? lane - delta : lane]; });
}

inline uint64_t __shfl_sync(uint32_t, uint64_t value, uint32_t lane) {
  return fibers::in_warp(value, [&](const uint64_t* values) { return values[lane]; });
}

inline uint32_t __ballot_sync(uint32_t, uint64_t value) {
  return fibers::lanes(value, [](uint64_t other) { return other != 0; });
}

inline uint32_t __match_any_sync(uint32_t, uint32_t value) {
  return fibers::lanes(value, [&](uint64_t other) { return other == value; });
}

inline int __ffs(int value) { return __builtin_ffs(value); }

inline int __popc(uint32_t value) { return __builtin_popcount(value); }

template <class T>
T atomicAdd(T* word, T x) {
  const T before = *word;
  *word += x;
  return before;
}
