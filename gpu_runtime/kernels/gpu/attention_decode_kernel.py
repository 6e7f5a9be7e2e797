"""The kernel of `attention_decode`.

One program attends the query heads of one KV head (packed as rows of one matrix product) over one decode tile
(`layout.Tile`). Where a work has several tiles, each leaves a normalised output and the base-2 logarithm of its
softmax sum, and the program that arrives last weighs and adds them, so that no second kernel is needed. Everything
that varies between steps is read from device memory; programs beyond the step's tiles end at once.

Fused, each program rotates its queries, and the one with a work's last tile rotates and stores the new key, stores the
new value and attends to both from its registers. The cache is then as earlier steps left it, so that a tile's last
positions are loaded before the projection has ended, and some of the others prefetched.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gpu_runtime.scheduler import layout

_INTERPRETED: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)
_DECODE_TILES: tl.constexpr = tl.constexpr(layout.STEP_HEADER_OFFSETS["decode_tiles"] // 4)
_DECODE_SPAN: tl.constexpr = tl.constexpr(layout.STEP_HEADER_OFFSETS["decode_span"] // 4)
WORK_WORDS: tl.constexpr = tl.constexpr(layout.Work.itemsize // 4)
WORK_SLOT: tl.constexpr = tl.constexpr(layout.WORK_OFFSETS["slot"] // 4)
WORK_QUERY_START: tl.constexpr = tl.constexpr(layout.WORK_OFFSETS["query_start"] // 4)
WORK_CONTEXT: tl.constexpr = tl.constexpr(layout.WORK_OFFSETS["context_tokens"] // 4)
TILE_WORDS: tl.constexpr = tl.constexpr(layout.Tile.itemsize // 4)
TILE_WORK: tl.constexpr = tl.constexpr(layout.TILE_OFFSETS["work"] // 4)
TILE_FIRST: tl.constexpr = tl.constexpr(layout.TILE_OFFSETS["first"] // 4)
_TILE_BASE: tl.constexpr = tl.constexpr(layout.TILE_OFFSETS["base"] // 4)
_TILE_COUNT: tl.constexpr = tl.constexpr(layout.TILE_OFFSETS["count"] // 4)


@triton.jit
def _prefetch(cache: tl.tensor, rows: tl.tensor, wanted: tl.tensor, HEAD_DIM: tl.constexpr) -> None:
    """Asks the second-level cache for rows of a head, a line of 128 bytes at a time; for nothing unless `wanted`."""
    LINE: tl.constexpr = 1024 // cache.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = triton.next_power_of_2((HEAD_DIM + LINE - 1) // LINE)
    columns = tl.minimum(tl.arange(0, LINES) * LINE, HEAD_DIM - 1)
    if wanted:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [cache + rows[:, None] + columns[None, :]],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _pinned(tensor: tl.tensor) -> tl.tensor:
    """The same numbers, computed where this is said to and in the layout they have there; costs no instruction.

    Without it the compiler moves the change to a product's layout in front of what leads there, which every warp then
    computes for itself, and waits for the cache before it loads the queries.
    """
    if _INTERPRETED:
        return tensor
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;",
        "=r,r",
        [tensor],
        dtype=tensor.dtype,
        is_pure=False,
        pack=32 // tensor.dtype.primitive_bitwidth,
    )


@triton.jit
def _rotate(
    own: tl.tensor,
    other: tl.tensor,
    norm: tl.tensor,
    epsilon: tl.tensor,
    dims: tl.tensor,
    across: tl.tensor,
    cosine: tl.tensor,
    sine: tl.tensor,
    HEAD_DIM: tl.constexpr,
    NORMED: tl.constexpr,
) -> tl.tensor:
    """Norms and rotates heads, a row each, rounding where `rope_store` does.

    `other` is a head with its halves exchanged, as `across` exchanges `dims`.
    """
    dtype = own.dtype
    own = own.to(tl.float32)
    other = other.to(tl.float32)
    if NORMED:
        used = dims[None, :] < HEAD_DIM
        scale = tl.rsqrt(tl.sum(own * own, 1) / HEAD_DIM + epsilon)[:, None]
        own_weight = tl.load(norm + dims[None, :], used, other=0.0).to(tl.float32)
        other_weight = tl.load(norm + across[None, :], used, other=0.0).to(tl.float32)
        own = ((own * scale).to(dtype).to(tl.float32) * own_weight).to(dtype).to(tl.float32)
        other = ((other * scale).to(dtype).to(tl.float32) * other_weight).to(dtype).to(tl.float32)
    other = tl.where(dims[None, :] < HEAD_DIM // 2, -other, other)
    return (own * cosine[None, :] + other * sine[None, :]).to(dtype)


@triton.jit
def _attend(
    scores: tl.tensor, value: tl.tensor, peak: tl.tensor, total: tl.tensor, acc: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Adds positions to what was attended: the peak of the scores, the sum of the weights, the weighted values."""
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    weights = tl.exp2(scores - new_peak[:, None])
    keep = tl.exp2(peak - new_peak)
    total = total * keep + tl.sum(weights, 1)
    acc = tl.dot(weights.to(value.dtype), value, acc * keep[:, None], input_precision="ieee")
    return new_peak, total, acc


