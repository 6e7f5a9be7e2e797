"""Tokens per second of transformers on the built-in model, for comparison: `python -m tests.bench.transformers_rate`.

Greedy generation of one request in float32 with a thread for each core, the prompt's pass not counted, as in the time
per output token that the load generator reports.
"""

from __future__ import annotations

import os
import time

import torch
from transformers import AutoModelForCausalLM

from gpu_runtime.model.source import DEFAULT_NAME, resolve_model

TOKENS = 64
PROMPT = list(range(1000, 1032))


def tokens_per_second() -> float:
    """The best of three runs."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    folder = resolve_model(DEFAULT_NAME, lambda done, total, what: None)
    model = AutoModelForCausalLM.from_pretrained(folder.path, dtype=torch.float32).eval()
    ids = torch.tensor([PROMPT])

    def seconds(count: int) -> float:
        begin = time.perf_counter()
        model.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=2)
        return time.perf_counter() - begin

    with torch.inference_mode():
        seconds(4)
        return max((TOKENS - 1) / (seconds(TOKENS) - seconds(1)) for _ in range(3))


if __name__ == "__main__":
    print(f"transformers alone: {tokens_per_second():.1f} tokens/s")
