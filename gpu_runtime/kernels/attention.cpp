// Paged causal attention and rotary embedding on the CPU, in float32.
//
// Every query row is computed by itself, in an order of operations that depends on its own position alone. So its
// result is the same to the last bit whether it runs alone, in a batch, or in a chunk of any size.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "simd.h"

namespace blink {
namespace {

struct Shape {
  int64_t query_heads, kv_heads, head_dim, block_tokens, table_columns;
};

// One work of a step; the first four words of layout::Work.
struct WorkView {
  uint32_t slot, query_start, query_tokens, context_tokens;
};

constexpr int kQueries = 24;       // query vectors that share one pass over the keys
constexpr int64_t kSerial = 1024;  // fewer keys than this in a step, over all tasks, stay on one thread

// One query head of one token.
struct Query {
  const float* vector;  // [head_dim]
  float* out;           // [head_dim]
  float* scores;        // [context], room up to a multiple of the lanes
  int64_t context;      // keys to attend to
};

// The keys and values of one sequence and one key/value head: those of position j begin `at[j]` floats in.
struct Cache {
  const float* keys;
  const float* values;
  const int64_t* at;
  int64_t dim;
};

// scores[j] of Queries queries for Keys keys from `j` on.
template <int Queries, int Keys>
BLINK_INLINE void score(const Query* queries, const Cache& cache, int64_t j, float scale) {
  const float* keys[Keys];
  for (int c = 0; c < Keys; ++c) keys[c] = cache.keys + cache.at[j + c];
  Floats sums[Queries][Keys] = {};
  for (int64_t k = 0; k < cache.dim; k += kLanes) {
    Floats b[Keys];
    for (int c = 0; c < Keys; ++c) load(keys[c] + k, b[c]);
    for (int q = 0; q < Queries; ++q) {
      Floats a;
      load(queries[q].vector + k, a);
      for (int c = 0; c < Keys; ++c) sums[q][c] += a * b[c];
    }
  }
  for (int q = 0; q < Queries; ++q) {
    for (int c = 0; c < Keys; ++c) queries[q].scores[j + c] = sum_lanes(sums[q][c]) * scale;
  }
}

template <int Queries, int Keys>
BLINK_INLINE void score_range(const Query* queries, const Cache& cache, int64_t end, float scale) {
  int64_t j = 0;
  for (; j + Keys <= end; j += Keys) score<Queries, Keys>(queries, cache, j, scale);
  for (; j < end; ++j) score<Queries, 1>(queries, cache, j, scale);
}

// Adds scores[j] * values[j], for j from `begin` to `end`, to Chunks vectors of the output from `k` on.
template <int Queries, int Chunks>
BLINK_INLINE void blend(const Query* queries, const Cache& cache, int64_t k, int64_t begin, int64_t end) {
  Floats sums[Queries][Chunks];
  for (int q = 0; q < Queries; ++q) {
    for (int c = 0; c < Chunks; ++c) load(queries[q].out + k + c * kLanes, sums[q][c]);
  }
  for (int64_t j = begin; j < end; ++j) {
    const float* value = cache.values + cache.at[j] + k;
    Floats v[Chunks];
    for (int c = 0; c < Chunks; ++c) load(value + c * kLanes, v[c]);
    for (int q = 0; q < Queries; ++q) {
      for (int c = 0; c < Chunks; ++c) sums[q][c] += v[c] * queries[q].scores[j];
    }
  }
  for (int q = 0; q < Queries; ++q) {
    for (int c = 0; c < Chunks; ++c) store(queries[q].out + k + c * kLanes, sums[q][c]);
  }
}

template <int Queries, int Chunks>
BLINK_INLINE void blend_range(const Query* queries, const Cache& cache, int64_t begin, int64_t end) {
  int64_t k = 0;
  for (; k + Chunks * kLanes <= cache.dim; k += Chunks * kLanes) blend<Queries, Chunks>(queries, cache, k, begin, end);
  for (; k < cache.dim; k += kLanes) blend<Queries, 1>(queries, cache, k, begin, end);
}

// Scores in place become weights that sum to 1.
BLINK_INLINE void softmax(float* scores, int64_t n) {
  const int64_t padded = (n + kLanes - 1) / kLanes * kLanes;
  for (int64_t i = n; i < padded; ++i) scores[i] = -3e38f;
  Floats tops = Floats{} - 3e38f;
  for (int64_t i = 0; i < padded; i += kLanes) {
    Floats x;
    load(scores + i, x);
    tops = x > tops ? x : tops;
  }
  float top = tops[0];
  for (int i = 1; i < kLanes; ++i) top = tops[i] > top ? tops[i] : top;
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

// Attention of queries in ascending order of context. Four go together as far as the first of them reaches; the rest
// of their keys follow one query at a time. Neither changes the order in which one query's sums are taken.
template <int Width>
BLINK_INLINE void attend(const Query* queries, int count, const Cache& cache) {
  const float scale = 1.0f / std::sqrt(static_cast<float>(cache.dim));
  int done = 0;
  for (; done + 4 <= count; done += 4) {
    const Query* four = queries + done;
    score_range<4, Width>(four, cache, four->context, scale);
    for (int q = 1; q < 4; ++q) {
      for (int64_t j = four->context; j < four[q].context; ++j) score<1, 1>(four + q, cache, j, scale);
    }
  }
  for (; done < count; ++done) score_range<1, Width>(queries + done, cache, queries[done].context, scale);
  for (int q = 0; q < count; ++q) {
    softmax(queries[q].scores, queries[q].context);
    for (int64_t i = 0; i < cache.dim; ++i) queries[q].out[i] = 0.0f;
  }
  for (done = 0; done + 4 <= count; done += 4) {
    const Query* four = queries + done;
    blend_range<4, Width>(four, cache, 0, four->context);
    for (int q = 1; q < 4; ++q) blend_range<1, Width>(four + q, cache, four->context, four[q].context);
  }
  for (; done < count; ++done) blend_range<1, Width>(queries + done, cache, 0, queries[done].context);
}

// As in linear.cpp: 4 x 4 tiles need 32 vector registers.
BLINK_CLONES void attend_narrow(const Query* queries, int count, const Cache& cache) {
  attend<2>(queries, count, cache);
}

#ifdef BLINK_X86_V4
BLINK_X86_V4 void attend_wide(const Query* queries, int count, const Cache& cache) { attend<4>(queries, count, cache); }
const auto attend_best = __builtin_cpu_supports("x86-64-v4") ? attend_wide : attend_narrow;
#else
const auto attend_best = attend_narrow;
#endif

// Some consecutive tokens of one work.
struct Tile {
  const WorkView* work;
  int64_t token, tokens;
};

struct Step {
  const float* queries;
  const float* key_cache;
  const float* value_cache;
  const int32_t* block_table;
  const Shape& shape;
  float* out;
};

// What a thread needs while it works on a tile.
struct Scratch {
  std::vector<float> scores;  // [kQueries][stride]
  std::vector<int64_t> at;    // [stride]
  int64_t stride;

  explicit Scratch(int64_t size)
      : scores(static_cast<size_t>(size * kQueries)), at(static_cast<size_t>(size)), stride(size) {}
};

// Block by block: a division for each key took as long as the key's products.
void locate(const int32_t* blocks, int64_t context, int64_t block_tokens, int64_t width, int64_t* at) {
  for (int64_t begin = 0; begin < context; begin += block_tokens) {
    const int64_t first = *blocks++ * block_tokens;
    const int64_t count = std::min(block_tokens, context - begin);
    for (int64_t j = 0; j < count; ++j) at[begin + j] = (first + j) * width;
  }
}

// One tile, for the query heads that share key/value head `head`.
void attend_tile(const Step& step, const Tile& tile, int64_t head, Scratch& scratch) {
  const Shape& shape = step.shape;
  const int64_t dim = shape.head_dim;
  const int64_t group = shape.query_heads / shape.kv_heads;
  const int64_t before = static_cast<int64_t>(tile.work->context_tokens) - tile.work->query_tokens;
  const int64_t first_context = before + (tile.token - tile.work->query_start) + 1;
  locate(step.block_table + tile.work->slot * shape.table_columns, first_context + tile.tokens - 1, shape.block_tokens,
         shape.kv_heads * dim, scratch.at.data());
  const Cache cache{step.key_cache + head * dim, step.value_cache + head * dim, scratch.at.data(), dim};
  Query queries[kQueries];
  int count = 0;
  for (int64_t t = 0; t < tile.tokens; ++t) {
    for (int64_t g = 0; g < group; ++g) {
      const int64_t from = ((tile.token + t) * shape.query_heads + head * group + g) * dim;
      float* scores = scratch.scores.data() + count * scratch.stride;
      queries[count++] = {step.queries + from, step.out + from, scores, first_context + t};
      if (count == kQueries) {
        attend_best(queries, count, cache);
        count = 0;
      }
    }
  }
  if (count != 0) attend_best(queries, count, cache);
}

std::vector<Tile> make_tiles(const void* works, int64_t work_count, int64_t work_bytes, int64_t group) {
  const int64_t most = group < kQueries ? kQueries / group : 1;
  std::vector<Tile> tiles;
  for (int64_t w = 0; w < work_count; ++w) {
    const auto* work = reinterpret_cast<const WorkView*>(static_cast<const char*>(works) + w * work_bytes);
    for (int64_t done = 0; done < work->query_tokens; done += most) {
      const int64_t left = work->query_tokens - done;
      tiles.push_back({work, work->query_start + done, left < most ? left : most});
    }
  }
  return tiles;
}

void clear_padding(const std::vector<Tile>& tiles, int64_t tokens, int64_t width, float* out) {
  std::vector<bool> used(static_cast<size_t>(tokens), false);
  for (const Tile& tile : tiles) {
    for (int64_t t = 0; t < tile.tokens; ++t) used[static_cast<size_t>(tile.token + t)] = true;
  }
  for (int64_t t = 0; t < tokens; ++t) {
    if (!used[static_cast<size_t>(t)]) memset(out + t * width, 0, static_cast<size_t>(width) * sizeof(float));
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

using blink::Shape;

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
// `work_bytes` that begin with a WorkView. Rows of no work are set to zero.
BLINK_EXPORT void blink_paged_attention(const float* queries, const float* key_cache, const float* value_cache,
                                        const void* works, int64_t work_count, int64_t work_bytes,
                                        const int32_t* block_table, int64_t tokens, const Shape* shape, float* out) {
  const auto tiles = blink::make_tiles(works, work_count, work_bytes, shape->query_heads / shape->kv_heads);
  blink::clear_padding(tiles, tokens, shape->query_heads * shape->head_dim, out);
  int64_t longest = 0;
  for (const blink::Tile& tile : tiles) longest = std::max<int64_t>(longest, tile.work->context_tokens);
  const int64_t stride = (longest + blink::kLanes - 1) / blink::kLanes * blink::kLanes;
  const blink::Step step{queries, key_cache, value_cache, block_table, *shape, out};
  const auto tasks = static_cast<int64_t>(tiles.size()) * shape->kv_heads;
#pragma omp parallel if (tasks * longest > blink::kSerial)
  {
    blink::Scratch scratch(stride);
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t i = 0; i < tasks; ++i) {
      const blink::Tile& tile = tiles[static_cast<size_t>(i / shape->kv_heads)];
      blink::attend_tile(step, tile, i % shape->kv_heads, scratch);
    }
  }
}

}  // extern "C"
