"""One stream's bytes and when the kernel received them, and what tokens they turn out to be."""

from __future__ import annotations

import re
import socket
import ssl
import struct
import time
from dataclasses import dataclass, field

import numpy as np

from tests.bench.front.asking import tls_context
from tests.bench.front.text import DIGITS

SO_TIMESTAMPNS = 35
"""Linux: each read comes with the moment at which its last packet arrived (CLOCK_REALTIME), see socket(7)."""
_STAMP = struct.Struct("qq")
_TEXT = re.compile(rb'"(?:text|content)":"([0-9a-f]*)"')
_PIECE = 1 << 16
_BEGINNING = 3


class Tls:
    """TLS apart from its socket, so that what comes can be deciphered when there is time."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext) -> None:
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out)
        while not self._shaken(sock):
            self._in.write(sock.recv(_PIECE))

    def cipher(self, data: bytes) -> bytes:
        """As it goes over the socket."""
        self._tls.write(data)
        return self._out.read()

    def decipher(self, data: bytes) -> bytes:
        """What is complete with these bytes."""
        self._in.write(data)
        parts = []
        try:
            while part := self._tls.read(_PIECE):
                parts.append(part)
        except (ssl.SSLWantReadError, ssl.SSLZeroReturnError):
            pass
        return b"".join(parts)

    def _shaken(self, sock: socket.socket) -> bool:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            sock.sendall(self._out.read())
            return False
        sock.sendall(self._out.read())
        return True


@dataclass
class Stream:
    """One connection and what came over it."""

    sock: socket.socket
    tls: Tls | None
    pieces: list[bytes] = field(default_factory=list)
    stamps: list[int] = field(default_factory=list)

    @classmethod
    def over(cls, sock: socket.socket, *, tls: bool) -> Stream:
        """Shakes hands where there is TLS."""
        return cls(sock, Tls(sock, tls_context()) if tls else None)

    def ask(self, request: bytes) -> None:
        """Sends the request; from then on reads do not wait."""
        self.sock.sendall(self.tls.cipher(request) if self.tls else request)
        self.sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        self.sock.setblocking(False)

    @property
    def begun(self) -> bool:
        """Whether the answer has: more has come than TLS says after its handshake."""
        return len(self.pieces) > _BEGINNING

    def read(self) -> bool:
        """Takes what has come; whether the connection has ended."""
        try:
            piece, notes, _, _ = self.sock.recvmsg(_PIECE, 64)
        except BlockingIOError:
            return False
        if notes:
            seconds, nanoseconds = _STAMP.unpack(notes[0][2])
            self.stamps.append(seconds * 10**9 + nanoseconds)
        else:
            self.stamps.append(time.time_ns())
        self.pieces.append(piece)
        return not piece

    def arrivals(self, number: int, tokens: int) -> np.ndarray:
        """A row for each token: stream, tick, when it came (ns, CLOCK_REALTIME), whether it was its event's last.

        Raises:
            ValueError: the stream is not whole.
        """
        plain = [self.tls.decipher(piece) for piece in self.pieces] if self.tls else self.pieces
        whole, ends = b"".join(plain), np.cumsum([len(piece) for piece in plain])
        rows = []
        for match in _TEXT.finditer(whole):
            stamp, ticks = self.stamps[int(np.searchsorted(ends, match.end()))], match[1]
            for at in range(0, len(ticks), DIGITS):
                rows.append((number, int(ticks[at : at + DIGITS], 16), stamp, at + DIGITS == len(ticks)))
        if len(rows) != tokens or b"data: [DONE]\n\n" not in whole:
            raise ValueError(f"stream {number} brought {len(rows)} of {tokens} tokens: {whole[:300]!r}")
        return np.array(rows, np.int64)
