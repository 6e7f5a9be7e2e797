"""The client of a streaming scenario, in a process of its own: `python -m tests.bench.front.reader` with a `Job` on
standard input.

It only takes note of when which bytes came; what they are is looked at afterwards. So one core reads faster than a
worker writes.
"""

from __future__ import annotations

import json
import re
import selectors
import socket
import ssl
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from tests.bench.front.asking import connect, request
from tests.bench.front.text import DIGITS

_TEXT = re.compile(rb'"(?:text|content)":"([0-9a-f]*)"')
_PIECE = 1 << 16


@dataclass(frozen=True)
class Job:
    """What to ask, on how many connections, and the .npy file for what came."""

    url: str
    streams: int
    tokens: int
    chat: bool
    result: str


@dataclass
class Stream:
    """One connection and what came over it."""

    sock: socket.socket
    pieces: list[bytes] = field(default_factory=list)
    stamps: list[int] = field(default_factory=list)

    def read(self) -> bool:
        """Takes what has come; whether the answer has ended."""
        while True:
            try:
                piece = self.sock.recv(_PIECE)
            except (ssl.SSLWantReadError, BlockingIOError):
                return False
            self.stamps.append(time.monotonic_ns())
            self.pieces.append(piece)
            if not piece or piece.endswith(b"0\r\n\r\n"):
                return True

    def arrivals(self, number: int, tokens: int) -> np.ndarray:
        """A row for each token: stream, tick, when it came (ns), whether it was the last one of its event.

        Raises:
            ValueError: the stream is not whole.
        """
        whole = b"".join(self.pieces)
        ends = np.cumsum([len(piece) for piece in self.pieces])
        rows = []
        for match in _TEXT.finditer(whole):
            stamp = self.stamps[int(np.searchsorted(ends, match.end()))]
            ticks = match[1]
            for at in range(0, len(ticks), DIGITS):
                rows.append((number, int(ticks[at : at + DIGITS], 16), stamp, at + DIGITS == len(ticks)))
        if len(rows) != tokens or b"data: [DONE]\n\n" not in whole:
            raise ValueError(f"stream {number} brought {len(rows)} of {tokens} tokens: {whole[:300]!r}")
        return np.array(rows, np.int64)


def read(job: Job) -> np.ndarray:
    """All streams at once; rows as `Stream.arrivals` gives them."""
    asked = request(job.tokens, chat=job.chat, stream=True)
    streams = [Stream(connect(job.url)) for _ in range(job.streams)]
    selector = selectors.EpollSelector()
    for stream in streams:
        stream.sock.sendall(asked)
        stream.sock.setblocking(False)
        selector.register(stream.sock, selectors.EVENT_READ, stream)
    left = len(streams)
    while left:
        for key, _ in selector.select():
            if key.data.read():
                selector.unregister(key.fileobj)
                left -= 1
    return np.concatenate([stream.arrivals(number, job.tokens) for number, stream in enumerate(streams)])


def to_line(job: Job) -> bytes:
    """A job as it goes to the process."""
    return json.dumps(asdict(job)).encode()


def main() -> None:
    """Does one job."""
    job = Job(**json.loads(sys.stdin.buffer.read()))
    np.save(Path(job.result), read(job))


if __name__ == "__main__":
    main()
