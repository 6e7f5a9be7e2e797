// Paged causal attention and rotary embedding on the CPU, in float32.
//
// Every query row is computed by itself, in an order of operations that depends on its own position alone. So its
// result is the same to the last bit whether it runs alone, in a batch, or in a chunk of any size.
#include <cmath>
#include <cstdint>
#include <vector>

#include "simd.h"

namespace blink {
namespace {

constexpr int kMaxGroup = 8;  // query heads that share one pass over the keys

struct Shape {
  int64_t query_heads, kv_heads, head_dim, block_tokens, table_columns;
};

// One work of a step; the first four words of layout::Work.
struct WorkView {
  uint32_t slot, query_start, query_tokens, context_tokens;
};

struct Row {
  const float* query;  // [group][head_dim] of one key/value head
  float* out;          // the same shape
  const int32_t* blocks;
  int64_t context;  // keys to attend to
};

BLINK_INLINE float dot(const float* a, const float* b, int64_t n) {
  Floats sum{};
  for (int64_t i = 0; i < n; i += kLanes) {
    Floats x, y;
    load(a + i, x);
    load(b + i, y);
    sum += x * y;
  }
  return sum_lanes(sum);
}

BLINK_INLINE void add_scaled(float* to, const float* from, float factor, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) {
    Floats x, y;
    load(to + i, x);
    load(from + i, y);
    store(to + i, x + y * factor);
  }
}

// Scores in place become weights that sum to 1; `padded` is a multiple of the lanes, the tail is ignored.
BLINK_INLINE void softmax(float* scores, int64_t n) {
  float top = scores[0];
  for (int64_t i = 1; i < n; ++i) top = scores[i] > top ? scores[i] : top;
  const int64_t padded = (n + kLanes - 1) / kLanes * kLanes;
  for (int64_t i = n; i < padded; ++i) scores[i] = -1e30f;
  Floats sum{};
  for (int64_t i = 0; i < padded; i += kLanes) {
    Floats x;
    load(scores + i, x);
    x -= top;
    exp_negative(x);
    sum += x;
    store(scores + i, x);
  }
  const float scale = 1.0f / sum_lanes(sum);
  for (int64_t i = 0; i < n; ++i) scores[i] *= scale;
}

// One query token against one key/value head, for the query heads that share it. `stride` floats lie between the
// score rows of two heads.
BLINK_CLONES void attend(const Row& row, const float* keys, const float* values, const Shape& shape, float* scores,
                         int64_t stride, int64_t group) {
  const int64_t dim = shape.head_dim;
  const int64_t step = shape.kv_heads * dim;
  const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
  for (int64_t j = 0; j < row.context; ++j) {
    const int64_t at = row.blocks[j / shape.block_tokens] * shape.block_tokens + j % shape.block_tokens;
    for (int64_t g = 0; g < group; ++g)
      scores[g * stride + j] = dot(row.query + g * dim, keys + at * step, dim) * scale;
  }
  for (int64_t g = 0; g < group; ++g) {
    softmax(scores + g * stride, row.context);
    for (int64_t i = 0; i < dim; ++i) row.out[g * dim + i] = 0.0f;
  }
  for (int64_t j = 0; j < row.context; ++j) {
    const int64_t at = row.blocks[j / shape.block_tokens] * shape.block_tokens + j % shape.block_tokens;
    for (int64_t g = 0; g < group; ++g) add_scaled(row.out + g * dim, values + at * step, scores[g * stride + j], dim);
  }
}

// Rotates one head in place: pairs are (i, i + dim/2), as in Hugging Face's models.
BLINK_CLONES void rotate(float* head, const float* cosine, const float* sine, int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    const float a = head[i];
    const float b = head[i + half];
    head[i] = a * cosine[i] - b * sine[i];
    head[i + half] = b * cosine[i] + a * sine[i];
  }
}

}  // namespace
}  // namespace blink

