// Products of few rows (the tokens of a decode step) with a large bf16 matrix, at the speed of reading the matrix once.
//
//   project   out[m, n]  = rmsnorm(x[m, :]) · W[n, :] + bias[n]                 q, k and v; the head (float32 out)
//   residual  out[m, n] += x[m, :] · W[n, :] + bias[n]                          attention's output; the MLP's output
//   gated     out[m, f]  = silu(rmsnorm(x[m, :]) · W[f, :] + bias[f]) * (rmsnorm(x[m, :]) · W[F + f, :] + bias[F + f])
//
// How. Every block owns a range of output columns ("units": rows of W, or pairs of rows where gated), equal to within
// a few, so no multiprocessor has a longer way. One warp has the copy engine bring W through a ring in shared memory,
// in pieces of up to 32 rows x 256 columns, far ahead of their use: the ring, not registers, holds the bytes in flight.
// Another brings x through a ring of its own in chunks of 256 columns, one for G pieces. Four warps multiply by
// mma.m16n8k16 with W as the left operand (16 rows) and x as the right one (8 tokens): warp w takes columns 64 w to
// 64 w + 63 of each chunk, and the four partial sums are added in shared memory at the end of a tile (G pieces of rows,
// all columns).
//
// The norm: x · weight is rounded to bf16 as the operand; the scale, one number a token, is applied to the sums. The
// squares are added up by the warps from the same operands while the first tile is multiplied.
//
// Order of sums: of a token's column c, warp (c mod 256) / 64 adds it, in ascending order of c, then warps are added 0
// to 3. That holds for every kernel here, so a token's result has the same bits whatever the number of other tokens,
// the kernel chosen for it, and the place of its rows in W.
//
// Programmatic dependent launch. A kernel's blocks may start while the kernel in front still runs. What they do before
// `wait_for_previous_grid` is read W, which nothing on the device writes. Every thread that reads x, index, bias or the
// residual or writes `out` waits first; some of every block do, so the end of a kernel implies the end of all kernels
// in front of it in the stream: nothing is read before it is written, and nothing is overwritten that an earlier kernel
// still reads. The next kernel is let in when all but the last `early` pieces have been asked for, so that its first
// pieces arrive while this one's sums are added, stored and flushed. Its blocks find room because a block takes less
// than half a multiprocessor's shared memory and registers.
#include "kernels/gpu/skinny_ops.cuh"

