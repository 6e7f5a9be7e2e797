"""Layers on a GPU, without sampling and scheduler: `python -m tests.bench.gpu_layers [--models …] [--json FILE]`.

`--parts decodes --tokens 1 8 --attention fused-late apart-late` compares ways to attend in a short time.

Whole steps of random weights, each beside its floor (the bytes it must read over what the GPU was measured to read, or
its operations over what it was measured to do), then the small kernels of a layer alone. Times are medians of replays
of a CUDA graph.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from gpu_runtime.kernels.attention import RopeTables
from gpu_runtime.kernels.gpu.attention_decode import Release
from gpu_runtime.kernels.gpu.gated import silu_mul
from gpu_runtime.kernels.gpu.norm import gather_norm, rms_norm
from gpu_runtime.kernels.gpu.rope_store import rope_store
from gpu_runtime.model.config import ModelConfig
from gpu_runtime.model.gpu_llama import KVCache, Projections
from gpu_runtime.model.gpu_skinny import SkinnyProjections
from gpu_runtime.model.gpu_weights import GpuWeights, load_weights, random_weights
from gpu_runtime.model.rope import rope_tables
from gpu_runtime.model.source import open_folder
from tests.device_plans import BLOCK_TOKENS, DeviceDriver, PlanSizes
from tests.shapes import SHAPES, shape_config, write_folder

READ_BYTES_PER_US = 4.40e6
OPERATIONS_PER_US = 790e6
CONTEXT = 1024
DECODES = (1, 8, 64, 256)
PROMPTS = (512, 2048, 8192)
PROMPTED, LOADED = "Llama-3.1-8B", "Llama-3.2-1B"
MOST_SKINNY = 16  # beyond what a chain uses them for, to see where they fall behind
LAUNCHES = 32
PARTS = ("kernels", "decodes", "loading", "prompts")
ATTENTION: dict[str, tuple[bool, Release]] = {
    "fused-late": (True, "late"),
    "fused-start": (True, "start"),
    "apart-late": (False, "late"),
    "apart-start": (False, "start"),
}
"""Whether decode attention rotates and stores itself, and when it lets the next kernel start."""
SECONDS = 0.15
"""Of replays for a row at most; 3 are made in any case."""


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    what: str
    tokens: int
    kernels: int
    microseconds: float
    floor: float

    def __str__(self) -> str:
        over = self.microseconds / self.floor
        return (
            f"{self.what:<44}{self.tokens:>7}{self.kernels:>9}{self.microseconds:>12.2f}{self.floor:>12.2f}{over:>8.2f}"
        )


def replayed(body: Callable[[], object]) -> tuple[float, int]:
    """Median microseconds of the captured body, and the nodes of its graph."""
    from cuda.bindings import runtime

    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        body()
    nodes = int(runtime.cudaGraphGetNodes(graph.raw_cuda_graph())[-1])
    graph.replay()
    times = [replay_us(graph) for _ in range(3)]
    times += [replay_us(graph) for _ in range(min(40, int(SECONDS * 1e6 / min(times))))]
    return statistics.median(times), nodes


def replay_us(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def matrix_bytes(weights: GpuWeights) -> tuple[int, int]:
    """Bytes of all matrices of the layers, and of the head's."""
    linears = [linear for layer in weights.layers for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    return sum(linear.weight.nbytes for linear in linears), weights.head.nbytes


def floor_us(config: ModelConfig, weights: GpuWeights, tokens: int, contexts: list[int], rows: int) -> float:
    """Of a step of `tokens` in works of such contexts: reading weights and keys and values, or the operations."""
    layers, head = matrix_bytes(weights)
    block = KVCache.block_bytes(config, BLOCK_TOKENS, weights.dtype)
    read = layers + head + sum(contexts) * block // BLOCK_TOKENS
    size = weights.dtype.itemsize
    width = config.num_attention_heads * config.head_dim * config.num_hidden_layers
    seen = tokens * tokens // 2 if tokens > len(contexts) else sum(contexts)
    operations = 2 * tokens * layers // size + 2 * rows * head // size + 4 * seen * width
    return max(read / READ_BYTES_PER_US, operations / OPERATIONS_PER_US)


def decode_rows(
    name: str, config: ModelConfig, weights: GpuWeights, overlap: bool, attention: str, decodes: Sequence[int]
) -> Iterator[Row]:
    """Steps in which every sequence has one token, by torch's products and by those for few tokens."""
    most = max(decodes)
    sizes = PlanSizes(most, most, most, CONTEXT // BLOCK_TOKENS + 1)
    driver = DeviceDriver(config, weights, sizes, overlap, *ATTENTION[attention])
    driver.fill_cache()
    for count in decodes:
        driver.lengths = [CONTEXT - 1] * most
        driver.put({slot: [3 + slot] for slot in range(count)}, count)
        floor = floor_us(config, weights, count, [CONTEXT] * count, count)
        for way, by in decode_ways(config, weights, count, overlap):
            microseconds, nodes = replayed(lambda by=by, count=count: driver.model.forward(count, True, by))
            yield Row(f"{name} decode, {way}, {attention}", count, nodes, microseconds, floor)


def decode_ways(
    config: ModelConfig, weights: GpuWeights, tokens: int, overlap: bool
) -> Iterator[tuple[str, Projections | None]]:
    """What the products may be computed by."""
    yield "torch" if overlap else "torch, in turn", None
    if overlap and tokens <= MOST_SKINNY and SkinnyProjections.takes(config, weights.dtype, tokens):
        yield "skinny", SkinnyProjections(config, weights)


def prompt_rows(name: str, config: ModelConfig, weights: GpuWeights) -> Iterator[Row]:
    """Steps of one prompt alone."""
    most = max(PROMPTS)
    driver = DeviceDriver(config, weights, PlanSizes(256, most, 1, most // BLOCK_TOKENS + 1))
    driver.fill_cache()
    for count in PROMPTS:
        driver.lengths = [0]
        driver.put({0: torch.randint(3, config.vocab_size, (count,)).tolist()}, count)
        microseconds, nodes = replayed(lambda count=count: driver.model.forward(count, False))
        yield Row(
            f"{name} prompt", count, nodes, microseconds, floor_us(config, weights, count, [count], min(count, 256))
        )


def kernel_rows(name: str, config: ModelConfig, weights: GpuWeights) -> Iterator[Row]:
    """The small kernels, a layer's worth of launches in a row; what they move over the reading speed is the floor."""
    layer = weights.layers[0]
    heads = config.num_attention_heads + 2 * config.num_key_value_heads
    host_tables = rope_tables(config, 8192)
    tables = RopeTables(host_tables.cosines.cuda(), host_tables.sines.cuda())
    cache = KVCache(config, 8192 // BLOCK_TOKENS, BLOCK_TOKENS, weights.dtype, "cuda")
    for tokens in (1, 64, 256, 8192):
        hidden, qkv, gate_up = (
            torch.randn(tokens, width, device="cuda").to(weights.dtype)
            for width in (config.hidden_size, heads * config.head_dim, 2 * config.intermediate_size)
        )
        at = torch.arange(tokens, dtype=torch.int32, device="cuda")
        launches: list[tuple[str, int, Callable[[], object]]] = [
            ("norm", 2 * hidden.nbytes, lambda x=hidden: rms_norm(x, layer.input_norm, 1e-5)),
            ("gather_norm", 2 * hidden.nbytes, lambda x=hidden, at=at: gather_norm(x, at, layer.input_norm, 1e-5)),
            (
                "rope_store",
                2 * qkv.nbytes + tokens * config.head_dim * 4,
                lambda x=qkv, at=at: rope_store(x, at, at, tables, layer.head_norms, cache.keys[0], cache.values[0]),
            ),
            ("silu_mul", gate_up.nbytes + gate_up.nbytes // 2, lambda x=gate_up: silu_mul(x)),
        ]
        for what, moved, launch in launches:
            microseconds, _ = replayed(lambda launch=launch: [launch() for _ in range(LAUNCHES)])
            yield Row(f"{name} {what}", tokens, 1, microseconds / LAUNCHES, moved / READ_BYTES_PER_US)


def loading_line(name: str, weights: GpuWeights) -> str:
    """How long it takes to load these weights from a file that was just written, and so is in memory."""
    with tempfile.TemporaryDirectory() as place:
        folder = write_folder(Path(place), name)
        save_file({part: tensor.cpu() for part, tensor in weights.parts.items()}, folder / "model.safetensors")
        opened = open_folder(folder, name)
        begin = time.perf_counter()
        load_weights(opened, weights.dtype, lambda done, total: None)
        seconds = time.perf_counter() - begin
        size = (folder / "model.safetensors").stat().st_size / 1e9
    return f"{name}: {size:.2f} GB loaded in {seconds:.2f} s ({size / seconds:.1f} GB/s)"


def all_rows(names: list[str], parts: Sequence[str], attention: Sequence[str], decodes: Sequence[int]) -> Iterator[Row]:
    """Every line of the table, the largest model's steps last."""
    for name in sorted(names, key=lambda name: SHAPES[name]["hidden_size"]):
        config = ModelConfig.from_dict(shape_config(name))
        weights = random_weights(config, torch.bfloat16, 1)
        if "kernels" in parts:
            yield from kernel_rows(name, config, weights)
        if "decodes" in parts:
            if set(parts) == set(PARTS):
                yield from decode_rows(name, config, weights, False, attention[0], decodes)
            for way in attention:
                yield from decode_rows(name, config, weights, True, way, decodes)
        if name == LOADED and "loading" in parts:
            print(loading_line(name, weights), flush=True)
        if name == PROMPTED and "prompts" in parts:
            yield from prompt_rows(name, config, weights)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--attention", nargs="+", choices=list(ATTENTION), default=["fused-late"])
    parser.add_argument("--tokens", nargs="+", type=int, default=DECODES, help="sequences of a decode step")
    parser.add_argument("--json", type=Path, help="write the rows there too")
    options = parser.parse_args()
    print(f"{'what':<44}{'tokens':>7}{'kernels':>9}{'us':>12}{'floor us':>12}{'times':>8}", flush=True)
    rows = []
    for row in all_rows(options.models, options.parts, options.attention, options.tokens):
        rows.append(row)
        print(row, flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
