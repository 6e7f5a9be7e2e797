"""One-token completions: how many a second one worker answers over TLS, connections kept open."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import psutil

from blink_proto.arena import Finish
from tests import tiny_text
from tests.bench.front.device import SIZES, WINDOW
from tests.bench.front.streams import FLAGS
from tests.front_end import ROOT, front_end, make_device
from tests.replay import Script

CONNECTIONS = 64


@dataclass(frozen=True)
class Rate:
    """Requests per second, µs of the worker's CPU time for each, and its share of a core."""

    per_second: float
    cpu_per_request: float
    core_share: float


def measure(seconds: float) -> Rate:
    """Runs a front end, its device and a client."""
    device = make_device(sizes=SIZES, window=WINDOW)
    device.script = lambda submission: Script(tiny_text.ids("o"), Finish.LENGTH)
    with front_end(*FLAGS, device=device) as running:
        worker = psutil.Process(running.workers()[0])
        command = [sys.executable, "-m", "tests.bench.front.caller", running.https, str(CONNECTIONS)]
        before = sum(worker.cpu_times()[:2])
        done = subprocess.run([*command, str(seconds)], check=True, cwd=ROOT, timeout=120, stdout=subprocess.PIPE)
        spent = sum(worker.cpu_times()[:2]) - before
    answers = int(done.stdout)
    return Rate(answers / seconds, 1e6 * spent / answers, spent / seconds)