# A table's width differs between models only; without the hint one build serves them all.
@triton.jit(do_not_specialize=["table_stride"])
def decode_kernel(
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    out: tl.tensor,
    header: tl.tensor,
    works: tl.tensor,
    tiles: tl.tensor,
    block_table: tl.tensor,
    outputs: tl.tensor,
    logs: tl.tensor,
    arrived: tl.tensor,
    kv_slots: tl.tensor,
    cosines: tl.tensor,
    sines: tl.tensor,
    query_norm: tl.tensor,
    key_norm: tl.tensor,
    epsilon: tl.tensor,
    query_stride: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,
    GROUP: tl.constexpr,
    PACKED: tl.constexpr,
    ROWS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    POSITIONS: tl.constexpr,
    PREFETCHED: tl.constexpr,
    JOINED: tl.constexpr,
    FUSED: tl.constexpr,
    NORMED: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
    LATE: tl.constexpr,
) -> None:
    if PROGRAMMATIC and not LATE:
        gdc_launch_dependents()
    kv_head = tl.program_id(0)
    index = tl.program_id(1)
    tile = tiles + index * TILE_WORDS
    step_tiles = tl.load(header + _DECODE_TILES)
    span = tl.load(header + _DECODE_SPAN)
    # Read beside the header rather than after it: a tile that is not the step's is there all the same.
    work_index = tl.load(tile + TILE_WORK)
    first = tl.load(tile + TILE_FIRST)
    base = tl.load(tile + _TILE_BASE)
    count = tl.load(tile + _TILE_COUNT)
    if index >= step_tiles:
        if PROGRAMMATIC:
            gdc_wait()  # the kernel after this one takes its end for the end of those before
        return
    work = works + work_index * WORK_WORDS
    token = tl.load(work + WORK_QUERY_START).to(tl.int64)
    context = tl.load(work + WORK_CONTEXT)
    table = block_table + tl.load(work + WORK_SLOT).to(tl.int64) * table_stride
    end = tl.minimum(first + span, context)

    # A tile starts with a block, so a row's place in its block stays the same.
    offsets = tl.arange(0, POSITIONS)
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, COLUMNS)
    used_dims = dims[None, :] < HEAD_DIM
    used_rows = (rows[:, None] < GROUP) & used_dims
    BLOCK_STRIDE: tl.constexpr = KV_HEADS * BLOCK_TOKENS * HEAD_DIM
    keys += kv_head * BLOCK_TOKENS * HEAD_DIM
    values += kv_head * BLOCK_TOKENS * HEAD_DIM
    place = (offsets % BLOCK_TOKENS).to(tl.int64) * HEAD_DIM
    inner = place[:, None] + dims[None, :]
    if FUSED:
        # The tile's last positions come first: they alone may be fewer, and with them the new token. They are not
        # loaded by the loop, so that they wait in registers for what the projection has yet to write.
        HALF: tl.constexpr = HEAD_DIM // 2
        loop_end = first + (end - first - 1) // POSITIONS * POSITIONS
        tail = loop_end + offsets
        cached = tail < tl.minimum(end, context - 1)
        tail_blocks = tl.load(table + tail // BLOCK_TOKENS, cached, other=0)
        tail_at = tail_blocks.to(tl.int64)[:, None] * BLOCK_STRIDE + inner
        tail_key = tl.load(keys + tail_at, cached[:, None] & used_dims, other=0.0)
        tail_value = tl.load(values + tail_at, cached[:, None] & used_dims, other=0.0)
        kv_slot = tl.load(kv_slots + token)
        angles = (context - 1).to(tl.int64) * HALF + tl.where(dims < HALF, dims, dims - HALF)
        cosine = tl.load(cosines + angles, dims < HEAD_DIM, other=0.0)
        sine = tl.load(sines + angles, dims < HEAD_DIM, other=0.0)
    else:
        loop_end = end
    columns = table + (first + offsets) // BLOCK_TOKENS
    blocks = tl.load(columns, first + offsets < loop_end, other=0)
    if PROGRAMMATIC:
        # All up to here is the scheduler's, which wrote it before the step began; so is most of the cache.
        ahead = blocks
        for block in tl.static_range(PREFETCHED):
            begin = first + block * POSITIONS
            if block > 0:
                ahead = tl.load(columns + block * POSITIONS // BLOCK_TOKENS, begin + offsets < loop_end, other=0)
            _prefetch(keys, ahead.to(tl.int64) * BLOCK_STRIDE + place, begin < loop_end, HEAD_DIM)
            _prefetch(values, ahead.to(tl.int64) * BLOCK_STRIDE + place, begin < loop_end, HEAD_DIM)
        gdc_wait()

    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    head_offset = kv_head * GROUP * HEAD_DIM
    query_rows = rows[:, None] * HEAD_DIM + dims[None, :]
    queries += token * query_stride
    query = tl.load(queries + head_offset + query_rows, used_rows, other=0.0)
    if FUSED:
        across = tl.where(dims < HALF, dims + HALF, dims - HALF)
        other = tl.load(queries + head_offset + rows[:, None] * HEAD_DIM + across[None, :], used_rows, other=0.0)
        # In every row of the group, so that it lies as the queries do.
        new = queries + (KV_HEADS * GROUP + kv_head) * HEAD_DIM
        new_rows = new + tl.zeros([ROWS, 1], tl.int32)
        taken = used_rows & (end == context)
        new_key = tl.load(new_rows + dims[None, :], taken, other=0.0)
        other_key = tl.load(new_rows + across[None, :], taken, other=0.0)
        is_new = tail == context - 1
        new_in_tail = is_new[:, None] & used_dims
        new_rows = new + KV_HEADS * HEAD_DIM + tl.zeros([POSITIONS, 1], tl.int32)
        tail_key = _pinned(tail_key)
        tail_value = tl.load(new_rows + dims[None, :], new_in_tail, other=_pinned(tail_value))
        query = _rotate(query, other, query_norm, epsilon, dims, across, cosine, sine, HEAD_DIM, NORMED)
        query = _pinned(query)
        new_key = _rotate(new_key, other_key, key_norm, epsilon, dims, across, cosine, sine, HEAD_DIM, NORMED)
        kept = (kv_slot // BLOCK_TOKENS).to(tl.int64) * BLOCK_STRIDE + (kv_slot % BLOCK_TOKENS) * HEAD_DIM + dims
        new_score = tl.sum(query.to(tl.float32) * new_key.to(tl.float32), 1)
        tl.store(keys + kept[None, :] + tl.zeros([ROWS, 1], tl.int32), new_key, taken & (rows[:, None] == 0))
        tl.store(values + kept[None, :] + tl.zeros([POSITIONS, 1], tl.int32), tail_value, new_in_tail)
        scores = tl.dot(query, tail_key.T, input_precision="ieee")
        scores = tl.where(is_new[None, :], new_score[:, None], scores)
        scores = tl.where((tail < end)[None, :], scores * scale, float("-inf"))
        peak, total, acc = _attend(scores, tail_value, peak, total, acc)
    for position in tl.range(first, loop_end, POSITIONS):
        at = blocks.to(tl.int64)[:, None] * BLOCK_STRIDE + inner
        columns += POSITIONS // BLOCK_TOKENS
        blocks = tl.load(columns, position + POSITIONS + offsets < loop_end, other=0)
        inside = position + offsets < loop_end
        # What lies past the context may be no number, and that times a weight of zero would be none either.
        used = used_dims if FUSED else inside[:, None] & used_dims
        key = tl.load(keys + at, used, other=0.0)
        scores = tl.dot(query, key.T, input_precision="ieee") * scale
        if not FUSED:
            scores = tl.where(inside[None, :], scores, float("-inf"))
        value = tl.load(values + at, used, other=0.0)
        peak, total, acc = _attend(scores, value, peak, total, acc)
    if PROGRAMMATIC and LATE:
        gdc_launch_dependents()

    acc = acc / total[:, None]
    out += token * (KV_HEADS * GROUP * HEAD_DIM) + head_offset
    if count == 1:
        tl.store(out + query_rows, acc.to(out.dtype.element_ty), used_rows)
    else:
        first_head = (index * KV_HEADS + kv_head).to(tl.int64) * GROUP
        tl.store(outputs + first_head * HEAD_DIM + query_rows, acc, used_rows)
        tl.store(logs + first_head + rows, peak + tl.log2(total), rows < GROUP)
        # The barrier puts every thread's stores before the one thread's release.
        tl.debug_barrier()
        arrivals = arrived + work_index * KV_HEADS + kv_head
        if tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == count - 1:
            _join(out, outputs, logs, base, count, kv_head, GROUP, PACKED, KV_HEADS, HEAD_DIM, COLUMNS, JOINED)
            tl.store(arrivals, 0)


@triton.jit
def _join(
    out: tl.tensor,
    outputs: tl.tensor,
    logs: tl.tensor,
    base: tl.tensor,
    count: tl.tensor,
    kv_head: tl.tensor,
    GROUP: tl.constexpr,
    PACKED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    JOINED: tl.constexpr,
) -> None:
    """Weighs the outputs of `count` tiles from `base` by their sums and stores the whole.

    Each thread keeps its own cells of all tiles, so that nothing is summed across threads. The loads of a round do not
    depend on each other. They pass by the first-level cache, which may hold what an earlier kernel left there.
    """
    dims = tl.arange(0, COLUMNS)
    # A row past the group stands for its last head, so that it needs no mask until it is stored.
    heads = kv_head * GROUP + tl.minimum(tl.arange(0, PACKED), GROUP - 1)
    peak = tl.full([PACKED], float("-inf"), tl.float32)
    total = tl.zeros([PACKED], tl.float32)
    acc = tl.zeros([PACKED, COLUMNS], tl.float32)
    for start in tl.range(0, count, JOINED):
        new_peak = peak
        for tile in tl.static_range(JOINED):
            rows = (base + tl.minimum(start + tile, count - 1)) * (KV_HEADS * GROUP) + heads
            new_peak = tl.maximum(new_peak, tl.load(logs + rows, cache_modifier=".cg"))
        keep = tl.exp2(peak - new_peak)
        total *= keep
        acc *= keep[:, None]
        for tile in tl.static_range(JOINED):
            rows = (base + tl.minimum(start + tile, count - 1)) * (KV_HEADS * GROUP) + heads
            log = tl.load(logs + rows, cache_modifier=".cg")
            weight = tl.where(start + tile < count, tl.exp2(log - new_peak), 0.0)
            cells = rows.to(tl.int64)[:, None] * HEAD_DIM + dims[None, :]
            part = tl.load(outputs + cells, dims[None, :] < HEAD_DIM, other=0.0, cache_modifier=".cg")
            total += weight
            acc += part * weight[:, None]
        peak = new_peak
    rows = tl.arange(0, PACKED)[:, None]
    stored = (rows < GROUP) & (dims[None, :] < HEAD_DIM)
    tl.store(out + rows * HEAD_DIM + dims[None, :], (acc / total[:, None]).to(out.dtype.element_ty), stored)