namespace blink::skinny {

constexpr int kWarps = 4;  // that multiply; one copies W and one x
constexpr int kThreads = (kWarps + 2) * 32;
constexpr int kChunk = 256;  // columns
constexpr int kBox = 64;     // columns that the copy engine brings as rows of 128 bytes, and that a warp multiplies
constexpr int kSteps = kBox / 16;
constexpr int kBoxPitch = kBox * 2;
constexpr int kPieceRows = 32;
constexpr int kTokenPitch = kChunk * 2 + 16;  // of x copied by rows: eight tokens lie in different banks
constexpr int kSumPitch = kPieceRows + 4;     // floats from token to token of partial sums: banks again
constexpr int kMaxStages = 16;
constexpr int kMaxTokens = 64;

// Shared memory: barriers, squares [warp][token], partial sums [warp][8 tokens][kSumPitch], ring of W, ring of x.
constexpr int kBarrierBytes = 4 * kMaxStages * 8;
constexpr int kSquareBytes = kWarps * kMaxTokens * 4;
constexpr int kSumBytes = kWarps * 8 * kSumPitch * 4;
constexpr int kRingOffset = (kBarrierBytes + kSquareBytes + kSumBytes + 1023) / 1024 * 1024;

enum class Kind { kProject, kResidual, kGated };

// A kernel's parameters; all arrays are contiguous. Few tokens are copied one by one, and `index` may say which row of
// x each is (null: token m is row m); more come in boxes, in order. The units are cut into gridDim.x * tiles * G pieces
// of `piece_units` or one more; two maps describe W [units, columns], gated [2 * units, columns], in boxes of kBox
// columns and as many rows.
struct Arguments {
  const TensorMap& lesser;
  const TensorMap& greater;
  const TensorMap& x_map;  // x [tokens, columns], in boxes of the tokens rounded up to a multiple of 8
  const uint16_t* x;       // [x_rows, columns]
  const uint16_t* norm;    // [columns]; not read by kResidual
  const uint16_t* bias;    // [rows of W] or null
  void* out;               // [tokens, units]
  const int32_t* index;    // token m is row index[m * index_stride] of x
  int index_stride, x_rows, tokens, columns, units;
  float epsilon;
  int tiles, piece_units;
  int w_stages, x_stages;  // of the rings
  int early;               // pieces that are still to be asked for when the next kernel may start
};

struct Range {
  int begin, count;
};

// A position in a ring of stages, each with a barrier for "full" and one for "empty".
struct Ring {
  uint32_t full, empty, data;
  int stages, stage_bytes;
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ uint32_t full_barrier() const { return full + 8 * stage; }
  __device__ __forceinline__ uint32_t empty_barrier() const { return empty + 8 * stage; }
  __device__ __forceinline__ uint32_t here() const { return data + stage * stage_bytes; }
  __device__ __forceinline__ void advance() {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

template <Kind kKind, bool kFloat, int kTokenTiles, int kPieces>
struct Kernel {
  static constexpr bool kGated = kKind == Kind::kGated, kNormed = kKind != Kind::kResidual;
  static constexpr int kWarpTokens = 8 / kWarps;
  // A token's row takes the copying warp about 50 cycles, a piece 850 by bandwidth; the head has pieces enough a chunk.
  static constexpr bool kBoxed = kTokenTiles > (kFloat ? 2 : 1);
  using Tokens = uint32_t[kTokenTiles][2 * kSteps];  // 8 tokens x 8 columns each
  using Added = float[kPieces][kTokenTiles][kWarpTokens];
  using Sums = float[kPieces][2][kTokenTiles][4];  // [piece][16 rows][8 tokens][of mma]

  const Arguments& a;
  const int pieces, piece_rows, chunks;  // pieces: of all blocks; piece_rows: of memory, for either half where gated
  const int lane, warp;
  Ring x, w;
  float* const squares;
  float* const partial;

  __device__ __forceinline__ Kernel(const Arguments& arguments, unsigned char* shared)
      : a(arguments),
        pieces(gridDim.x * a.tiles * kPieces),
        piece_rows((a.piece_units + (a.units > a.piece_units * pieces ? 1 : 0) + 7) / 8 * 8),
        chunks((a.columns + kChunk - 1) / kChunk),
        lane(threadIdx.x % 32),
        warp(threadIdx.x / 32),
        squares(reinterpret_cast<float*>(shared + kBarrierBytes)),
        partial(reinterpret_cast<float*>(shared + kBarrierBytes + kSquareBytes)) {
    const uint32_t base = shared_address(shared);
    const int w_bytes = piece_rows * kChunk * (kGated ? 4 : 2), x_bytes = x_stage_bytes();
    w = Ring{base, base + 8 * kMaxStages, base + kRingOffset, a.w_stages, w_bytes};
    x = Ring{base + 16 * kMaxStages, base + 24 * kMaxStages, w.data + a.w_stages * w_bytes, a.x_stages, x_bytes};
  }

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) init_barriers();
    __syncthreads();
    if (warp == kWarps) {
      if (lane == 0) copy_weight();
    } else {
      wait_for_previous_grid();
      if (warp > kWarps) {
        copy_x();
      } else {
        for (int tile = 0; tile < a.tiles; ++tile) multiply_tile(tile);
      }
    }
  }

  __device__ __forceinline__ void init_barriers() const {
    for (int stage = 0; stage < kMaxStages; ++stage) {
      barrier_init(x.full + 8 * stage, 1);
      barrier_init(x.empty + 8 * stage, kWarps);
      barrier_init(w.full + 8 * stage, 1);
      barrier_init(w.empty + 8 * stage, kWarps);
    }
    fence_barrier_init();
  }

