// Stands in for the header of the same name when skinny.cu is compiled for a host: see ../../machine.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "machine.h"

namespace blink::skinny {

using std::max;
using std::min;

inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(pointer) - shared);
}

inline void barrier_init(uint32_t barrier, uint32_t arrivals) { emulation::barrier_at(barrier).init(arrivals); }
inline void fence_barrier_init() {}
inline void barrier_arrive(uint32_t barrier) { emulation::barrier_at(barrier).arrive(0); }
inline void barrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  emulation::barrier_at(barrier).arrive(static_cast<int>(bytes));
}
inline void barrier_wait(uint32_t barrier, uint32_t parity) {
  emulation::wait_until([&] { return emulation::barrier_at(barrier).phase % 2 != parity; });
}

inline uint64_t read_once_policy() { return 0; }
inline uint64_t read_often_policy() { return 0; }
inline void bulk_copy(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier, uint64_t) {
  emulation::start_copy(to, from, bytes, barrier);
}

struct TensorMap {
  const uint16_t* matrix;
  int64_t columns, rows, box_rows;
};

inline void prefetch_map(const TensorMap&) {}

// CUDA driver API, "Tensor Map Object Management": boxes of 64 columns, 128-byte swizzle, zeros outside of the matrix.
inline void box_copy(uint32_t to, const TensorMap& map, int column, int row, uint32_t barrier, uint64_t) {
  if (to % 1024 != 0) emulation::fail("a box is not aligned");
  for (int64_t y = 0; y < map.box_rows; ++y) {
    for (int group = 0; group < 8; ++group) {
      const uint32_t at = to + static_cast<uint32_t>(y) * 128;
      const int64_t x = column + group * 8;
      const uint16_t* from = x < map.columns && row + y < map.rows ? map.matrix + (row + y) * map.columns + x : nullptr;
      emulation::start_copy(at + ((group ^ (at / 128 % 8)) << 4), from, 16, barrier);
    }
  }
}

inline void wait_for_previous_grid() {
  emulation::wait_until([] { return emulation::machine.previous_ended; });
}
inline void let_next_grid_start() { emulation::machine.let_in = true; }

inline void sync_threads_below(int threads) { emulation::meet(emulation::machine.named_barrier, threads); }
inline void sync_warp() {
  emulation::in_warp(0, [](const int*, int*) {});
}
inline float shuffle_xor(float value, int mask) {
  return emulation::in_warp(value, [mask](const float* values, float* results) {
    for (int lane = 0; lane < 32; ++lane) results[lane] = values[lane ^ mask];
  });
}
inline float shuffle_down(float value, int lanes) {
  return emulation::in_warp(value, [lanes](const float* values, float* results) {
    for (int lane = 0; lane < 32; ++lane) results[lane] = values[lane + lanes < 32 ? lane + lanes : lane];
  });
}

struct Parts {
  uint32_t at[4];
};

// PTX ISA, "ldmatrix": lane l receives, of each matrix, elements 2 (l % 4) and the next of row l / 4.
inline void load_matrices(uint32_t (&parts)[4], uint32_t row) {
  const Parts loaded = emulation::in_warp_as<Parts>(row, [](const uint32_t* rows, Parts* results) {
    for (int lane = 0; lane < 32; ++lane) {
      for (int matrix = 0; matrix < 4; ++matrix) {
        const uint32_t address = rows[matrix * 8 + lane / 4];
        if (address % 16 != 0) emulation::fail("a row of ldmatrix is not aligned");
        std::memcpy(&results[lane].at[matrix], emulation::shared_bytes(address + lane % 4 * 4, 4), 4);
      }
    }
  });
  std::memcpy(parts, loaded.at, sizeof parts);
}

inline uint32_t load_word(uint32_t address) {
  uint32_t word;
  std::memcpy(&word, emulation::shared_bytes(address, 4), 4);
  return word;
}

inline float wide(uint16_t bits) {
  const uint32_t shifted = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &shifted, 4);
  return value;
}
inline float low_of(uint32_t pair) { return wide(static_cast<uint16_t>(pair)); }
inline float high_of(uint32_t pair) { return wide(static_cast<uint16_t>(pair >> 16)); }
inline uint16_t narrow(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (std::isnan(value)) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline uint32_t multiply_pairs(uint32_t a, uint32_t b) {
  const uint32_t high = narrow(high_of(a) * high_of(b));
  return high << 16 | narrow(low_of(a) * low_of(b));
}
inline float inverse_root(float value) { return 1.0f / std::sqrt(value); }
inline float silu(float value) { return value / (1.0f + std::exp(-value)); }

struct Operands {
  uint32_t a[4], b[2];
};
struct Products {
  float at[4];
};

// PTX ISA, "Matrix fragments for mma.m16n8k16": which element of a, b and the sums a lane holds.
inline void multiply(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const Operands mine{{a[0], a[1], a[2], a[3]}, {b0, b1}};
  const Products products = emulation::in_warp_as<Products>(mine, [](const Operands* operands, Products* results) {
    float left[16][16], right[16][8];
    const auto half_of = [](uint32_t pair, int high) { return high ? high_of(pair) : low_of(pair); };
    for (int lane = 0; lane < 32; ++lane) {
      const int group = lane / 4, within = lane % 4;
      for (int i = 0; i < 8; ++i) {
        const int row = i / 2 % 2 == 0 ? group : group + 8;
        const int column = within * 2 + i % 2 + (i < 4 ? 0 : 8);
        left[row][column] = half_of(operands[lane].a[i / 2], i % 2);
      }
      for (int i = 0; i < 4; ++i) {
        right[within * 2 + i % 2 + (i < 2 ? 0 : 8)][group] = half_of(operands[lane].b[i / 2], i % 2);
      }
    }
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + (i < 2 ? 0 : 8), column = lane % 4 * 2 + i % 2;
        float sum = 0;
        for (int k = 0; k < 16; ++k) sum += left[row][k] * right[k][column];
        results[lane].at[i] = sum;
      }
    }
  });
  for (int i = 0; i < 4; ++i) sums[i] += products.at[i];
}

}  // namespace blink::skinny
