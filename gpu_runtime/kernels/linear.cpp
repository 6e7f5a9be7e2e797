// Products with the weights of a layer in float32, with the norm before them and the residual or the gate after them
// fused in. Every sum is taken in an order that depends on its length alone, so a row has the same result, to the last
// bit, in a product with any number of rows.
#include <cmath>
#include <cstdint>

#include "simd.h"

namespace blink {
namespace {

// out = inputs · weightᵀ + bias, of one matrix.
struct Matrix {
  const float* weight;  // [columns][inner]
  const float* bias;    // [columns] or null
  float* out;           // [rows][columns]
  int64_t columns;
};

struct Norm {
  const float* weight;  // [inner]
  float epsilon;
};

enum Mode : int64_t { kStore = 0, kAdd = 1, kGate = 2 };

struct Product {
  const float* inputs;  // [rows][inner]
  int64_t rows, inner;
  bool add;
};

// A tile of Rows x Columns outputs: each has a vector of partial sums over the inner dimension, then the tail. The
// first tile of a strip asks for the weights of the next strip: without that one core pair of an EPYC 9004 reads
// weights at 23 GB/s, with it at 33 GB/s, which is what a plain sum over memory reaches.
template <int Rows, int Columns, bool Ahead>
BLINK_INLINE void tile(const Product& p, const Matrix& m, int64_t row, int64_t column) {
  const float* x = p.inputs + row * p.inner;
  const float* w = m.weight + column * p.inner;
  Floats sums[Rows][Columns] = {};
  int64_t k = 0;
  for (; k + kLanes <= p.inner; k += kLanes) {
    Floats b[Columns];
    for (int c = 0; c < Columns; ++c) {
      load(w + c * p.inner + k, b[c]);
      if (Ahead) __builtin_prefetch(w + (c + Columns) * p.inner + k, 0, 2);
    }
    for (int r = 0; r < Rows; ++r) {
      Floats a;
      load(x + r * p.inner + k, a);
      for (int c = 0; c < Columns; ++c) sums[r][c] += a * b[c];
    }
  }
  for (int r = 0; r < Rows; ++r) {
    for (int c = 0; c < Columns; ++c) {
      float sum = sum_lanes(sums[r][c]);
      for (int64_t t = k; t < p.inner; ++t) sum = std::fma(x[r * p.inner + t], w[c * p.inner + t], sum);
      if (m.bias != nullptr) sum += m.bias[column + c];
      float& out = m.out[(row + r) * m.columns + column + c];
      out = p.add ? out + sum : sum;
    }
  }
}

template <int Columns>
BLINK_INLINE void strip(const Product& p, const Matrix& m, int64_t column) {
  int64_t row = 0;
  if (p.rows >= 4) {
    tile<4, Columns, true>(p, m, 0, column);
    row = 4;
  } else {
    tile<1, Columns, true>(p, m, 0, column);
    row = 1;
  }
  for (; row + 4 <= p.rows; row += 4) tile<4, Columns, false>(p, m, row, column);
  for (; row < p.rows; ++row) tile<1, Columns, false>(p, m, row, column);
}

template <int Columns>
BLINK_INLINE void strips(const Product& p, const Matrix& m, int64_t column, int64_t end) {
  for (; column + Columns <= end; column += Columns) strip<Columns>(p, m, column);
  for (; column < end; ++column) strip<1>(p, m, column);
}

// 4 x 4 tiles need 32 vector registers (twice as fast there as 4 x 2); with 16 they spill (three times slower).
BLINK_CLONES void narrow(const Product& p, const Matrix& m, int64_t column, int64_t end) {
  strips<2>(p, m, column, end);
}

#ifdef BLINK_X86_V4
BLINK_X86_V4 void wide(const Product& p, const Matrix& m, int64_t column, int64_t end) { strips<4>(p, m, column, end); }
const auto multiply = __builtin_cpu_supports("x86-64-v4") ? wide : narrow;
#else
const auto multiply = narrow;
#endif

BLINK_CLONES void rms_norm(const float* x, const Norm& norm, int64_t size, float* out) {
  Floats sums{};
  int64_t k = 0;
  for (; k + kLanes <= size; k += kLanes) {
    Floats v;
    load(x + k, v);
    sums += v * v;
  }
  float sum = sum_lanes(sums);
  for (; k < size; ++k) sum = std::fma(x[k], x[k], sum);
  const float scale = 1.0f / std::sqrt(sum / static_cast<float>(size) + norm.epsilon);
  for (k = 0; k < size; ++k) out[k] = norm.weight[k] * (x[k] * scale);
}

// gate = gate / (1 + e^-gate) * up, up to eight elements. A short tail goes through the same vector code.
BLINK_CLONES void silu_multiply(float* gate, const float* up, int64_t count) {
  Floats g{}, u{};
  memcpy(&g, gate, static_cast<size_t>(count) * sizeof(float));
  memcpy(&u, up, static_cast<size_t>(count) * sizeof(float));
  Floats e = g < 0.0f ? g : -g;
  exp_negative(e);
  const Floats sigmoid = (g < 0.0f ? e : Floats{} + 1.0f) / (1.0f + e);
  g = g * sigmoid * u;
  memcpy(gate, &g, static_cast<size_t>(count) * sizeof(float));
}

// Element-wise work on fewer elements than this stays on one thread: it takes a microsecond or two, and a step whose
// threads meet less often suffers less where other processes take their cores away.
constexpr int64_t kSerial = 8192;
constexpr int64_t kShare = 64;  // columns a thread takes at a time: threads may be of unequal speed on a busy machine

void multiply_share(const Product& p, const Matrix* matrices, int64_t share) {
  const Matrix* m = matrices;
  for (; share >= (m->columns + kShare - 1) / kShare; ++m) share -= (m->columns + kShare - 1) / kShare;
  const int64_t begin = share * kShare;
  multiply(p, *m, begin, begin + kShare < m->columns ? begin + kShare : m->columns);
}

}  // namespace
}  // namespace blink

