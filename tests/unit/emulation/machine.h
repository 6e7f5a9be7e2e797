// One thread block of a GPU on a host thread, for kernels whose hardware instructions are functions: every GPU thread
// is a fiber, resumed in random order. Bulk copies land late and in random order; their target is poisoned when they
// start, so that a reader that was not waited for sees it. What the kernel in front computes appears late as well.
#pragma once

#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __forceinline__
#define __shared__
#define __align__(bytes)
#define __launch_bounds__(...)
#define __grid_constant__

struct Index {
  int x;
};
extern thread_local Index threadIdx, blockIdx, gridDim;
extern "C" unsigned char shared[];

namespace emulation {

[[noreturn]] inline void fail(const char* reason) {
  std::fprintf(stderr, "emulation: %s (block %d, thread %d)\n", reason, blockIdx.x, threadIdx.x);
  std::_Exit(70);
}

inline bool progress = false;  // since the scheduler last looked

// An mbarrier.
struct Barrier {
  int arrivals = 0, pending = 0, bytes = 0;
  uint32_t phase = 0;

  void init(uint32_t count) { arrivals = pending = static_cast<int>(count); }
  void arrive(int expected) {
    if (pending <= 0) fail("an arrival too many");
    bytes += expected, --pending, turn();
  }
  void landed(int count) { bytes -= count, turn(); }
  void turn() {
    if (pending == 0 && bytes == 0) pending = arrivals, ++phase, progress = true;
  }
};

struct Meeting {
  int arrived = 0, generation = 0;
};

// Where the 32 lanes of a warp hand over operands and take results.
struct Warp {
  Meeting meeting;
  alignas(16) unsigned char values[32 * 64], results[32 * 64];
};

struct Copy {
  uint32_t to, bytes, barrier;
  const void* from;
};

struct Machine {
  int threads = 0, shared_bytes = 0;
  std::mt19937 random;
  std::map<uint32_t, Barrier> barriers;
  std::vector<Warp> warps;
  std::vector<Copy> copies;
  Meeting block_barrier, named_barrier;
  bool previous_ended = false, let_in = false;
  std::function<void()> end_previous;
  std::vector<ucontext_t> fibers;
  std::vector<bool> ended;
  ucontext_t scheduler;
};
extern Machine machine;

inline void yield() { swapcontext(&machine.fibers[threadIdx.x], &machine.scheduler); }

template <class Condition>
void wait_until(Condition condition) {
  while (!condition()) yield();
}

inline Barrier& barrier_at(uint32_t address) {
  if (address % 8 != 0 || address + 8 > static_cast<uint32_t>(machine.shared_bytes)) fail("no barrier there");
  return machine.barriers[address];
}

inline unsigned char* shared_bytes(uint32_t address, uint32_t count) {
  if (address + count > static_cast<uint32_t>(machine.shared_bytes)) fail("outside shared memory");
  return shared + address;
}

inline void meet(Meeting& meeting, int threads) {
  const int generation = meeting.generation;
  if (++meeting.arrived == threads) {
    meeting.arrived = 0, ++meeting.generation;
    return;
  }
  wait_until([&] { return meeting.generation != generation; });
}

template <class Result, class Value, class Compute>
Result in_warp_as(const Value& value, Compute compute) {
  static_assert(sizeof(Value) <= 64 && sizeof(Result) <= 64);
  Warp& warp = machine.warps[threadIdx.x / 32];
  const int lane = threadIdx.x % 32;
  auto* values = reinterpret_cast<Value*>(warp.values);
  auto* results = reinterpret_cast<Result*>(warp.results);
  values[lane] = value;
  const bool last = warp.meeting.arrived == 31;
  if (last) compute(values, results);
  meet(warp.meeting, 32);
  return results[lane];
}

template <class Value, class Compute>
Value in_warp(const Value& value, Compute compute) {
  return in_warp_as<Value>(value, compute);
}

inline void start_copy(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  if (to % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0 || bytes % 16 != 0) fail("a copy is not aligned");
  if (bytes == 0) fail("an empty copy");
  std::memset(shared_bytes(to, bytes), 0xff, bytes);
  machine.copies.push_back({to, bytes, barrier, from});
}

inline void land_a_copy() {
  const size_t index = machine.random() % machine.copies.size();
  const Copy copy = machine.copies[index];
  machine.copies[index] = machine.copies.back();
  machine.copies.pop_back();
  unsigned char* to = shared_bytes(copy.to, copy.bytes);
  copy.from != nullptr ? std::memcpy(to, copy.from, copy.bytes) : std::memset(to, 0, copy.bytes);
  barrier_at(copy.barrier).landed(static_cast<int>(copy.bytes));
  progress = true;
}

// Runs a block of the kernel to its end; `end_previous` writes what the kernel in front computes.
void run_block(int threads, int shared_bytes, uint32_t seed, const std::function<void()>& kernel);

}  // namespace emulation

inline void __syncthreads() { emulation::meet(emulation::machine.block_barrier, emulation::machine.threads); }
