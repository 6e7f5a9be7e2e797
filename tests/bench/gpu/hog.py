"""Processes that keep cores and memory busy: `python -m tests.bench.gpu.hog 24`, until its standard input ends.

Half of them compute, half of them copy memory beyond any cache.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator

import numpy as np

COPY_BYTES = 64 << 20
COMPUTED = 256


def compute() -> None:
    """Arithmetic, for ever."""
    numbers = np.random.default_rng(1).random((COMPUTED, COMPUTED))
    while True:
        numbers = numbers @ numbers
        numbers /= np.abs(numbers).max()


def copy() -> None:
    """Copies, for ever."""
    first, second = np.ones(COPY_BYTES, np.uint8), np.zeros(COPY_BYTES, np.uint8)
    while True:
        np.copyto(second, first)
        np.copyto(first, second)


@contextlib.contextmanager
def hogs(count: int, cores: Iterable[int]) -> Iterator[None]:
    """So many of them on those cores meanwhile."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.bench.gpu.hog", str(count), *map(str, sorted(cores))]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdout.readline()
        yield
    finally:
        process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()


def main() -> None:
    """Forks them, says so in a line, and ends them when the standard input ends."""
    count = int(sys.argv[1])
    if cores := [int(core) for core in sys.argv[2:]]:
        os.sched_setaffinity(0, cores)
    children = []
    for index in range(count):
        child = os.fork()
        if child == 0:
            sys.stdin.close()
            (compute if index % 2 else copy)()
        children.append(child)
    print("busy", flush=True)
    try:
        sys.stdin.read()
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)


if __name__ == "__main__":
    main()
