// The scheduler on emulated threads, with a front end that answers within the very store that tells it of its lease:
// what the scheduler wipes after that is lost to it.
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

}  // namespace

namespace blink {

template <class T>
void store_release(T* word, T value) {
  store_release_alone(word, value);
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
