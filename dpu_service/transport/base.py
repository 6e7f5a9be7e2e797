"""What the channel protocol needs from a way to reach the arena."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from blink_proto import arena

STUCK_SECONDS = 10.0
"""An RDMA device's work that takes longer is lost: devices give up after two seconds, but Soft-RoCE forgets some work
when its link goes down.
"""


class TransportError(Exception):
    """The arena cannot be reached, or is not what the session said. Only a new session helps."""


class Range(NamedTuple):
    """Bytes of a region: `offset` from its start, both in whole 8-byte words."""

    offset: int
    size: int


class Transport(Protocol):
    """Offsets are bytes from the start of a region; 8-byte words are read and written whole.

    Writes become visible to the device in the order of the calls as far as `commit` is concerned: whoever sees a
    committed word sees every `write` made before it.

    Nothing here waits. Where the device's memory is far away, `read` shows a local copy, and `fetch` asks for parts of
    it to be brought up to date; several fetches may be under way. Where it is near, `read` looks at the memory itself
    and a fetch has nothing to do. What is read later is never older.

    Every method may raise TransportError once the connection has failed; the same error then comes every time.
    """

    def write(self, offset: int, payload: bytes) -> None:
        """Writes `payload` into the inbound region.

        Raises:
            TransportError: it does not lie within what this front end may write.
        """

    def commit(self, offset: int, word: int) -> None:
        """Writes a u64 into the inbound region, after all earlier writes.

        Raises:
            TransportError: it does not lie within what this front end may write, or is not aligned to 8 bytes.
        """

    def read(self, offset: int, size: int) -> bytes:
        """A copy of `size` bytes of the outbound region, word by word, as far as they have arrived.

        Raises:
            TransportError: they do not lie within what this front end may read, or are not aligned to 8 bytes.
        """

    def fetch(self, *ranges: Range) -> int:
        """Asks for parts of the outbound region, read in this order; a ticket for `fetched`.

        Where too many are under way already nothing is asked for; ask again later.
        """

    def fetched(self, ticket: int) -> bool:
        """Whether `read` shows everything at least as new as it was when the ticket was given."""

    @property
    def descriptor(self) -> int | None:
        """Readable when something that was fetched may have arrived; None where nothing has to arrive.

        Whoever watches it calls `read` or `fetched` when it is, which looks at what has come.
        """

    def flush(self, timeout: float) -> None:
        """Waits until every write has reached the device's memory; for tests and for the end, not for serving.

        Raises:
            TransportError: that took longer than `timeout` seconds.
        """

    def close(self) -> None:
        """Lets the arena go. Nothing may be called afterwards."""


class Connector(Protocol):
    """This front end's end of a connection that does not exist yet. Made for one session and used once."""

    @property
    def offer(self) -> bytes:
        """What the runtime needs to let this end in; goes into OpenSession. A secret. Empty where it needs nothing."""

    def connect(self, answer: bytes, sizes: arena.Sizes, channel: int) -> Transport:
        """Reaches the arena; may take seconds, so not to be called in an event loop.

        Args:
            answer: the session's transport blob.
            sizes: of the arena, already checked.
            channel: the channel that will be used; other channels' memory may be out of reach.

        Raises:
            TransportError: the answer is not one of this transport, or nobody is there.
        """

    def close(self) -> None:
        """Lets go what `connect` has not taken over."""
