// out = inputs · weightᵀ (+ bias) in float32, with the sum of every output taken in an order that depends on the
// inner size alone. So a row has the same result, to the last bit, in a product with any number of rows.
#include <cstdint>

#include "simd.h"

namespace blink {
namespace {

struct Product {
  const float* inputs;  // [rows][inner]
  const float* weight;  // [columns][inner]
  const float* bias;    // [columns] or null
  float* out;           // [rows][columns]
  int64_t rows, columns, inner;
};

// A tile of Rows x Columns outputs: each has a vector of partial sums over the inner dimension, then the tail.
template <int Rows, int Columns>
BLINK_INLINE void tile(const Product& p, int64_t row, int64_t column) {
  const float* x = p.inputs + row * p.inner;
  const float* w = p.weight + column * p.inner;
  Floats sums[Rows][Columns] = {};
  int64_t k = 0;
  for (; k + kLanes <= p.inner; k += kLanes) {
    Floats b[Columns];
    for (int c = 0; c < Columns; ++c) load(w + c * p.inner + k, b[c]);
    for (int r = 0; r < Rows; ++r) {
      Floats a;
      load(x + r * p.inner + k, a);
      for (int c = 0; c < Columns; ++c) sums[r][c] += a * b[c];
    }
  }
  for (int r = 0; r < Rows; ++r) {
    for (int c = 0; c < Columns; ++c) {
      float sum = sum_lanes(sums[r][c]);
      for (int64_t t = k; t < p.inner; ++t) sum += x[r * p.inner + t] * w[c * p.inner + t];
      p.out[(row + r) * p.columns + column + c] = sum + (p.bias != nullptr ? p.bias[column + c] : 0.0f);
    }
  }
}

template <int Columns>
BLINK_INLINE void column_strip(const Product& p, int64_t column) {
  int64_t row = 0;
  for (; row + 4 <= p.rows; row += 4) tile<4, Columns>(p, row, column);
  for (; row < p.rows; ++row) tile<1, Columns>(p, row, column);
}

constexpr int64_t kStrip = 4;

BLINK_CLONES void strip(const Product& p, int64_t column) {
  if (column + kStrip <= p.columns) {
    column_strip<kStrip>(p, column);
  } else {
    for (; column < p.columns; ++column) column_strip<1>(p, column);
  }
}

}  // namespace
}  // namespace blink

extern "C" {

BLINK_EXPORT void blink_linear(const float* inputs, const float* weight, const float* bias, float* out, int64_t rows,
                               int64_t columns, int64_t inner) {
  const blink::Product product{inputs, weight, bias, out, rows, columns, inner};
#pragma omp parallel for schedule(static)
  for (int64_t column = 0; column < columns; column += blink::kStrip) blink::strip(product, column);
}

}  // extern "C"
