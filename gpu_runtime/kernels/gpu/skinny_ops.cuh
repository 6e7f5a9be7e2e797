// Hopper's instructions that skinny.cu is made of, one function each. Addresses of shared memory are 32 bits wide.
// tests/unit/emulation/ holds the same functions for a host, so that the kernels' own text can run without a GPU.
#pragma once

#include <cstdint>

namespace blink::skinny {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// --- barriers in shared memory (mbarrier) -------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine as well.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and has the phase wait for so many bytes of bulk copies.
__device__ __forceinline__ void barrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Until the phase of this parity has ended.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n .reg .pred p;\n again:\n mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n @!p bra again;\n}" ::"r"(
          barrier),
      "r"(parity)
      : "memory");
}

// --- copies and other kernels -------------------------------------------------------------------------------------

// For bytes that are read once: the first to leave the L2 cache.
__device__ __forceinline__ uint64_t read_once_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// For bytes that every block reads.
__device__ __forceinline__ uint64_t read_often_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Global to shared memory by the copy engine; addresses and size are multiples of 16. Completes on the barrier.
__device__ __forceinline__ void bulk_copy(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier,
                                          uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// Describes a matrix to the copy engine (CUtensorMap); a kernel's parameter.
struct alignas(64) TensorMap {
  uint64_t words[16];
};

__device__ __forceinline__ void prefetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<uint64_t>(&map)) : "memory");
}

// The map's box at this column and row of the matrix, to shared memory; its rows are 128 bytes long, in which the
// 16-byte groups are exchanged: group g of the row at address a lies at g ^ (a / 128 % 8). Completes on the barrier.
__device__ __forceinline__ void box_copy(uint32_t to, const TensorMap& map, int column, int row, uint32_t barrier,
                                         uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, "
      "%3}], [%4], %5;" ::"r"(to),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(column), "r"(row), "r"(barrier), "l"(policy)
      : "memory");
}

// Until all that came before in the stream has ended and its writes are visible, to the copy engine too.
__device__ __forceinline__ void wait_for_previous_grid() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// The next kernel may start as soon as every block has said so (or ended); it waits for our end itself.
__device__ __forceinline__ void let_next_grid_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// --- warps --------------------------------------------------------------------------------------------------------

// Among the first `threads` threads of the block, which are whole warps.
__device__ __forceinline__ void sync_threads_below(int threads) {
  asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory");
}

__device__ __forceinline__ void sync_warp() { __syncwarp(); }
__device__ __forceinline__ float shuffle_xor(float value, int mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}
__device__ __forceinline__ float shuffle_down(float value, int lanes) {
  return __shfl_down_sync(0xffffffffu, value, lanes);
}

// Four 8 x 8 matrices of bf16 as operands of `multiply`; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrices(uint32_t (&parts)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(parts[0]), "=r"(parts[1]), "=r"(parts[2]), "=r"(parts[3])
               : "r"(row)
               : "memory");
}

__device__ __forceinline__ uint32_t load_word(uint32_t address) {
  uint32_t word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}

// sums [16 x 8] += a [16 x 16] · b [16 x 8], bf16 with float32 sums (mma.m16n8k16).
__device__ __forceinline__ void multiply(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// --- numbers ------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float low_of(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_of(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ float wide(uint16_t bits) { return __uint_as_float(static_cast<uint32_t>(bits) << 16); }

__device__ __forceinline__ uint16_t narrow(float value) {
  uint16_t bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

// Products of two pairs of bf16, rounded to bf16.
__device__ __forceinline__ uint32_t multiply_pairs(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

__device__ __forceinline__ float inverse_root(float value) { return rsqrtf(value); }
__device__ __forceinline__ float silu(float value) { return value / (1.0f + __expf(-value)); }

}  // namespace blink::skinny
