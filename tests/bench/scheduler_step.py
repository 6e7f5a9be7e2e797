"""Time of one scheduler step: `python -m tests.bench.scheduler_step [--library FILE] [--json FILE]`.

Every sequence decodes one token a step. On the host the time is that of the whole C call, harvest to emit, as the chain
makes it. With the library that `tests/gpu/build.py` makes, the step runs on the GPU and the time is that between events
around its kernel.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np

from blink_proto import arena
from gpu_runtime.scheduler.host import HostScheduler, use_library
from tests.bench.arena_memory import Memory, make_config

STEPS = 900
WARM_UP = 100


def step_times(sequences: int) -> np.ndarray:
    """Microseconds of each step with so many sequences decoding."""
    config = make_config(
        channels=8,
        submit_slots=256,
        cancel_slots=256,
        log_slots=8192,
        heap_tokens=1 << 16,
        vocab_size=50000,
        max_model_tokens=2048,
        max_sequences=512,
        max_running=256,
        token_budget=2048,
        block_tokens=16,
        blocks=256 * 64 + 1,
        blocks_per_sequence=128,
        lease_timeout_ns=10**15,
        prefix_cache=1,
    )
    memory = Memory(config)
    scheduler = HostScheduler(config, memory.inbound, memory.outbound)
    control, out = memory.control[0], memory.out[0]
    control["lease"] = 1
    scheduler.step([], 1)
    memory.heap[0][:] = 7
    for record in memory.submit[0][:sequences]:
        record["prompt_tokens"], record["max_tokens"], record["top_p"] = 16, WARM_UP + STEPS - 10, 1.0
        record["commit"] = arena.pack_commit_word(1, 1)
    plan = scheduler.step([], 2)
    while len(plan.rows) < sequences:
        plan = scheduler.step(np.full(len(plan.rows), 5, np.int32), 3)
        control["log_read"] = out["log_written"]
    kernel_time = scheduler.kernel_microseconds
    times = []
    sampled = np.full(sequences, 5, np.int32)
    for now in range(WARM_UP + STEPS - 20):
        begin = time.perf_counter_ns()
        plan = scheduler.step(sampled, now + 10)
        times.append((time.perf_counter_ns() - begin) / 1e3 if kernel_time is None else kernel_time())
        if len(plan.rows) != sequences:
            break
        control["log_read"] = out["log_written"]
    return np.array(times[WARM_UP:])


def main() -> None:
    """Prints a line for 1, 64 and 256 sequences."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument("--library", type=Path, help="another build of the scheduler")
    arguments = parser.parse_args()
    if arguments.library:
        use_library(arguments.library)
    figures = {}
    for sequences in (1, 64, 256):
        times = step_times(sequences)
        p50, p99 = float(np.median(times)), float(np.percentile(times, 99))
        figures[sequences] = {"p50_us": p50, "p99_us": p99}
        print(f"{sequences:4d} sequences: {p50:6.1f} µs (P50) {p99:6.1f} µs (P99)")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
