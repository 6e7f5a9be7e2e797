"""What the channel protocol needs from a way to reach the arena."""

from __future__ import annotations

from typing import Protocol


class TransportError(Exception):
    """The arena cannot be reached, or is not what the session said."""


class Transport(Protocol):
    """Offsets are bytes from the start of a region; 8-byte words are read and written whole.

    Writes become visible to the device in the order of the calls as far as `commit` is concerned: whoever sees a
    committed word sees every `write` made before it.
    """

    def write(self, offset: int, payload: bytes) -> None:
        """Writes `payload` into the inbound region.

        Raises:
            TransportError: it does not lie within the region.
        """

    def commit(self, offset: int, word: int) -> None:
        """Writes a u64 into the inbound region, after all earlier writes.

        Raises:
            TransportError: it does not lie within the region, or is not aligned to 8 bytes.
        """

    def read(self, offset: int, size: int) -> bytes:
        """A copy of `size` bytes of the outbound region, word by word; later reads see nothing older.

        Raises:
            TransportError: they do not lie within the region, or are not aligned to 8 bytes.
        """

    def flush(self) -> None:
        """Waits until every write has reached the device's memory."""

    def close(self) -> None:
        """Lets the arena go. Nothing may be called afterwards."""
