"""Time of one scheduler step: `python -m tests.bench.scheduler_step [--library FILE] [--json FILE]`.

Every sequence decodes one token a step. On the host the time is that of the whole C call, harvest to emit, as the chain
makes it. With the library that `tests/gpu/build.py` makes, the step runs on the GPU and the time is that between events
around its kernel.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from blink_proto import arena
from gpu_runtime.scheduler.host import HostScheduler, Plan, use_library
from tests.bench.arena_memory import Memory, make_config

STEPS = 900
WARM_UP = 100


class Decoding:
    """A scheduler with so many sequences on channel 0, all of which decode."""

    def __init__(self, sequences: int) -> None:
        config = make_config(
            channels=8,
            submit_slots=256,
            cancel_slots=256,
            log_slots=8192,
            heap_tokens=1 << 18,
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
        self.memory = Memory(config)
        self._sequences = sequences
        self._scheduler = HostScheduler(config, self.memory.inbound, self.memory.outbound)
        self._now = 0
        self._submit()
        plan = self.step([])
        while len(plan.rows) < sequences:
            plan = self.step(np.full(len(plan.rows), 5, np.int32))
        self._sampled = np.full(sequences, 5, np.int32)

    def _submit(self) -> None:
        self.memory.control[0]["lease"] = 1
        self.step([])
        self.memory.heap[0][:] = 7
        for record in self.memory.submit[0][: self._sequences]:
            record["prompt_tokens"], record["max_tokens"], record["top_p"] = 16, WARM_UP + STEPS - 10, 1.0
            record["commit"] = arena.pack_commit_word(1, 1)

    def step(self, sampled: Any) -> Plan:
        """One step; all of the log is read."""
        self._now += 1
        begin = time.perf_counter_ns()
        plan = self._scheduler.step(sampled, self._now)
        self._nanoseconds = time.perf_counter_ns() - begin
        self.memory.control[0]["log_read"] = self.memory.out[0]["log_written"]
        return plan

    def microseconds(self) -> float | None:
        """Of a step in which every sequence decodes; None when one has ended."""
        kernel_time = self._scheduler.kernel_microseconds
        if len(self.step(self._sampled).rows) != self._sequences:
            return None
        return self._nanoseconds / 1e3 if kernel_time is None else kernel_time()


def step_times(sequences: int) -> np.ndarray:
    """Microseconds of each step with so many sequences decoding."""
    decoding = Decoding(sequences)
    times = iter(decoding.microseconds, None)
    return np.array(list(islice(times, WARM_UP + STEPS - 20)))[WARM_UP:]


def lease_times(sequences: int) -> tuple[np.ndarray, np.ndarray]:
    """Microseconds of steps in which a lease of another channel begins, and of those in which it ends: full steps all.
    Both wipe the channel's log of 128 KiB, and the first ones its rings and its prompt heap, 1 MiB."""
    decoding = Decoding(sequences)
    control, times = decoding.memory.control[1], []
    for step in range(STEPS // 2):
        control["lease"] = 0 if step % 2 else 1 + step // 2
        times.append(decoding.microseconds())
    assert int(decoding.memory.out[1]["lease"]) == STEPS // 4
    return np.array(times[WARM_UP::2]), np.array(times[WARM_UP + 1 :: 2])


def spread(times: np.ndarray) -> dict[str, float]:
    """Of microseconds."""
    return {"p50_us": float(np.median(times)), "p99_us": float(np.percentile(times, 99))}


def main() -> None:
    """Prints lines for 1, 64 and 256 sequences."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument("--library", type=Path, help="another build of the scheduler")
    arguments = parser.parse_args()
    if arguments.library:
        use_library(arguments.library)
    figures = {}
    for sequences in (1, 64, 256):
        begun, ended = lease_times(sequences)
        kinds = {"": step_times(sequences), ", a lease begins": begun, ", a lease ends": ended}
        for kind, times in kinds.items():
            figures[f"{sequences}{kind}"] = found = spread(times)
            print(f"{sequences:4d} sequences{kind}: {found['p50_us']:6.1f} µs (P50) {found['p99_us']:6.1f} µs (P99)")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