using blink::Row;
using blink::Shape;
using blink::WorkView;

extern "C" {

// Rotates queries [tokens][query_heads][head_dim] and keys [tokens][kv_heads][head_dim] in place, and stores keys and
// values at their KV slots. `cosines` and `sines`: [positions][head_dim / 2].
BLINK_EXPORT void blink_rope_store(float* queries, float* keys, const float* values, const int32_t* positions,
                                   const int32_t* kv_slots, int64_t tokens, const Shape* shape, const float* cosines,
                                   const float* sines, float* key_cache, float* value_cache) {
  const int64_t dim = shape->head_dim;
  const int64_t half = dim / 2;
  const int64_t width = shape->kv_heads * dim;
#pragma omp parallel for schedule(static) if (tokens > 8)
  for (int64_t t = 0; t < tokens; ++t) {
    const float* cosine = cosines + positions[t] * half;
    const float* sine = sines + positions[t] * half;
    for (int64_t h = 0; h < shape->query_heads; ++h)
      blink::rotate(queries + (t * shape->query_heads + h) * dim, cosine, sine, half);
    for (int64_t h = 0; h < shape->kv_heads; ++h)
      blink::rotate(keys + (t * shape->kv_heads + h) * dim, cosine, sine, half);
    memcpy(key_cache + kv_slots[t] * width, keys + t * width, static_cast<size_t>(width) * sizeof(float));
    memcpy(value_cache + kv_slots[t] * width, values + t * width, static_cast<size_t>(width) * sizeof(float));
  }
}

// out and queries: [tokens][query_heads][head_dim]; caches: [kv slots][kv_heads][head_dim]. `works` are records of
// `work_bytes` that begin with a WorkView. Rows of no work are set to zero. Returns 0, or 1 when memory is short.
BLINK_EXPORT int blink_paged_attention(const float* queries, const float* key_cache, const float* value_cache,
                                       const void* works, int64_t work_count, int64_t work_bytes,
                                       const int32_t* block_table, int64_t tokens, const Shape* shape, float* out) {
  const int64_t dim = shape->head_dim;
  const int64_t group = shape->query_heads / shape->kv_heads;
  std::vector<const WorkView*> owner(static_cast<size_t>(tokens), nullptr);
  int64_t longest = 0;
  for (int64_t w = 0; w < work_count; ++w) {
    const auto* work = reinterpret_cast<const WorkView*>(static_cast<const char*>(works) + w * work_bytes);
    for (uint32_t k = 0; k < work->query_tokens; ++k) owner[work->query_start + k] = work;
    longest = work->context_tokens > longest ? work->context_tokens : longest;
  }
  const int64_t stride = (longest + blink::kLanes - 1) / blink::kLanes * blink::kLanes;
#pragma omp parallel
  {
    std::vector<float> scores(static_cast<size_t>(stride * blink::kMaxGroup));
#pragma omp for schedule(dynamic, 1) collapse(2)
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t h = 0; h < shape->kv_heads; ++h) {
        const WorkView* work = owner[static_cast<size_t>(t)];
        const int64_t first = (t * shape->query_heads + h * group) * dim;
        if (work == nullptr) {
          memset(out + first, 0, static_cast<size_t>(group * dim) * sizeof(float));
          continue;
        }
        const int64_t context = work->context_tokens - work->query_tokens + (t - work->query_start) + 1;
        const int32_t* blocks = block_table + work->slot * shape->table_columns;
        for (int64_t g = 0; g < group; g += blink::kMaxGroup) {
          const int64_t part = group - g < blink::kMaxGroup ? group - g : blink::kMaxGroup;
          const Row row{queries + first + g * dim, out + first + g * dim, blocks, context};
          blink::attend(row, key_cache + h * dim, value_cache + h * dim, *shape, scores.data(), stride, part);
        }
      }
    }
  }
  return 0;
}

}  // extern "C"