  // The norm's weight lies behind the tokens.
  __device__ __forceinline__ int norm_offset() const {
    return kBoxed ? boxed_tokens() * kChunk * 2 : a.tokens * kTokenPitch;
  }
  __device__ __forceinline__ int x_stage_bytes() const {
    return norm_offset() + (!kNormed ? 0 : kBoxed ? 1024 : kTokenPitch);
  }
  __device__ __forceinline__ int boxed_tokens() const { return (a.tokens + 7) / 8 * 8; }

  __device__ __forceinline__ int columns_of(int chunk) const { return min(kChunk, a.columns - chunk * kChunk); }

  // Units of a piece of this block's tile; pieces are equal to within one, and so evenly that blocks are nearly, too.
  __device__ __forceinline__ Range piece_of(int tile, int piece) const {
    const int index = (blockIdx.x * a.tiles + tile) * kPieces + piece;
    const int begin = first_unit(index);
    return {begin, first_unit(index + 1) - begin};
  }

  __device__ __forceinline__ int first_unit(int index) const {
    const uint32_t more = static_cast<uint32_t>(index) * static_cast<uint32_t>(a.units - a.piece_units * pieces);
    return index * a.piece_units + static_cast<int>(more / static_cast<uint32_t>(pieces));
  }

  // --- the copying warps ------------------------------------------------------------------------------------------

