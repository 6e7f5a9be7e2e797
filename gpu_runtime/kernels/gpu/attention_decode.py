"""Paged attention of decode tokens: the context of a sequence is parted into tiles, the last one to end joins them.

One program attends the query heads of one KV head (packed as rows of one matrix product) over one decode tile
(`layout.Tile`). Where a work has several tiles, each leaves a normalised output and the base-2 logarithm of its
softmax sum, and the program that arrives last weighs and adds them, so that no second kernel is needed. Everything
that varies between steps is read from device memory; programs beyond the step's tiles end at once.

There are two ways to call it. `decode_attention` takes queries that are rotated already, and a cache that holds the
step's own tokens. `fused_decode_attention` takes the projection's rows as they are: each program rotates its queries,
and the one with a work's last tile rotates and stores the new key, stores the new value and attends to both from its
registers. No kernel has to come in between, and since the cache is then as earlier steps left it, a tile's last
positions are loaded before the projection has ended, and some of the others prefetched.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gpu_runtime.cuda.errors import check
from gpu_runtime.kernels.attention import RopeTables, Shape
from gpu_runtime.kernels.gpu.rope_store import HeadNorms
from gpu_runtime.model.device_plan import DevicePlan, decode_tiles_max
from gpu_runtime.scheduler import layout

MAX_GROUP = 32
"""Query heads of a KV head at most."""
Release = Literal["start", "late"]
"""When the kernel after an overlapping one may start: with the last program's start, or when the last program has read
the cache. A kernel with much shared memory that starts earlier takes the place of programs that are still to come."""
LOG2_E = math.log2(math.e)
_PREFETCHED_BLOCKS = 3  # of a program, each of as many positions as it takes at a time, in steps of few works
_PREFETCHING_WORKS = 16  # beyond, programs that could prefetch more would push each other's lines out
_REGISTERS = 168  # of a thread: three programs of 128 threads on a multiprocessor, as their shared memory allows
_JOINED_FLOATS = 4096  # of partial outputs loaded at a time by the program that joins them: 32 registers a thread

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


@dataclass(frozen=True)
class DecodeConfig:
    """How a decode kernel is built: KV positions of one product, warps of a program, depth of the load pipeline."""

    positions: int
    warps: int
    stages: int


@dataclass(frozen=True)
class DecodeScratch:
    """What the tiles of a work leave for the last one; one serves all layers, which run one after the other.

    `outputs` float32 [tiles, query_heads, head_dim], `logs` float32 [tiles, query_heads]; `arrived` int32
    [works, kv_heads] counts tiles and is zero between kernels.
    """

    outputs: torch.Tensor
    logs: torch.Tensor
    arrived: torch.Tensor

    @classmethod
    def allocate(cls, works_max: int, shape: Shape, device: torch.device) -> DecodeScratch:
        """For steps of up to `works_max` decode works."""
        tiles = decode_tiles_max(works_max)
        return cls(
            outputs=torch.empty(tiles, shape.query_heads, shape.head_dim, dtype=torch.float32, device=device),
            logs=torch.empty(tiles, shape.query_heads, dtype=torch.float32, device=device),
            arrived=torch.zeros(works_max, shape.kv_heads, dtype=torch.int32, device=device),
        )


def decode_config(head_dim: int, dtype: torch.dtype) -> DecodeConfig:
    """The configuration in use."""
    if dtype == torch.float32:
        return DecodeConfig(positions=32 if head_dim <= 128 else 16, warps=8, stages=2)
    if head_dim > 128:
        return DecodeConfig(positions=64, warps=8, stages=2)
    return DecodeConfig(positions=64, warps=4, stages=3)


def check_arguments(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, shape: Shape, out: torch.Tensor, positions: int
) -> None:
    """Raises ValueError where a kernel would read or write amiss; costs no device time.

    `positions`: KV positions that the kernel takes at a time.
    """
    width = shape.query_heads * shape.head_dim
    cache = (shape.kv_heads, shape.block_tokens, shape.head_dim)
    if shape.query_heads % shape.kv_heads or shape.query_heads // shape.kv_heads > MAX_GROUP:
        raise ValueError(f"{shape.query_heads} query heads on {shape.kv_heads} KV heads are not supported")
    if shape.head_dim % 16 or not 16 <= shape.head_dim <= 256:
        raise ValueError(f"head size {shape.head_dim} is not a multiple of 16 up to 256")
    if positions % shape.block_tokens or layout.DECODE_TILE_STEP % shape.block_tokens:
        raise ValueError(f"{positions} KV positions at a time are not whole blocks of {shape.block_tokens}")
    if {tensor.dtype for tensor in (queries, keys, values, out)} not in ({torch.bfloat16}, {torch.float32}):
        raise ValueError("attention takes bfloat16 or float32, the same for all tensors")
    if queries.shape[1:] != (width,) or out.shape[1:] != (width,) or len(out) < len(queries):
        raise ValueError(f"queries {list(queries.shape)} or out {list(out.shape)} are not [tokens, {width}]")
    if queries.stride(1) != 1 or queries.stride(0) % 16 or not out.is_contiguous():
        raise ValueError("queries need contiguous rows a multiple of 16 apart, out has to be contiguous")
    for tensor in (keys, values):
        if tensor.shape[1:] != cache or not tensor.is_contiguous():
            raise ValueError(f"a KV cache is contiguous [blocks, {', '.join(map(str, cache))}]")


def decode_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: DevicePlan,
    works_max: int,
    shape: Shape,
    scratch: DecodeScratch,
    out: torch.Tensor,
    config: DecodeConfig | None = None,
    programmatic: bool = False,
    release: Release = "late",
) -> None:
    """Attention of the step's decode tokens; writes their rows of `out` and no other.

    queries [tokens, query_heads * head_dim], already rotated; rows may be any multiple of 16 elements apart. keys and
    values [blocks, kv_heads, block_tokens, head_dim] hold the step's own tokens already. out like queries, contiguous;
    all of one dtype, bfloat16 or float32. `works_max` bounds the step's decode works and fixes the grid. Allocates
    nothing, so that it may be captured. `programmatic`: starts beside the kernel before it (programmatic dependent
    launch), whose results it awaits, and lets the one after it start, when `release` says. Raises ValueError for shapes
    it does not know.
    """
    config = config or decode_config(shape.head_dim, queries.dtype)
    check_arguments(queries, keys, values, shape, out, config.positions)
    how = config, programmatic, release
    _launch(queries, keys, values, plan, works_max, shape, scratch, out, *how, None, None)


def fused_decode_attention(
    query_key_value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: DevicePlan,
    works_max: int,
    shape: Shape,
    scratch: DecodeScratch,
    out: torch.Tensor,
    tables: RopeTables,
    norms: HeadNorms | None,
    config: DecodeConfig | None = None,
    programmatic: bool = False,
    release: Release = "late",
) -> None:
    """`rope_store` and `decode_attention` in one, for steps of decodes alone; the arguments are those of the two.

    query_key_value [tokens, (query_heads + 2 * kv_heads) * head_dim], contiguous, as projected; stays as it is. A
    token's position is its work's last one, which the tables have to cover, and its key and value go to the plan's
    `kv_slots`. Padding is neither attended nor stored. Keys and values of the cache before a work's last position, the
    plan and the tables must be there before the step begins. Raises ValueError as `decode_attention` does.
    """
    config = config or decode_config(shape.head_dim, query_key_value.dtype)
    width, half = shape.query_heads * shape.head_dim, shape.head_dim // 2
    row = width + 2 * shape.kv_heads * shape.head_dim
    if query_key_value.shape[1:] != (row,) or not query_key_value.is_contiguous():
        raise ValueError(f"rows of queries, keys and values are contiguous [tokens, {row}]")
    check_arguments(query_key_value[:, :width], keys, values, shape, out, config.positions)
    for table in (tables.cosines, tables.sines):
        if table.dtype != torch.float32 or table.shape[1:] != (half,) or not table.is_contiguous():
            raise ValueError(f"rotary tables are contiguous float32 [positions, {half}]")
    if norms is not None and {(*norm.shape, norm.dtype) for norm in (norms.query, norms.key)} != {
        (shape.head_dim, keys.dtype)
    }:
        raise ValueError(f"norms of heads are [{shape.head_dim}] of the cache's type")
    how = config, programmatic, release
    _launch(query_key_value, keys, values, plan, works_max, shape, scratch, out, *how, tables, norms)


def _launch(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: DevicePlan,
    works_max: int,
    shape: Shape,
    scratch: DecodeScratch,
    out: torch.Tensor,
    config: DecodeConfig,
    programmatic: bool,
    release: Release,
    tables: RopeTables | None,
    norms: HeadNorms | None,
) -> None:
    tiles = decode_tiles_max(works_max)
    if tiles > len(plan.decode_tiles) or tiles > len(scratch.logs) or works_max > len(scratch.arrived):
        raise ValueError(f"the plan or the scratch is too small for {works_max} decode works")
    group = shape.query_heads // shape.kv_heads
    columns = triton.next_power_of_2(shape.head_dim)
    packed = triton.next_power_of_2(group)
    prefetched = (_PREFETCHED_BLOCKS if works_max <= _PREFETCHING_WORKS else 1) if programmatic else 0
    bounded = queries.dtype == torch.bfloat16 and config.warps == 4 and packed <= 16  # else it spills, or needs fewer
    kernel = _decode_kernel[(shape.kv_heads, tiles)](
        queries,
        keys,
        values,
        out,
        plan.header,
        plan.works,
        plan.decode_tiles,
        plan.block_table,
        scratch.outputs,
        scratch.logs,
        scratch.arrived,
        None if tables is None else plan.kv_slots,
        None if tables is None else tables.cosines,
        None if tables is None else tables.sines,
        None if norms is None else norms.query,
        None if norms is None else norms.key,
        0.0 if norms is None else norms.epsilon,
        queries.stride(0),
        plan.block_table.stride(0),
        LOG2_E / math.sqrt(shape.head_dim),
        GROUP=group,
        PACKED=packed,
        ROWS=max(16, packed),
        KV_HEADS=shape.kv_heads,
        HEAD_DIM=shape.head_dim,
        COLUMNS=columns,
        BLOCK_TOKENS=shape.block_tokens,
        POSITIONS=config.positions,
        PREFETCHED=prefetched,
        JOINED=min(8, max(1, _JOINED_FLOATS // (packed * columns))),
        FUSED=tables is not None,
        NORMED=norms is not None,
        PROGRAMMATIC=programmatic,
        LATE=programmatic and release == "late",
        num_warps=config.warps,
        num_stages=config.stages,
        maxnreg=_REGISTERS if bounded else None,
        launch_pdl=programmatic,
    )
    if programmatic:
        _take_shared_memory(kernel.function)


@cache
def _take_shared_memory(function: int) -> None:
    """All of a multiprocessor's cache as shared memory, from the next launch on: kernels overlap only where they agree
    on the split, and those of the projections take all."""
    from cuda.bindings import driver

    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    check(driver.cuFuncSetAttribute(driver.CUfunction(function), attribute, 100))


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
def _decode_kernel(
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
