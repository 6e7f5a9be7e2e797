// Access to memory that the other side of the bus reads or writes at the same time. Every word is loaded once into
// private memory before anything looks at it.
#pragma once
#include <cstdint>

#include "scheduler/bits.h"

namespace blink {

#ifdef __CUDA_ARCH__

// System scope: the writer may be a network card on the other side of the bus.
BLINK_FN uint64_t load_acquire(const uint64_t* word) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

BLINK_FN uint64_t load_relaxed(const uint64_t* word) {
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

BLINK_FN uint32_t load_relaxed(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

BLINK_FN float load_relaxed(const float* word) {
  float value;
  asm volatile("ld.relaxed.sys.global.f32 %0, [%1];" : "=f"(value) : "l"(word) : "memory");
  return value;
}

BLINK_FN void store_release(uint64_t* word, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

BLINK_FN void store_relaxed(uint64_t* word, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

// Two words, on a boundary of 16 bytes, in one store.
BLINK_FN void store_zeros(uint64_t* words) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %1};" ::"l"(words), "l"(uint64_t{0}) : "memory");
}

#else

template <class T>
BLINK_FN T load_acquire(const T* word) {
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

template <class T>
BLINK_FN T load_relaxed(const T* word) {
  return __atomic_load_n(word, __ATOMIC_RELAXED);
}

BLINK_FN float load_relaxed(const float* word) {
  float value;
  __atomic_load(word, &value, __ATOMIC_RELAXED);
  return value;
}

template <class T>
BLINK_FN void store_release(T* word, T value) {
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

template <class T>
BLINK_FN void store_relaxed(T* word, T value) {
  __atomic_store_n(word, value, __ATOMIC_RELAXED);
}

BLINK_FN void store_zeros(uint64_t* words) {
  store_relaxed(words, uint64_t{0});
  store_relaxed(words + 1, uint64_t{0});
}

#endif

// Within the scheduler's own memory, between its threads: the result does not depend on their order.
BLINK_FN void add_among_threads(uint32_t* word, uint32_t value) {
#ifdef __CUDA_ARCH__
  atomicAdd(word, value);
#else
  *word += value;
#endif
}

BLINK_FN void raise_among_threads(uint32_t* word, uint32_t value) {
#ifdef __CUDA_ARCH__
  atomicMax(word, value);
#else
  *word = *word > value ? *word : value;
#endif
}

BLINK_FN uint32_t exchange_among_threads(uint32_t* word, uint32_t value) {
#ifdef __CUDA_ARCH__
  return atomicExch(word, value);
#else
  const uint32_t before = *word;
  *word = value;
  return before;
#endif
}

// log2 of a power of two. Ring sizes are such, and the GPU has no division.
BLINK_FN uint32_t log2_of(uint32_t power_of_two) {
#ifdef __CUDA_ARCH__
  return static_cast<uint32_t>(__ffs(static_cast<int>(power_of_two))) - 1;
#else
  return static_cast<uint32_t>(__builtin_ctz(power_of_two));
#endif
}

// How often a ring of so many slots has been gone round before a position.
BLINK_FN uint64_t rounds_before(uint64_t position, uint32_t slots) { return position >> log2_of(slots); }

// Copies a record word by word; the caller has seen its commit word by load_acquire.
template <class Record>
BLINK_FN Record copy_record(const Record* from) {
  static_assert(sizeof(Record) % 8 == 0);
  union {
    uint64_t words[sizeof(Record) / 8];
    Record record;
  } copy;
  const auto* source = reinterpret_cast<const uint64_t*>(from);
  for (uint32_t i = 0; i < sizeof(Record) / 8; ++i) copy.words[i] = load_relaxed(source + i);
  return copy.record;
}

}  // namespace blink
