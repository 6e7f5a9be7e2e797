"""Products of few tokens on a GPU, beside torch's and beside the floor: `python -m tests.bench.gpu_skinny`.

Each product is timed as replays of a CUDA graph that goes round enough copies of its matrix that none is still in the
L2 cache; then all products of a model are, layer after layer with their own matrices and without attention. The floor
is the matrix's bytes over what the GPU was measured to read. Times in µs, the median of replays.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from gpu_runtime.kernels.gpu.gated import silu_mul
from gpu_runtime.kernels.gpu.norm import rms_norm
from gpu_runtime.kernels.gpu.skinny import SkinnyKernels, Weighted
from gpu_runtime.model.config import ModelConfig
from gpu_runtime.model.gpu_llama import Projections, TorchProjections
from gpu_runtime.model.gpu_skinny import SkinnyProjections
from gpu_runtime.model.gpu_weights import GpuWeights, random_weights

READ_BYTES_PER_US = 4.40e6
ROTATED_BYTES = 300 << 20
Multiply = Callable[[torch.Tensor, torch.Tensor], object]

TOKENS = (1, 2, 4, 8, 16, 32, 64)
REPLAYS = 5
EPSILON = 1e-5


class Shape(NamedTuple):
    """A model's sizes."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int


MODELS = {
    "llama 8b": Shape(4096, 14336, 32, 32, 8, 128256),
    "llama 1b": Shape(2048, 8192, 16, 32, 8, 128256),
    "smollm2": Shape(576, 1536, 30, 9, 3, 49152),
}
# How kernels follow each other: pieces still to be asked for when the next may start; None: not before the end.
OVERLAPS: dict[str, int | None] = {"none": None, "last": 0, "1": 1, "2": 2, "4": 4, "8": 8, "start": 1 << 20}


@dataclass
class Row:
    """One line of the table."""

    what: str
    tokens: int
    floor: float
    ours: float
    torch: float


def config_of(shape: Shape) -> ModelConfig:
    return ModelConfig.from_dict(
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": shape.hidden,
            "intermediate_size": shape.inner,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "vocab_size": shape.vocabulary,
            "max_position_embeddings": 8192,
            "rms_norm_eps": EPSILON,
            "tie_word_embeddings": True,
        }
    )


def replay_us(body: Callable[[], object], parts: int) -> float:
    """Median time of the captured body, by `parts`."""
    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    times = []
    for _ in range(REPLAYS + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / parts)
    return statistics.median(times[1:])


@dataclass(frozen=True)
class Product:
    """One kind of product: how to compute it with a matrix, by us and by torch."""

    name: str
    columns: int
    units: int
    rows: int
    ours: Multiply
    torch: Multiply


def products(config: ModelConfig) -> list[Product]:
    hidden, inner = config.hidden_size, config.intermediate_size
    heads = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    kernels, norm = SkinnyKernels(), Weighted(torch.ones(hidden, dtype=torch.bfloat16, device="cuda"), EPSILON)
    residual = torch.zeros(max(TOKENS), hidden, dtype=torch.bfloat16, device="cuda")

    def normed(inputs: torch.Tensor) -> torch.Tensor:
        return rms_norm(inputs, norm.weight, EPSILON)

    def onto(name: str, columns: int) -> Product:
        return Product(
            name,
            columns,
            hidden,
            hidden,
            lambda inputs, weight: kernels.project_onto(residual[: len(inputs)], inputs, weight),
            lambda inputs, weight: residual[: len(inputs)].addmm_(inputs, weight.T),
        )

    return [
        Product(
            "qkv",
            hidden,
            heads,
            heads,
            lambda inputs, weight: kernels.project(inputs, norm, weight),
            lambda inputs, weight: torch.mm(normed(inputs), weight.T),
        ),
        onto("output", hidden),
        Product(
            "gated",
            hidden,
            inner,
            2 * inner,
            lambda inputs, weight: kernels.project_gated(inputs, norm, weight),
            lambda inputs, weight: silu_mul(torch.mm(normed(inputs), weight.T)),
        ),
        onto("down", inner),
        Product(
            "head",
            hidden,
            config.vocab_size,
            config.vocab_size,
            lambda inputs, weight: kernels.project(inputs, norm, weight, dtype=torch.float32),
            lambda inputs, weight: torch.mm(normed(inputs), weight.T, out_dtype=torch.float32),
        ),
    ]


