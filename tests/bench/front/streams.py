"""One worker streams: tokens per second, CPU time, and the delay from a token record to the client's read."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
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
    """So many streams of `rate` tokens/s each for so many seconds.

    `phases`: 1 when all sequences get their token in the same step, else they are spread over a token's time.
    """

    name: str
    streams: int
    rate: float
    seconds: float
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


@dataclass
class _Clock:
    """The worker's CPU time and the wall's, from the moment when all streams are open."""

    worker: psutil.Process | None = None
    began: float = 0.0
    spent: float = 0.0
    seen: list[float] = field(default_factory=list)

    def start(self) -> None:
        self.began, self.spent = time.monotonic(), self._cpu()

    def stop(self) -> tuple[float, float]:
        return time.monotonic() - self.began, self._cpu() - self.spent

    def _cpu(self) -> float:
        assert self.worker is not None
        return sum(self.worker.cpu_times()[:2])


def measure(scenario: Scenario) -> Measured:
    """Runs a front end, its device and a client for one scenario."""
    clock = _Clock()
    device = PacedDevice(scenario.streams, scenario.rate, scenario.phases, clock.start)
    device.start()
    tokens = int(scenario.rate * scenario.seconds)
    with tempfile.TemporaryDirectory() as folder, front_end(*FLAGS, device=device, files=text.files()) as running:
        clock.worker = psutil.Process(running.workers()[0])
        url = running.https if scenario.tls else running.http
        job = Job(url, scenario.streams, tokens, scenario.chat, str(Path(folder) / "arrivals.npy"))
        _client(job)
        seconds, spent = clock.stop()
        return _judge(scenario, device, np.load(job.result), seconds, spent)


def _client(job: Job) -> None:
    command = [sys.executable, "-m", "tests.bench.front.reader"]
    subprocess.run(command, input=to_line(job), check=True, cwd=ROOT, timeout=120)


def _judge(scenario: Scenario, device: PacedDevice, arrivals: np.ndarray, seconds: float, spent: float) -> Measured:
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
        core_share=spent / seconds,
        tokens_per_event=len(arrivals) / int(last.sum()),
        delay_p50=float(p50),
        delay_p99=float(p99),
        delay_max=float(delays.max()),
    )
