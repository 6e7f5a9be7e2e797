// The scheduler on emulated threads, with a front end that answers within the very store that tells it of its lease:
// what the scheduler does to a ring after that comes too late for it.
#include "fibers.h"

#define store_release store_release_alone
#include "scheduler/memory.h"
#undef store_release
#include "blink_proto/arena.h"

namespace {

struct {
  const blink::arena::ChannelOut* status;
  uint64_t lease;
  uint64_t* commit;
  uint64_t word;
} answer;

}  // namespace

namespace blink {

template <class T>
void store_release(T* word, T value) {
  store_release_alone(word, value);
  if (answer.status == nullptr || answer.status->lease != answer.lease || answer.status->live == 0) return;
  *answer.commit = answer.word;
  answer.status = nullptr;
}

}  // namespace blink

#include "scheduler_block.cpp"

// Has `word` written to `commit` as soon as that lease shows.
extern "C" BLINK_EXPORT void blink_answer_at_once(const blink::arena::ChannelOut* status, uint64_t lease,
                                                  uint64_t* commit, uint64_t word) {
  answer = {status, lease, commit, word};
}