def rotated_us(multiply: Multiply, inputs: torch.Tensor, weights: torch.Tensor) -> float:
    def body() -> None:
        for weight in weights:
            multiply(inputs, weight)

    return replay_us(body, len(weights))


def time_product(model: str, product: Product, tokens: tuple[int, ...]) -> Iterator[Row]:
    size = product.rows * product.columns * 2
    copies = min(max(2, -(-ROTATED_BYTES // size)), 256)
    weights = torch.empty(copies, product.rows, product.columns, dtype=torch.bfloat16, device="cuda")
    weights.normal_(0, product.columns**-0.5)
    for count in tokens:
        inputs = torch.randn(count, product.columns, device="cuda").bfloat16()
        times = [rotated_us(multiply, inputs, weights) for multiply in (product.ours, product.torch)]
        yield Row(f"{model} {product.name}", count, size / READ_BYTES_PER_US, *times)


def all_products(config: ModelConfig, weights: GpuWeights, by: Projections, tokens: int) -> Callable[[], None]:
    start = torch.randn(tokens, config.hidden_size, device="cuda").bfloat16()
    attended = torch.randn(tokens, config.num_attention_heads * config.head_dim, device="cuda").bfloat16()
    rows = torch.arange(tokens, dtype=torch.int32, device="cuda")

    def body() -> None:
        hidden = start.clone()
        for layer in weights.layers:
            by.qkv(hidden, layer)
            by.output(attended, hidden, layer)
            by.down(by.gated(hidden, layer), hidden, layer)
        by.head(hidden, rows)

    return body


def step_bytes(weights: GpuWeights) -> int:
    matrices = [
        linear.weight for layer in weights.layers for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)
    ]
    return sum(matrix.nbytes for matrix in (*matrices, weights.head))


def time_chains(model: str, config: ModelConfig, tokens: tuple[int, ...]) -> Iterator[str]:
    """A line for each number of tokens: the floor, torch, and ours for every overlap."""
    weights = random_weights(config, torch.bfloat16, 1)
    floor = step_bytes(weights) / READ_BYTES_PER_US
    for count in tokens:
        times = {"floor": floor}
        by_torch = TorchProjections(config, weights)
        times["torch"] = replay_us(all_products(config, weights, by_torch, count), 1)
        for name, early in OVERLAPS.items():
            kernels = SkinnyKernels(programmatic=early is not None, early=early or 0)
            by: Projections = SkinnyProjections(config, weights, kernels)
            times[name] = replay_us(all_products(config, weights, by, count), 1)
        best = min(times[name] for name in OVERLAPS)
        cells = "".join(f"{value:10.1f}" for value in times.values())
        yield f"{model:<10}{count:>6}{cells}{best / floor:8.3f}"


def main() -> None:
    """Prints the tables, the short one of whole models last."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--json", type=Path, help="write the rows of single products here")
    options = parser.parse_args()
    tokens = tuple(options.tokens)
    configs = {name: config_of(MODELS[name]) for name in options.models}
    rows: list[Row] = []
    print(f"{'product':<20}{'tokens':>7}{'floor':>9}{'ours':>9}{'torch':>9}{'ours/floor':>12}")
    for name, config in configs.items():
        for product in products(config):
            for row in time_product(name, product, tokens):
                rows.append(row)
                print(
                    f"{row.what:<20}{row.tokens:>7}{row.floor:9.2f}{row.ours:9.2f}{row.torch:9.2f}"
                    f"{row.ours / row.floor:12.2f}"
                )
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows]))
    headings = "".join(f"{name:>10}" for name in ("floor", "torch", *OVERLAPS))
    print(f"{'model':<10}{'tokens':>6}{headings}{'/floor':>8}")
    for name, config in configs.items():
        for line in time_chains(name, config, tokens):
            print(line)


if __name__ == "__main__":
    main()
