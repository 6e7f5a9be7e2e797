"""The soft GPU's matrix product beside torch's, weights not in the caches: `python -m tests.bench.linear`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch

from gpu_runtime.kernels.linear import Linear, project

SHAPES = ((576, 1536), (1536, 576), (576, 49152))
CACHE_BYTES = 128 << 20
REPEATS = 5


def milliseconds(product: Callable[[torch.Tensor], object], weights: list[torch.Tensor]) -> float:
    """Best time of one product over several passes through all weights."""
    best = float("inf")
    for _ in range(REPEATS):
        begin = time.perf_counter()
        for weight in weights:
            product(weight)
        best = min(best, (time.perf_counter() - begin) / len(weights))
    return best * 1e3


def main() -> None:
    """Prints a line for each shape and number of rows."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    print("in → out, rows: own / torch, ms")
    for inner, columns in SHAPES:
        count = max(2, CACHE_BYTES // (4 * inner * columns))
        weights = [torch.randn(columns, inner) for _ in range(count)]
        for rows in (1, 8, 128):
            inputs = torch.randn(rows, inner)
            own = milliseconds(lambda weight, x=inputs: project(x, [Linear(weight)]), weights)
            theirs = milliseconds(lambda weight, x=inputs: torch.nn.functional.linear(x, weight), weights)
            print(f"{inner} → {columns}, {rows:3d} rows: {own:.2f} / {theirs:.2f}")


if __name__ == "__main__":
    main()
