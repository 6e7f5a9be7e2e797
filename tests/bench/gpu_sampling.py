"""Time of the sampling kernel on a GPU: `python -m tests.bench.gpu_sampling`.

For each way to sample, microseconds a launch for 1, 64 and 256 rows, from captured graphs. The floor of a pass over the
logits is their bytes over 4.40 TB/s; one row is one block's work, which reads some 64 bytes a clock.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tests.bench.gpu_attention import microseconds
from tests.sampling_cases import cases, spread
from tests.sampling_device import OnDevice

ROWS = (1, 64, 256)
VOCABULARIES = (49152, 128256)
LAUNCHES = 20
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 1},
    "top-k 40": {"temperature": 1, "top_k": 40},
    "top-p 0.95": {"temperature": 1, "top_p": 0.95},
    "temperature 2, top-p 0.95": {"temperature": 2, "top_p": 0.95},
    "top-k 40, top-p 0.9, min-p 0.05": {"temperature": 1, "top_k": 40, "top_p": 0.9, "min_p": 0.05},
    "min-p 0.05": {"temperature": 1, "min_p": 0.05},
    "penalties": {"temperature": 1, "repetition_penalty": 1.2, "presence_penalty": 1, "frequency_penalty": 0.5},
    "bias of 300": {"temperature": 1, "bias": 300},
    "bans of 1,024 words": {"temperature": 1, "bans": 1000},
    "greedy, own log-probability": {"temperature": 0, "logprobs": 1},
    "greedy, 20 log-probabilities": {"temperature": 0, "logprobs": 21},
}


def time_of(launch: Callable[[], object]) -> float:
    """Microseconds of one launch."""
    return microseconds([launch] * LAUNCHES)


def torch_greedy(logits: torch.Tensor) -> torch.Tensor:
    """For comparison."""
    return logits.argmax(-1)


def torch_temperature(logits: torch.Tensor) -> torch.Tensor:
    """For comparison; what serving engines do without sorting."""
    return (logits.softmax(-1) / torch.empty_like(logits).exponential_()).argmax(-1)


def main() -> int:
    """Prints one table."""
    if not torch.cuda.is_available():
        print("there is no CUDA device", file=sys.stderr)
        return 0
    lines = [f"{'sampling, µs a launch':42}" + "".join(f"{rows:>5} rows" for rows in ROWS)]
    for vocabulary in VOCABULARIES:
        lines.append(f"{vocabulary} tokens")
        all_logits = spread(max(ROWS), vocabulary)
        lines += _lines(all_logits)
        floors = [rows * vocabulary * 4 / 4.40e12 * 1e6 for rows in ROWS]
        lines.append(_line("floor of one pass", floors))
    print("\n".join(lines))
    return 0


def _lines(logits: torch.Tensor) -> list[str]:
    lines = []
    for name, way in WAYS.items():
        steps = [OnDevice(cases(logits[:rows].contiguous(), [way])) for rows in ROWS]
        lines.append(_line(name, [time_of(step.launch) for step in steps]))
    on_device = logits.cuda()
    for name, run in (("torch, greedy", torch_greedy), ("torch, temperature", torch_temperature)):
        lines.append(_line(name, [time_of(partial(run, on_device[:rows])) for rows in ROWS]))
    return lines


def _line(name: str, times: list[float]) -> str:
    return f"  {name:40}" + "".join(f"{time:10.1f}" for time in times)


if __name__ == "__main__":
    sys.exit(main())