  // By one thread. In the first round nothing is to be emptied: the phase in front of a barrier's first counts as
  // ended.
  __device__ __forceinline__ void copy_weight() {
    const uint64_t once = read_once_policy();
    const int let_in = a.tiles * chunks * kPieces - a.early;
    int asked = 0;
    prefetch_map(a.lesser);
    prefetch_map(a.greater);
    if (let_in <= 0) let_next_grid_start();
    for (int tile = 0; tile < a.tiles; ++tile) {
      Range pieces_of_tile[kPieces];
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) pieces_of_tile[piece] = piece_of(tile, piece);
      for (int chunk = 0; chunk < chunks; ++chunk) {
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
          barrier_wait(w.empty_barrier(), w.parity ^ 1);
          copy_piece(pieces_of_tile[piece], chunk, once);
          if (++asked == let_in) let_next_grid_start();
        }
      }
    }
  }

  // Boxes behind each other, gated: all of the gate's, then the other half's.
  __device__ __forceinline__ void copy_piece(Range units, int chunk, uint64_t policy) {
    const TensorMap& map = units.count > a.piece_units ? a.greater : a.lesser;
    const int boxes = columns_of(chunk) / kBox, box_bytes = piece_rows * kBoxPitch;
    barrier_arrive_expect(w.full_barrier(), boxes * units.count * kBoxPitch * (kGated ? 2 : 1));
    for (int box = 0; box < boxes; ++box) {
      const uint32_t to = w.here() + box * box_bytes;
      const int column = chunk * kChunk + box * kBox;
      box_copy(to, map, column, units.begin, w.full_barrier(), policy);
      if (kGated) box_copy(to + kWarps * box_bytes, map, column, a.units + units.begin, w.full_barrier(), policy);
    }
    w.advance();
  }

  __device__ __forceinline__ void copy_x() {
    const uint64_t often = read_often_policy();
    const uint16_t* row = kBoxed ? nullptr : x_row(lane);
    for (int tile = 0; tile < a.tiles; ++tile) {
      for (int chunk = 0; chunk < chunks; ++chunk) {
        const int bytes = columns_of(chunk) * 2;
        barrier_wait(x.empty_barrier(), x.parity ^ 1);
        if (lane == 0) {
          const int rows = kBoxed ? boxed_tokens() : a.tokens;
          barrier_arrive_expect(x.full_barrier(), (rows + (kNormed ? 1 : 0)) * bytes);
        }
        sync_warp();
        if (kBoxed) {
          const uint32_t to = x.here() + lane * boxed_tokens() * kBoxPitch;
          const int column = chunk * kChunk + lane * kBox;
          if (lane < bytes / kBoxPitch) box_copy(to, a.x_map, column, 0, x.full_barrier(), often);
        } else if (lane < a.tokens) {
          bulk_copy(x.here() + lane * kTokenPitch, row + chunk * kChunk, bytes, x.full_barrier(), often);
        }
        if (kNormed && lane == 31) {
          bulk_copy(x.here() + norm_offset(), a.norm + chunk * kChunk, bytes, x.full_barrier(), often);
        }
        x.advance();
      }
    }
  }

  __device__ __forceinline__ const uint16_t* x_row(int token) const {
    if (token >= a.tokens) return a.x;
    const int row = a.index == nullptr ? token : a.index[static_cast<int64_t>(token) * a.index_stride];
    return a.x + static_cast<int64_t>(max(0, min(row, a.x_rows - 1))) * a.columns;
  }

  // --- the multiplying warps --------------------------------------------------------------------------------------

  __device__ __forceinline__ void multiply_tile(int tile) {
    Sums sums = {};
    float square[kTokenTiles] = {};
    Added added;
    load_added(added, tile);
    for (int chunk = 0; chunk < chunks; ++chunk) {
      // At the end of the columns some warps have none.
      multiply_chunk(sums, square, warp * kBox < columns_of(chunk), kNormed && tile == 0);
    }
    if (kNormed && tile == 0) store_squares(square);
    finish_tile(sums, added, tile);
  }

  __device__ __forceinline__ void multiply_chunk(Sums& sums, float (&square)[kTokenTiles], bool any, bool squaring) {
    Tokens tokens;
    barrier_wait(x.full_barrier(), x.parity);
    if (any) {
      load_tokens(tokens);
      if (squaring) add_squares(square, tokens);
      if (kNormed) weigh(tokens);
    }
    release(x);
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      barrier_wait(w.full_barrier(), w.parity);
      if (any) multiply_piece(sums[piece], tokens);
      release(w);
    }
  }

  __device__ __forceinline__ void release(Ring& ring) const {
    sync_warp();
    if (lane == 0) barrier_arrive(ring.empty_barrier());
    ring.advance();
  }

  // By rows: those past the last token repeat it. In boxes: they are zeros or another box's. Their sums are dropped.
  __device__ __forceinline__ void load_tokens(Tokens& tokens) const {
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile) {
      const int wanted = tile * 8 + lane % 8;
      uint32_t (&first)[4] = reinterpret_cast<uint32_t (&)[4]>(tokens[tile][0]);
      uint32_t (&second)[4] = reinterpret_cast<uint32_t (&)[4]>(tokens[tile][4]);
      if (kBoxed) {
        const int token = min(wanted, boxed_tokens() - 8 + lane % 8);
        const uint32_t row = x.here() + (warp * boxed_tokens() + token) * kBoxPitch + ((lane / 8 ^ lane % 8) << 4);
        load_matrices(first, row);
        load_matrices(second, row ^ 64);
      } else {
        const uint32_t row = x.here() + min(wanted, a.tokens - 1) * kTokenPitch + warp * kBoxPitch + lane / 8 * 16;
        load_matrices(first, row);
        load_matrices(second, row + 64);
      }
    }
  }

  // In part i of a token tile a lane holds columns 8 i + 2 (lane % 4) and the next of token lane / 4.
  __device__ __forceinline__ void add_squares(float (&square)[kTokenTiles], const Tokens& tokens) const {
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile) {
#pragma unroll
      for (int part = 0; part < 2 * kSteps; ++part) {
        const float low = low_of(tokens[tile][part]), high = high_of(tokens[tile][part]);
        square[tile] += low * low + high * high;
      }
    }
  }

  __device__ __forceinline__ void weigh(Tokens& tokens) const {
    const uint32_t weights = x.here() + norm_offset() + warp * kBoxPitch + lane % 4 * 4;
#pragma unroll
    for (int part = 0; part < 2 * kSteps; ++part) {
      const uint32_t weight = load_word(weights + part * 16);
#pragma unroll
      for (int tile = 0; tile < kTokenTiles; ++tile) tokens[tile][part] = multiply_pairs(tokens[tile][part], weight);
    }
  }

  __device__ __forceinline__ void multiply_piece(float (&sums)[2][kTokenTiles][4], const Tokens& tokens) const {
    const uint32_t upper = w.here() + row_offset(0), lower = w.here() + row_offset(1);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t rows[2][4];  // 16 rows x 16 columns each
      load_matrices(rows[0], upper ^ step * 32);
      load_matrices(rows[1], lower ^ step * 32);
#pragma unroll
      for (int tile = 0; tile < kTokenTiles; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          multiply(sums[half][tile], rows[half], tokens[tile][2 * step], tokens[tile][2 * step + 1]);
        }
      }
    }
  }

  // Where in a piece the 16 bytes are that this lane gives to load_matrices for the first 16 columns. Those for later
  // steps are two groups on each, and since groups are exchanged by exclusive or, at ^ 32 * step. Rows past the piece's
  // end are taken from its first eight: their sums are dropped.
  __device__ __forceinline__ uint32_t row_offset(int half) const {
    const int wanted = lane % 16 + (kGated ? 0 : half * 16), row = wanted < piece_rows ? wanted : lane % 8;
    const int box = warp + (kGated ? half * kWarps : 0);
    return (box * piece_rows + row) * kBoxPitch + ((lane / 16 ^ lane % 8) << 4);
  }

  // --- the end of a tile: lane r has row r of the piece, warp w tokens w and w + 4 of a token tile
  // --------------------

  // Bias and residual, asked for long before they are added. Gated: lanes from 16 on have rows of the other half.
  __device__ __forceinline__ void load_added(Added& added, int in_tile) const {
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const Range of = piece_of(in_tile, piece);
      const int unit = kGated ? lane % 16 : lane;
      const bool inside = unit < of.count;
      const int row = of.begin + unit + (kGated && lane >= 16 ? a.units : 0);
      const float bias = inside && a.bias != nullptr ? wide(a.bias[row]) : 0.0f;
#pragma unroll
      for (int i = 0; i < kTokenTiles * kWarpTokens; ++i) {
        const int token = i * kWarps + warp;
        float& value = added[piece][i / kWarpTokens][i % kWarpTokens];
        value = bias;
        if (kKind == Kind::kResidual && inside && token < a.tokens) {
          value += wide(static_cast<const uint16_t*>(a.out)[out_at(token, row)]);
        }
      }
    }
  }

  __device__ __forceinline__ int64_t out_at(int token, int unit) const {
    return static_cast<int64_t>(token) * a.units + unit;
  }

  // For finish_tile, which synchronises the warps.
  __device__ __forceinline__ void store_squares(float (&square)[kTokenTiles]) const {
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile) {
      float sum = square[tile];
      sum += shuffle_xor(sum, 1);
      sum += shuffle_xor(sum, 2);
      if (lane % 4 == 0) squares[warp * kMaxTokens + tile * 8 + lane / 4] = sum;
    }
  }

  __device__ __forceinline__ float scale_of(int token) const {
    if (!kNormed) return 1.0f;
    float sum = 0;
#pragma unroll
    for (int from = 0; from < kWarps; ++from) sum += squares[from * kMaxTokens + token];
    return inverse_root(sum / static_cast<float>(a.columns) + a.epsilon);
  }

  __device__ __forceinline__ void finish_tile(const Sums& sums, const Added& added, int in_tile) const {
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const Range of = piece_of(in_tile, piece);
#pragma unroll
      for (int tile = 0; tile < kTokenTiles; ++tile) {
        if (tile * 8 >= a.tokens) continue;
        store_partial(sums[piece], tile);
        sync_threads_below(kWarps * 32);
#pragma unroll
        for (int i = 0; i < kWarpTokens; ++i) store_out(added[piece][tile][i], of, tile, i * kWarps + warp);
        sync_threads_below(kWarps * 32);
      }
    }
  }

  __device__ __forceinline__ void store_partial(const float (&sums)[2][kTokenTiles][4], int tile) const {
    float* to = partial + (warp * 8 + lane % 4 * 2) * kSumPitch + lane / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      to[half * 16] = sums[half][tile][0];
      to[half * 16 + kSumPitch] = sums[half][tile][1];
      to[half * 16 + 8] = sums[half][tile][2];
      to[half * 16 + 8 + kSumPitch] = sums[half][tile][3];
    }
  }

  __device__ __forceinline__ void store_out(float added, Range of, int tile, int token_of_tile) const {
    const int token = tile * 8 + token_of_tile;
    float sum = 0;
#pragma unroll
    for (int from = 0; from < kWarps; ++from) sum += partial[(from * 8 + token_of_tile) * kSumPitch + lane];
    sum = sum * scale_of(token) + added;
    const float value = kGated ? silu(sum) * shuffle_down(sum, 16) : sum;
    if (lane >= of.count || token >= a.tokens) return;
    const int64_t at = out_at(token, of.begin + lane);
    if (kFloat) {
      static_cast<float*>(a.out)[at] = value;
    } else {
      static_cast<uint16_t*>(a.out)[at] = narrow(value);
    }
  }
};

}  // namespace blink::skinny

