"""One worker streams: tokens per second, CPU time, and the delay from a token record to the client's read."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from tests.bench.front import text
from tests.bench.front.device import PacedDevice
from tests.bench.front.reader import Job, to_line
from tests.front_end import ROOT, front_end

FLAGS = ("--workers", "1", "--no-access-log", "--queue-depth", "512")


@dataclass(frozen=True)
class Scenario:
    """So many streams of `rate` tokens/s each.

    `phases`: 1 when all sequences get their token in the same step, else they are spread over a token's time.
    """

    name: str
    streams: int
    rate: float
    phases: int = 1
    tls: bool = True
    chat: bool = False


@dataclass
class Measured:
    """Delays in ms; CPU time of the worker in µs."""

    offered: float
    tokens_per_second: float
    cpu_per_token: float
    core_share: float
    tokens_per_event: float
    delay_p50: float
    delay_p99: float
    delay_max: float


class _Clock:
    """The worker's CPU time from the moment when all streams are open."""

    def __init__(self) -> None:
        self.worker: psutil.Process | None = None
        self._before = 0.0

    def start(self) -> None:
        self._before = self._now()

    def spent(self) -> float:
        return self._now() - self._before

    def _now(self) -> float:
        assert self.worker is not None
        user, system, *_ = self.worker.cpu_times()
        return float(user + system)


def measure(scenario: Scenario, seconds: float) -> Measured:
    """Runs a front end, its device and a client for one scenario, and lets it stream for so long."""
    clock = _Clock()
    own, others = _cores()
    device = PacedDevice(scenario.streams, scenario.rate, scenario.phases, clock.start, others)
    device.start()
    tokens = int(scenario.rate * seconds)
    with tempfile.TemporaryDirectory() as folder, front_end(*FLAGS, device=device, files=text.files()) as running:
        clock.worker = psutil.Process(running.workers()[0])
        clock.worker.cpu_affinity(own)
        url = running.https if scenario.tls else running.http
        job = Job(url, scenario.streams, tokens, scenario.chat, str(Path(folder) / "arrivals.npy"), others)
        _client(job, 30 + 3 * seconds)
        return _judge(scenario, device, np.load(job.result), clock.spent())


def _cores() -> tuple[list[int], list[int]]:
    """One for the worker alone, and the others for the device and the client, where there are several."""
    first, *others = sorted(os.sched_getaffinity(0))
    return [first], others or [first]


def _client(job: Job, timeout: float) -> None:
    command = [sys.executable, "-m", "tests.bench.front.reader"]
    subprocess.run(command, input=to_line(job), check=True, cwd=ROOT, timeout=timeout)


def _judge(scenario: Scenario, device: PacedDevice, arrivals: np.ndarray, spent: float) -> Measured:
    stream, tick, came, last = arrivals.T
    delays = (came - np.array(device.stamps)[tick]) / 1e6
    if delays.min() < 0 or (np.diff(tick)[np.diff(stream) == 0] <= 0).any():
        raise ValueError("tokens came before they were written, or in another order")
    p50, p99 = np.percentile(delays, [50, 99])
    wall = (came.max() - device.stamps[0]) / 1e9
    return Measured(
        offered=scenario.streams * scenario.rate,
        tokens_per_second=len(arrivals) / wall,
        cpu_per_token=1e6 * spent / len(arrivals),
        core_share=spent / wall,
        tokens_per_event=len(arrivals) / int(last.sum()),
        delay_p50=float(p50),
        delay_p99=float(p99),
        delay_max=float(delays.max()),
    )
