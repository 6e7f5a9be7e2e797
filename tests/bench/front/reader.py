"""The client of a streaming scenario, in a process of its own: `python -m tests.bench.front.reader` with a `Job` on
standard input.

It only takes what comes; when it came is the kernel's to say, and what it is is looked at afterwards. So neither a slow
client nor a busy core for it counts as the front end's delay. It looks every millisecond and does not wait for the
sockets: to wake a process of the same machine would be the sender's work, and is none over a network.
"""

from __future__ import annotations

import json
import os
import selectors
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from tests.bench.front.arrivals import Stream
from tests.bench.front.asking import connect, request

SILENCE_SECONDS = 1.5
"""When nothing comes for so long, all is said: the end of an answer is not to be seen before it is deciphered."""
LOOK_SECONDS = 0.001


@dataclass(frozen=True)
class Job:
    """What to ask, on how many connections, the .npy file for what came, and the cores to run on."""

    url: str
    streams: int
    tokens: int
    chat: bool
    result: str
    cores: list[int]


def read(job: Job) -> np.ndarray:
    """All streams at once; rows as `Stream.arrivals` gives them, but by CLOCK_MONOTONIC."""
    asked = request(job.tokens, chat=job.chat, stream=True)
    tls = job.url.startswith("https")
    streams = [Stream.over(connect(job.url), tls=tls) for _ in range(job.streams)]
    selector = selectors.EpollSelector()
    for stream in streams:
        stream.ask(asked)
        selector.register(stream.sock, selectors.EVENT_READ, stream)
    latest = time.monotonic()
    while not all(stream.begun for stream in streams) or time.monotonic() - latest < SILENCE_SECONDS:
        time.sleep(LOOK_SECONDS)
        for key, _ in selector.select(0):
            latest = time.monotonic()
            if key.data.read():
                selector.unregister(key.fileobj)
    rows = np.concatenate([stream.arrivals(number, job.tokens) for number, stream in enumerate(streams)])
    rows[:, 2] -= time.time_ns() - time.monotonic_ns()
    return rows


def to_line(job: Job) -> bytes:
    """A job as it goes to the process."""
    return json.dumps(asdict(job)).encode()


def main() -> None:
    """Does one job."""
    job = Job(**json.loads(sys.stdin.buffer.read()))
    os.sched_setaffinity(0, job.cores)
    np.save(Path(job.result), read(job))


if __name__ == "__main__":
    main()
