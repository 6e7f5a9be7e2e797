"""The client of one-token completions, in a process of its own: `python -m tests.bench.front.caller URL CONNECTIONS
SECONDS` prints how many answers came. Each connection asks again when it has its answer."""

from __future__ import annotations

import selectors
import socket
import ssl
import sys
import time
from dataclasses import dataclass

from tests.bench.front.asking import connect, request, tls_context

_PIECE = 1 << 16


@dataclass
class Caller:
    """A connection that asks again and again."""

    sock: socket.socket
    request: bytes
    answers: int = 0

    def read(self) -> None:
        """Takes what has come, and asks again when it ends an answer.

        Raises:
            ConnectionError: it is another answer than 200.
        """
        try:
            while True:
                piece = self.sock.recv(_PIECE)
                if not piece or (piece.startswith(b"HTTP/") and b" 200 " not in piece[:16]):
                    raise ConnectionError(f"no completion: {piece[:200]!r}")
                if piece.endswith(b"}"):
                    self.answers += 1
                    self.sock.sendall(self.request)
        except (ssl.SSLWantReadError, BlockingIOError):
            return


def call(url: str, connections: int, seconds: float) -> int:
    """Answers on all connections together."""
    asked = request(1, chat=False, stream=False)
    context = tls_context()
    callers = [Caller(context.wrap_socket(connect(url)), asked) for _ in range(connections)]
    selector = selectors.EpollSelector()
    for caller in callers:
        caller.sock.sendall(asked)
        caller.sock.setblocking(False)
        selector.register(caller.sock, selectors.EVENT_READ, caller)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for key, _ in selector.select(0.1):
            key.data.read()
    return sum(caller.answers for caller in callers)


if __name__ == "__main__":
    print(call(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
