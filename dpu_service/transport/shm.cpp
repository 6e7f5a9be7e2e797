// Ordered access to shared memory for Python, which cannot order its own loads and stores on weakly ordered cores.
// Callers check ranges and alignment; every address here is one they computed from a mapping of known size.
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

static_assert(std::atomic<uint64_t>::is_always_lock_free, "words must be read and written whole");

#define BLINK_EXPORT extern "C" __attribute__((visibility("default")))

// Copies a payload in; a later blink_shm_commit publishes it.
BLINK_EXPORT void blink_shm_write(uint8_t* to, const uint8_t* from, size_t size) { std::memcpy(to, from, size); }

// Stores a word after everything written before it, then rings the bell: whoever sees the ring sees the word.
BLINK_EXPORT void blink_shm_commit(uint64_t* to, uint64_t word, uint64_t* bell) {
  __atomic_store_n(to, word, __ATOMIC_RELEASE);
  __atomic_fetch_add(bell, 1, __ATOMIC_RELEASE);
}

// Copies whole words out, then makes sure that nothing read later is older than they are.
BLINK_EXPORT void blink_shm_read(uint64_t* to, const uint64_t* from, size_t words) {
  for (size_t i = 0; i < words; ++i) to[i] = __atomic_load_n(from + i, __ATOMIC_RELAXED);
  std::atomic_thread_fence(std::memory_order_acquire);
}
