"""The GPU's attention kernels beside their floors: `python -m tests.bench.gpu_attention [--csv FILE] [--default]`.

Tries a handful of configurations and tile spans for each case and prints one table: the configuration in use and the
best one found. Floors: the bytes of keys and values over 4.40 TB/s, or the operations over 790 TFLOP/s (both measured
on an H200). Each launch of a captured graph reads its own cache, so that keys and values come from memory and not from
the second-level cache. Every configuration's result is compared with the first one's. For decodes, two lines more:
with the rotation and the stores by a kernel in front, and within attention.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
import torch

from gpu_runtime.kernels.attention import RopeTables
from gpu_runtime.model.device_plan import DevicePlan, decode_tiles_max
from gpu_runtime.scheduler import layout
from tests.attention_cases import BLOCK, Case, block_table, plan

if TYPE_CHECKING:
    from gpu_runtime.kernels.gpu.attention_decode import DecodeScratch

BYTES_PER_SECOND = 4.40e12
OPERATIONS_PER_SECOND = 790e12
CACHE_BYTES = 256 << 20  # several times the second-level cache
LAYERS_MAX = 256
REPLAYS = 15
CONTEXT = 1024
SPANS = (64, 128, 192, 256, 384, 512, 1024)
HEADS = {"8B": (128, 4, 8), "1B": (64, 4, 8), "135M": (64, 3, 3)}  # head size, query heads of a KV head, KV heads
DTYPE = torch.bfloat16
DECODE_CONFIGS = ((64, 4, 2), (64, 4, 4), (128, 4, 2), (128, 4, 3), (64, 2, 3), (32, 2, 4))
CHUNK_CONFIGS = ((128, 128, 8, 2), (128, 64, 8, 3), (128, 64, 8, 2), (128, 64, 4, 2), (64, 128, 4, 2), (64, 64, 4, 2))
TORCH, APART, FUSED = "torch, not paged", "rotation and stores in front", "rotation and stores within"
BESIDE = (TORCH, APART, FUSED)
Launch = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """One configuration of one case."""

    case: str
    config: str
    microseconds: float
    error: float
    floor: float
    in_use: bool


def milliseconds(graph: torch.cuda.CUDAGraph) -> float:
    """Median of several replays."""
    times = []
    for _ in range(REPLAYS + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return median(times[2:])


def microseconds(launches: Sequence[Launch]) -> float:
    """Time of one of the launches, captured one after the other."""
    launches[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    return milliseconds(graph) * 1e3 / len(launches)


class Bench:
    """A case's tensors: queries, and as many caches as overflow the second-level cache."""

    def __init__(self, case: Case) -> None:
        self.case, shape = case, case.shape
        table, blocks = block_table(case, np.random.default_rng(1))
        self.table = table
        width = shape.query_heads * shape.head_dim
        self.fused = torch.randn(case.tokens, width + 2 * shape.kv_heads * shape.head_dim, dtype=DTYPE, device="cuda")
        self.queries = self.fused[:, :width]
        cache_bytes = 2 * 2 * blocks * shape.kv_heads * BLOCK * shape.head_dim
        layers = min(LAYERS_MAX, max(2, -(-CACHE_BYTES // cache_bytes)))
        size = (blocks, shape.kv_heads, BLOCK, shape.head_dim)
        self.caches = [
            (torch.randn(size, dtype=DTYPE, device="cuda"), torch.randn(size, dtype=DTYPE, device="cuda"))
            for _ in range(layers)
        ]
        self.out = torch.empty(case.tokens, width, dtype=DTYPE, device="cuda")
        self.first: torch.Tensor | None = None

    def measure(self, launches: Sequence[Launch]) -> tuple[float, float]:
        """Time of a launch in microseconds, and the error of the first one's result against that of the first call."""
        self.out.fill_(float("nan"))
        launches[0]()
        if self.first is None:
            self.first = self.out.double()
        error = float((self.out - self.first).norm() / self.first.norm())
        return microseconds(launches), math.inf if math.isnan(error) else error

    def plan(self, span: int) -> DevicePlan:
        """With decode tiles of `span`."""
        return plan(replace(self.case, span=span), self.table, "cuda")


def planned_span(works: int) -> int:
    """What the scheduler would choose: the contexts shared out over the spare tiles."""
    spare = decode_tiles_max(works) - works
    return -(-works * CONTEXT // (spare * layout.DECODE_TILE_STEP)) * layout.DECODE_TILE_STEP


def decode_timings(name: str, works: int, in_use_only: bool) -> Iterator[Timing]:
    """Decodes of one context."""
    from gpu_runtime.kernels.gpu.attention_decode import DecodeConfig, DecodeScratch, decode_attention, decode_config

    head_dim, group, kv_heads = HEADS[name]
    bench = Bench(Case("", head_dim, group, kv_heads, (CONTEXT,) * works, dtype=DTYPE))
    shape = bench.case.shape
    scratch = DecodeScratch.allocate(works, shape, torch.device("cuda"))
    floor = 4 * works * CONTEXT * kv_heads * head_dim / BYTES_PER_SECOND * 1e6
    own = decode_config(head_dim, DTYPE)
    others = [] if in_use_only else [DecodeConfig(*sizes) for sizes in DECODE_CONFIGS]
    spans = [span for span in SPANS if works * -(-CONTEXT // span) <= decode_tiles_max(works)]
    spans = [planned_span(works)] if in_use_only else spans
    case = f"{name} decode, {works} x {CONTEXT}"
    ways = rotating_launches(bench, scratch)
    for launch in ways[APART]:
        launch()  # so that all caches hold the new keys and values
    for config, span in product(dict.fromkeys([own, *others]), spans):
        in_memory = bench.plan(span)
        launches = [
            partial(decode_attention, bench.queries, keys, values, in_memory, works, shape, scratch, bench.out, config)
            for keys, values in bench.caches
        ]
        label = f"span {span}, {config.positions} positions, {config.warps} warps, {config.stages} stages"
        in_use = config == own and span == planned_span(works)
        yield Timing(case, label, *bench.measure(launches), floor, in_use)
    for way, launches in ways.items():
        yield Timing(case, way, *bench.measure(launches), floor, False)


def rotating_launches(bench: Bench, scratch: DecodeScratch) -> dict[str, list[Launch]]:
    """The step's work on each cache by two kernels and by one; turning by no angle, so that all give the same."""
    from gpu_runtime.kernels.gpu.attention_decode import decode_attention, fused_decode_attention
    from gpu_runtime.kernels.gpu.rope_store import rope_store

    shape, works = bench.case.shape, bench.case.tokens
    tables = RopeTables(*(torch.full((CONTEXT, shape.head_dim // 2), turn, device="cuda") for turn in (1.0, 0.0)))
    in_memory = bench.plan(planned_span(works))
    at = torch.full((works,), CONTEXT - 1, dtype=torch.int32, device="cuda")

    def apart(keys: torch.Tensor, values: torch.Tensor) -> None:
        rope_store(bench.fused, at, in_memory.kv_slots, tables, None, keys, values)
        decode_attention(bench.queries, keys, values, in_memory, works, shape, scratch, bench.out)

    def fused(keys: torch.Tensor, values: torch.Tensor) -> None:
        fused_decode_attention(bench.fused, keys, values, in_memory, works, shape, scratch, bench.out, tables, None)

    return {way: [partial(run, *cache) for cache in bench.caches] for way, run in ((APART, apart), (FUSED, fused))}


def chunk_timings(name: str, tokens: int, in_use_only: bool) -> Iterator[Timing]:
    """One prompt in one chunk."""
    from gpu_runtime.kernels.gpu.attention_prefill import ChunkConfig, chunk_attention, chunk_config

    head_dim, group, kv_heads = HEADS[name]
    bench = Bench(Case("", head_dim, group, kv_heads, chunks=((tokens, tokens),), dtype=DTYPE))
    shape, in_memory = bench.case.shape, bench.plan(64)
    floor = 2 * tokens * tokens * shape.query_heads * head_dim / OPERATIONS_PER_SECOND * 1e6
    own = chunk_config(head_dim, DTYPE)
    others = [] if in_use_only else [ChunkConfig(*sizes) for sizes in CHUNK_CONFIGS]
    case = f"{name} prefill, {tokens}"
    for config in dict.fromkeys([own, *others]):
        launches = [
            partial(chunk_attention, bench.queries, keys, values, in_memory, tokens, 1, shape, bench.out, config)
            for keys, values in bench.caches[:8]
        ]
        label = f"{config.rows} rows, {config.positions} positions, {config.warps} warps, {config.stages} stages"
        yield Timing(case, label, *bench.measure(launches), floor, config == own)
    yield Timing(case, TORCH, torch_microseconds(bench.case), 0.0, floor, False)


def torch_microseconds(case: Case) -> float:
    """Torch's own attention over contiguous keys and values of as many heads: no pages, no lengths in memory."""
    size = (1, case.shape.query_heads, case.tokens, case.head_dim)
    query, key, value = (torch.randn(size, dtype=DTYPE, device="cuda") for _ in range(3))
    attention = torch.nn.functional.scaled_dot_product_attention
    return microseconds([partial(attention, query, key, value, is_causal=True)] * 4)


def all_timings(in_use_only: bool) -> Iterator[Timing]:
    """Every case."""
    for name in HEADS:
        for works in (1, 8, 64, 256):
            yield from decode_timings(name, works, in_use_only)
    for name in ("8B", "1B"):
        for tokens in (512, 2048, 8192):
            yield from chunk_timings(name, tokens, in_use_only)


def print_table(timings: Sequence[Timing]) -> None:
    """Two lines for each case: the configuration in use at the span that the scheduler takes, and the best of all."""
    print("\nus (times the floor)")
    for case in dict.fromkeys(timing.case for timing in timings):
        own = [timing for timing in timings if timing.case == case and timing.config not in BESIDE]
        theirs = [
            f", {timing.config} {timing.microseconds:.1f}"
            for timing in timings
            if timing.case == case and timing not in own
        ]
        used = next(timing for timing in own if timing.in_use)
        best = min(own, key=lambda timing: timing.microseconds)
        worst = max(timing.error for timing in timings if timing.case == case)
        print(f"{case}: floor {used.floor:.1f}{''.join(theirs)}, worst error {worst:.1e}")
        for word, found in (("in use", used), ("best", best)):
            print(f"    {word:6s} {found.microseconds:9.1f} ({found.microseconds / found.floor:5.2f})  {found.config}")


def main() -> None:
    """Measures, and prints one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path, help="every timing goes here")
    parser.add_argument("--default", action="store_true", help="only the configurations in use")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("there is no CUDA device")
    timings = list(all_timings(options.default))
    if options.csv:
        with options.csv.open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(Timing.__dataclass_fields__)
            rows.writerows([*vars(timing).values()] for timing in timings)
    print_table(timings)


if __name__ == "__main__":
    main()