// Kernels by name: skinny_<kind>_<tokens at most>x<pieces of a tile>.
#define BLINK_SKINNY(name, kind, is_float, token_tiles, pieces, blocks)                                                \
  extern "C" __global__ void __launch_bounds__(blink::skinny::kThreads, blocks)                                        \
      name(const __grid_constant__ blink::skinny::TensorMap lesser,                                                    \
           const __grid_constant__ blink::skinny::TensorMap greater,                                                   \
           const __grid_constant__ blink::skinny::TensorMap x_map, const uint16_t* x, const uint16_t* norm,            \
           const uint16_t* bias, void* out, const int32_t* index, int index_stride, int x_rows, int tokens,            \
           int columns, int units, float epsilon, int tiles, int piece_units, int w_stages, int x_stages, int early) { \
    extern __shared__ __align__(1024) unsigned char shared[];                                                          \
    const blink::skinny::Arguments arguments{lesser, greater,      x_map,    x,        norm,    bias,  out,            \
                                             index,  index_stride, x_rows,   tokens,   columns, units, epsilon,        \
                                             tiles,  piece_units,  w_stages, x_stages, early};                         \
    blink::skinny::Kernel<blink::skinny::Kind::kind, is_float, token_tiles, pieces>(arguments, shared).run();          \
  }

#define BLINK_SKINNY_KINDS(token_tiles, tokens, pieces, blocks)                                       \
  BLINK_SKINNY(skinny_project_##tokens##x##pieces, kProject, false, token_tiles, pieces, blocks)      \
  BLINK_SKINNY(skinny_project_float_##tokens##x##pieces, kProject, true, token_tiles, pieces, blocks) \
  BLINK_SKINNY(skinny_residual_##tokens##x##pieces, kResidual, false, token_tiles, pieces, blocks)    \
  BLINK_SKINNY(skinny_gated_##tokens##x##pieces, kGated, false, token_tiles, pieces, blocks)

BLINK_SKINNY_KINDS(1, 8, 1, 2)
BLINK_SKINNY_KINDS(1, 8, 2, 2)
BLINK_SKINNY_KINDS(1, 8, 4, 2)
BLINK_SKINNY_KINDS(2, 16, 1, 2)
BLINK_SKINNY_KINDS(2, 16, 2, 2)
BLINK_SKINNY_KINDS(2, 16, 4, 2)
BLINK_SKINNY_KINDS(4, 32, 1, 2)
BLINK_SKINNY_KINDS(4, 32, 2, 2)
BLINK_SKINNY_KINDS(8, 64, 1, 1)