using blink::Matrix;
using blink::Norm;

extern "C" {

// out = norm(inputs), both [rows][size].
BLINK_EXPORT void blink_rms_norm(const float* inputs, int64_t rows, int64_t size, const Norm* norm, float* out) {
#pragma omp parallel for schedule(static) if (rows * size > blink::kSerial)
  for (int64_t r = 0; r < rows; ++r) blink::rms_norm(inputs + r * size, *norm, size, out + r * size);
}

// Multiplies inputs [rows][inner] (normed first into `normed` of the same shape, unless `norm` is null) with `count`
// matrices. Mode 0 stores the results; mode 1 adds them to what `out` holds; mode 2 has two matrices of one size, gate
// and up, and leaves silu(gate) * up in the first one's `out`.
BLINK_EXPORT void blink_project(const float* inputs, int64_t rows, int64_t inner, const Norm* norm, float* normed,
                                const Matrix* matrices, int64_t count, int64_t mode) {
  const blink::Product product{norm == nullptr ? inputs : normed, rows, inner, mode == blink::kAdd};
  int64_t shares = 0;
  for (int64_t i = 0; i < count; ++i) shares += (matrices[i].columns + blink::kShare - 1) / blink::kShare;
  if (norm != nullptr) blink_rms_norm(inputs, rows, inner, norm, normed);
#pragma omp parallel for schedule(dynamic, 1)
  for (int64_t share = 0; share < shares; ++share) blink::multiply_share(product, matrices, share);
  if (mode != blink::kGate) return;
  const int64_t all = rows * matrices[0].columns;
#pragma omp parallel for schedule(static) if (all > blink::kSerial)
  for (int64_t i = 0; i < all; i += blink::kLanes) {
    const int64_t part = all - i < blink::kLanes ? all - i : blink::kLanes;
    blink::silu_multiply(matrices[0].out + i, matrices[1].out + i, part);
  }
}

}  // extern "C"
