"""Steps for the GPU's attention kernels, what they must give, and their comparison.

`python -m tests.attention_cases` runs the small ones in Triton's interpreter, which needs no GPU, and prints a JSON
object for each: its name and the worst relative errors, for decodes alone also of the fused kernel. A process of its
own, since Triton decides at import whether it interprets, for good. Float32 only: the interpreter of Triton 3.6
multiplies the bit patterns of bfloat16.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gpu_runtime.kernels.attention import Shape
from gpu_runtime.model.device_plan import DevicePlan, chunk_tiles_max, decode_tiles_max
from gpu_runtime.scheduler import layout

BLOCK = 16
UNTOUCHED = 7.0
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Case:
    """Contexts of the decodes, (query tokens, context) of the chunks, and the heads."""

    name: str
    head_dim: int
    group: int
    kv_heads: int
    decodes: tuple[int, ...] = ()
    chunks: tuple[tuple[int, int], ...] = ()
    span: int = 64
    padding: int = 3
    dtype: torch.dtype = torch.float32

    @property
    def tokens(self) -> int:
        return len(self.decodes) + sum(count for count, _ in self.chunks)

    @property
    def shape(self) -> Shape:
        return Shape(self.group * self.kv_heads, self.kv_heads, self.head_dim, BLOCK, self.columns)

    @property
    def columns(self) -> int:
        return max(-(-context // BLOCK) for context in (*self.decodes, *(both[1] for both in self.chunks))) + 1

    def works(self) -> list[tuple[int, int]]:
        """(query tokens, context) of every work."""
        return [(1, context) for context in self.decodes] + list(self.chunks)


SMALL = (
    Case("one short decode", 64, 4, 1, decodes=(1,)),
    Case("decode of one whole tile", 64, 1, 2, decodes=(64,)),
    Case("decode one past a tile", 64, 3, 2, decodes=(65,)),
    Case("decodes with several tiles", 128, 4, 2, decodes=(333, 17, 128, 200)),
    Case("decode with long tiles", 64, 8, 1, decodes=(500, 129), span=192),
    Case("decode of many tiles", 16, 4, 1, decodes=(64 * 33,)),
    Case("group of 7, head size 80", 80, 7, 1, decodes=(70, 5)),
    Case("group of 24, head size 96", 96, 24, 1, decodes=(130,)),
    Case("decode with head size 256", 256, 2, 1, decodes=(100,)),
    Case("chunk alone", 64, 4, 1, chunks=((37, 37),)),
    Case("chunk of several tiles", 64, 1, 1, chunks=((300, 300),)),
    Case("chunk on an odd context", 128, 2, 1, chunks=((33, 250),)),
    Case("chunks of head size 80", 80, 3, 1, chunks=((40, 77), (1, 50))),
    Case("chunks of head size 96", 96, 1, 1, chunks=((17, 17), (130, 131))),
    Case("chunk of head size 256", 256, 1, 1, chunks=((20, 64),)),
    Case("mixed", 64, 3, 1, decodes=(90, 1, 64), chunks=((18, 18), (5, 100), (129, 160))),
)


def large(dtype: torch.dtype) -> Iterator[Case]:
    """What a GPU does in a moment. Compiling takes longest, hence not every head size in float32."""
    generator = np.random.default_rng(5)
    heads = ((128, 4, 8), (64, 3, 3), (96, 7, 2), (256, 8, 1), (16, 3, 2), (64, 4, 8), (80, 1, 8), (128, 32, 1))
    for head_dim, group, kv_heads in heads[: 5 if dtype == torch.float32 else None]:
        name = f"{head_dim} x {group} x {kv_heads}"
        decodes = (1, 16, 64, 65, 1023, 1024, 4097, *(int(size) for size in generator.integers(1, 3000, 25)))
        chunks = ((1, 1), (2, 900), (128, 128), (129, 257), (500, 1777), (1111, 1111))
        yield Case(f"{name}, mixed", head_dim, group, kv_heads, decodes, chunks, 832, padding=9, dtype=dtype)
        for decodes in ((1999,), (300, 1, 64, 640, 129)):
            yield Case(f"{name}, {len(decodes)} decodes", head_dim, group, kv_heads, decodes, dtype=dtype)


@dataclass(frozen=True)
class Step:
    """A case's tensors; `fused` holds the queries in its first columns, as the projection leaves them."""

    case: Case
    plan: DevicePlan
    fused: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    @property
    def queries(self) -> torch.Tensor:
        return self.fused[:, : self.case.shape.query_heads * self.case.head_dim]


