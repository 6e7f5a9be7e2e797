// The scheduler on emulated threads, with a front end that answers within the very store that tells it of its lease:
// what the scheduler wipes after that is lost to it. And with one that looks within the store that tells of the end.
#include <cstring>

#include "fibers.h"

#define store_release store_release_alone
#include "scheduler/memory.h"
#undef store_release
#include "blink_proto/arena.h"

namespace {

struct {
  const blink::arena::ChannelOut* status;
  uint64_t lease;
  void* to;
  const void* from;
  uint64_t bytes;
} answer;

struct {
  const blink::arena::ChannelOut* status;
  const void* from;
  void* to;
  uint64_t bytes;
} look;

}  // namespace

namespace blink {

template <class T>
void store_release(T* word, T value) {
  store_release_alone(word, value);
  if (look.status != nullptr && look.status->live == 0) {
    std::memcpy(look.to, look.from, look.bytes);
    look.status = nullptr;
  }
  if (answer.status == nullptr || answer.status->lease != answer.lease || answer.status->live == 0) return;
  std::memcpy(answer.to, answer.from, answer.bytes);
  answer.status = nullptr;
}

}  // namespace blink

#include "scheduler_block.cpp"

// Has so many bytes written as soon as that lease shows.
extern "C" BLINK_EXPORT void blink_answer_at_once(const blink::arena::ChannelOut* status, uint64_t lease, void* to,
                                                  const void* from, uint64_t bytes) {
  answer = {status, lease, to, from, bytes};
}

// Has so many bytes read as soon as the end of a lease shows.
extern "C" BLINK_EXPORT void blink_look_at_once(const blink::arena::ChannelOut* status, const void* from, void* to,
                                                uint64_t bytes) {
  look = {status, from, to, bytes};
}
