"""Server-sent events, as far as OpenAI-compatible endpoints use them.

Format: the "Server-sent events" section of the HTML standard. Only `data` matters here.
"""

from __future__ import annotations

MAX_EVENT_BYTES = 16 * 1024 * 1024


class SseError(Exception):
    """An event larger than any that an endpoint should send."""


class SseDecoder:
    """Cuts a byte stream into the `data` payloads of its events."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """Payloads of the events that `piece` completes.

        Raises:
            SseError: an event exceeds MAX_EVENT_BYTES.
        """
        lines = (self._rest + piece).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) + sum(map(len, self._data)) > MAX_EVENT_BYTES:
            raise SseError(f"an event is larger than {MAX_EVENT_BYTES} bytes")
        payloads = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                payloads.append(b"\n".join(self._data))
                self._data.clear()
        return payloads