def build(case: Case, device: str = "cpu", seed: int = 0) -> Step:
    """Random tensors; NaN wherever a kernel has nothing to read."""
    torch.manual_seed(seed)
    generator = np.random.default_rng(seed)
    table, blocks = block_table(case, generator)
    shape = case.shape
    queries = shape.query_heads * shape.head_dim
    width = queries + 2 * shape.kv_heads * shape.head_dim
    fused = torch.full((case.tokens + case.padding, width), math.nan, dtype=case.dtype, device=device)
    fused[: case.tokens, :queries].normal_()
    keys, values = (_cache(case, table, blocks, device) for _ in range(2))
    return Step(case, plan(case, table, device), fused, keys, values)


def block_table(case: Case, generator: np.random.Generator) -> tuple[np.ndarray, int]:
    """Scattered blocks for each work, in its slot's row; scratch elsewhere."""
    needs = [-(-context // BLOCK) for _, context in case.works()]
    blocks = 1 + sum(needs) + 2
    free = generator.permutation(np.arange(1, blocks))
    table = np.full((len(needs) + 2, case.columns), layout.SCRATCH_BLOCK, dtype=np.int32)
    for work, need in enumerate(needs):
        table[_slot(case, work), :need], free = free[:need], free[need:]
    return table, blocks


def _slot(case: Case, work: int) -> int:
    return len(case.works()) - work  # not the work's own index


def _cache(case: Case, table: np.ndarray, blocks: int, device: str) -> torch.Tensor:
    size = (blocks, BLOCK, case.kv_heads, case.head_dim)
    cache = torch.full(size, math.nan, dtype=case.dtype, device=device)
    for work, (_, context) in enumerate(case.works()):
        positions = np.arange(context)
        rows = table[_slot(case, work), positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK
        written = torch.randn(context, *size[2:], dtype=case.dtype, device=device)
        cache.flatten(0, 1)[torch.from_numpy(rows).to(device)] = written
    return cache.transpose(1, 2).contiguous()


def plan(case: Case, table: np.ndarray, device: str) -> DevicePlan:
    """What the scheduler would leave in memory for the case, in lists longer than it needs."""
    works = np.zeros(len(case.works()) + 1, dtype=layout.Work)
    start = 0
    for index, (count, context) in enumerate(case.works()):
        works[index] = (_slot(case, index), start, count, context, 0, 0, 0)
        start += count
    works[-1] = (1, start, 1, 3, 0, 0, 0)  # no work of this step: it would write to the padding
    decode_tiles = _tiles(case, range(len(case.decodes)), 1, case.span, decode_tiles_max(len(works)))
    chunk_tiles = _tiles(
        case, range(len(case.decodes), len(works) - 1), 0, layout.CHUNK_TILE, chunk_tiles_max(case.tokens, len(works))
    )
    header = np.zeros(1, dtype=layout.StepHeader)
    header["tokens"], header["works"], header["decode_works"] = case.tokens, len(works) - 1, len(case.decodes)
    header["decode_tiles"], header["chunk_tiles"] = (
        _used(tiles, len(works) - 1) for tiles in (decode_tiles, chunk_tiles)
    )
    header["decode_span"] = case.span
    none = torch.zeros(1, dtype=torch.int32, device=device)
    return DevicePlan(
        header=_words(header, device)[0],
        works=_words(works, device),
        rows=none,
        decode_tiles=_words(decode_tiles, device),
        chunk_tiles=_words(chunk_tiles, device),
        token_ids=none,
        positions=none,
        kv_slots=torch.from_numpy(_new_slots(case, table)).to(device),
        block_table=torch.from_numpy(table).to(device),
        sampled=none,
    )


def _new_slots(case: Case, table: np.ndarray) -> np.ndarray:
    """Where the decodes' new keys and values go; scratch for all other tokens."""
    slots = np.zeros(case.tokens + case.padding, dtype=np.int32)
    for work, context in enumerate(case.decodes):
        slots[work] = table[_slot(case, work), (context - 1) // BLOCK] * BLOCK + (context - 1) % BLOCK
    return slots


def _tiles(case: Case, works: range, parted: int, size: int, room: int) -> np.ndarray:
    """Tiles of `size` of what `works` have: their query tokens (0) or their context (1); unused ones name no work."""
    listed: list[tuple[int, int, int, int]] = []
    for work in works:
        count = -(-case.works()[work][parted] // size)
        listed += [(work, part * size, len(listed), count) for part in range(count)]
    base = {work: at for at, (work, first, _, _) in enumerate(listed) if first == 0}
    tiles = np.full(room, np.array((len(case.works()), 0, 0, 1), dtype=layout.Tile))
    for at, (work, first, _, count) in enumerate(listed):
        tiles[at] = (work, first, base[work], count)
    return tiles


def _used(tiles: np.ndarray, no_work: int) -> int:
    return int((tiles["work"] != no_work).sum())


def _words(records: np.ndarray, device: str) -> torch.Tensor:
    words = records.view(np.int32).reshape(len(records), -1)
    return torch.from_numpy(words.copy()).to(device)


def expected(step: Step) -> torch.Tensor:
    """Plain torch in float64 over gathered keys and values; UNTOUCHED in the rows of no work."""
    case, shape = step.case, step.case.shape
    out = torch.full(step.queries.shape, UNTOUCHED, dtype=torch.float64, device=step.keys.device)
    start = 0
    for work, (count, context) in enumerate(case.works()):
        blocks = step.plan.block_table[_slot(case, work)].long()
        keys, values = (
            cache[blocks].transpose(1, 2).flatten(0, 1)[:context].double().transpose(0, 1)[None]
            for cache in (step.keys, step.values)
        )
        rows = slice(start, start + count)
        queries = step.queries[rows].double().view(count, shape.query_heads, shape.head_dim).transpose(0, 1)[None]
        mask = torch.ones(count, context, dtype=torch.bool, device=out.device).tril(context - count)
        attended = torch.nn.functional.scaled_dot_product_attention(
            queries,
            keys.repeat_interleave(case.group, 1),
            values.repeat_interleave(case.group, 1),
            attn_mask=mask,
        )
        out[rows] = attended[0].transpose(0, 1).reshape(count, -1)
        start += count
    return out


def attend(step: Step, repeats: int = 2, check: bool = True, programmatic: bool = False) -> torch.Tensor:
    """What both kernels write; several times on one scratch, which they have to leave as they found it (`check`)."""
    from gpu_runtime.kernels.gpu.attention_decode import DecodeScratch, decode_attention
    from gpu_runtime.kernels.gpu.attention_prefill import chunk_attention

    case, works = step.case, len(step.plan.works)
    scratch = DecodeScratch.allocate(works, case.shape, step.keys.device)
    for _ in range(repeats):
        scratch.outputs.fill_(math.nan)
        out = torch.full_like(step.queries.contiguous(), UNTOUCHED)
        tensors = step.queries, step.keys, step.values, step.plan
        decode_attention(*tensors, works, case.shape, scratch, out, programmatic=programmatic)
        chunk_attention(*tensors, case.tokens, works, case.shape, out)
        if check and scratch.arrived.any():
            raise AssertionError("tiles are still counted after the kernel")
    return out


def worst_errors(step: Step, out: torch.Tensor) -> dict[str, float]:
    """Largest relative error of a head's output over the decode tokens, the chunk tokens and the rows of no work."""
    case = step.case
    heads = (-1, case.shape.query_heads, case.head_dim)
    right, got = expected(step).view(heads), out.double().view(heads)
    errors = (got - right).norm(dim=-1) / right.norm(dim=-1)
    errors = torch.where(errors.isnan(), math.inf, errors)
    parts = {"decode": errors[: len(case.decodes)], "chunk": errors[len(case.decodes) : case.tokens]}
    parts["padding"] = errors[case.tokens :]
    return {name: float(part.max()) if part.numel() else 0.0 for name, part in parts.items()}


def mend_interpreter() -> None:
    """Lets Triton's interpreter do what the compiler does.

    3.6 cannot count with loaded numbers, as numpy 2.4 no longer makes an int of an array [1]. 3.9 spreads the result of
    a comparison as numbers of the kind that were compared, and then takes that for no mask.
    """
    from triton.runtime import interpreter

    patch, splat = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_splat

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def create_splat(self: Any, kind: Any, scalar: Any) -> Any:
        spread = splat(self, kind, scalar)
        if scalar.data.dtype == np.bool_:
            spread.data = spread.data.astype(np.bool_)
        return spread

    interpreter._patch_lang_tensor = patched
    interpreter.InterpreterBuilder.create_splat = create_splat


def main() -> None:
    """Runs the small cases on the CPU."""
    from tests.fused_attention_cases import fused_errors

    if os.environ.get("TRITON_INTERPRET") != "1":
        raise SystemExit("set TRITON_INTERPRET=1: there is no GPU here to compile for")
    mend_interpreter()
    torch.set_num_threads(1)
    for case in SMALL:
        step = build(case)
        report = {"name": case.name, "errors": worst_errors(step, attend(step))}
        if not case.chunks:
            report |= {"fused": fused_errors(case, normed=False), "fused, normed": fused_errors(case, normed=True)}
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
