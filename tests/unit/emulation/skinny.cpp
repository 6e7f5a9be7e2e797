// skinny.cu on a host, whole kernels at a time.
#include "kernels/gpu/skinny.cu"

thread_local Index threadIdx, blockIdx, gridDim;
alignas(128) unsigned char shared[256 << 10];

namespace emulation {

Machine machine;
namespace {

constexpr size_t kStackBytes = 64 << 10;
const std::function<void()>* current_kernel;

void fiber() {
  (*current_kernel)();
  machine.ended[threadIdx.x] = progress = true;
}

void start_fibers(std::vector<unsigned char>& stacks) {
  for (int thread = 0; thread < machine.threads; ++thread) {
    ucontext_t& context = machine.fibers[thread];
    getcontext(&context);
    context.uc_stack.ss_sp = stacks.data() + thread * kStackBytes;
    context.uc_stack.ss_size = kStackBytes;
    context.uc_link = &machine.scheduler;
    makecontext(&context, fiber, 0);
  }
}

// Every thread once, in warps of random order and from a random lane on.
bool run_round() {
  bool running = false;
  const int warps = machine.threads / 32, first = static_cast<int>(machine.random() % warps);
  for (int i = 0; i < machine.threads; ++i) {
    const int thread = (first * 32 + i) % machine.threads;
    if (machine.ended[thread]) continue;
    running = true;
    threadIdx.x = thread;
    swapcontext(&machine.scheduler, &machine.fibers[thread]);
  }
  return running;
}

}  // namespace

void run_block(int threads, int shared_bytes, uint32_t seed, const std::function<void()>& kernel) {
  std::vector<unsigned char> stacks(threads * kStackBytes);
  std::function<void()> end_previous = machine.end_previous;
  const bool previous_ended = machine.previous_ended;
  machine = Machine{};
  machine.threads = threads, machine.shared_bytes = shared_bytes, machine.previous_ended = previous_ended;
  machine.random.seed(seed);
  machine.warps.resize(threads / 32), machine.fibers.resize(threads), machine.ended.assign(threads, false);
  machine.end_previous = end_previous;
  current_kernel = &kernel;
  std::memset(shared, 0xff, sizeof shared);
  start_fibers(stacks);
  for (int idle = 0; run_round(); idle = progress ? 0 : idle + 1, progress = false) {
    if (idle > 1000) fail("nothing moves");
    for (size_t left = machine.copies.size() * (machine.random() % 4) / 4; left > 0; --left) land_a_copy();
    if (machine.copies.size() < 4 && !machine.copies.empty()) land_a_copy();
    if (!machine.previous_ended && machine.random() % 8 == 0) {
      machine.end_previous();
      machine.previous_ended = progress = true;
    }
  }
  if (!machine.copies.empty()) fail("the block ended with copies under way");
  if (!machine.previous_ended) fail("the block ended before the kernel in front");
}

}  // namespace emulation

using blink::skinny::TensorMap;
using SkinnyKernel = void(TensorMap, TensorMap, TensorMap, const uint16_t*, const uint16_t*, const uint16_t*, void*,
                          const int32_t*, int, int, int, int, int, float, int, int, int, int, int);

struct LateArray {
  void* target;
  const void* source;
  int64_t bytes;
};

// The arguments of a kernel of skinny.cu, and arrays that the kernel in front fills in when it ends, while the first
// block runs. Returns whether every block let the next kernel in.
extern "C" int run_skinny(SkinnyKernel* kernel, int blocks, int shared_bytes, uint32_t seed, const LateArray* late,
                          int late_count, const uint16_t* weight, int weight_rows, const uint16_t* x,
                          const uint16_t* norm, const uint16_t* bias, void* out, const int32_t* index, int index_stride,
                          int x_rows, int tokens, int columns, int units, float epsilon, int tiles, int piece_units,
                          int w_stages, int x_stages, int early) {
  using emulation::machine;
  bool let_in = true;
  machine.previous_ended = false;
  machine.end_previous = [&] {
    for (int i = 0; i < late_count; ++i) std::memcpy(late[i].target, late[i].source, late[i].bytes);
  };
  const TensorMap lesser{weight, columns, weight_rows, piece_units};
  const TensorMap greater{weight, columns, weight_rows, piece_units + 1};
  const TensorMap x_map{x, columns, tokens, (tokens + 7) / 8 * 8};
  gridDim.x = blocks;
  for (int i = 0; i < blocks; ++i) {
    blockIdx.x = static_cast<int>((seed + i) % blocks);
    emulation::run_block(blink::skinny::kThreads, shared_bytes, seed + blockIdx.x, [&] {
      kernel(lesser, greater, x_map, x, norm, bias, out, index, index_stride, x_rows, tokens, columns, units, epsilon,
             tiles, piece_units, w_stages, x_stages, early);
    });
    let_in = let_in && machine.let_in;
  }
  return let_in;
}
