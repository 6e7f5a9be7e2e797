"""Reader of a channel's token log."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blink_proto import arena
from dpu_service.channel.errors import ChannelError
from dpu_service.transport.base import Range, Transport

_LAPS = (1 << 16) - 1
_BELOW_SEQUENCE = arena.pack_token_head(_LAPS, 0xFF, 0xFF, 0)
"""What of a record's first word is not its sequence."""
_BELOW_TOKEN = arena.pack_token_body(_LAPS, 0xFFFF, 0)
"""What of its second word is not its token."""
_SHORTEST_LOOK = 64
_LONGEST_LOOK = 4096
"""Records to fetch ahead of knowing how many there are."""


class Record(NamedTuple):
    """One token record; the fields are as the device wrote them and not yet judged. Those of a LOGPROB record stand
    where the same bits of a token record do (see logprobs.py)."""

    sequence: int
    kind: int
    finish: int
    detail: int
    token: int


_record = partial(tuple.__new__, Record)
"""As `Record._make`, without a Python call for each."""


class TokenLog:
    """Reads records in order. Positions count records since the epoch began.

    Args:
        offset: of the log in the outbound region.
        slots: records that the log holds.
        start: position of the first record of the lease.
    """

    def __init__(self, transport: Transport, offset: int, slots: int, start: int) -> None:
        self._transport = transport
        self._offset = offset
        self._slots = slots
        self.position = start
        self._look = min(_SHORTEST_LOOK, slots)

    def ahead(self) -> list[Range]:
        """Where the next records stand or will stand: about twice as many as the last read found."""
        size = arena.TokenRecord.itemsize
        first = self.position % self._slots
        before_wrap = min(self._look, self._slots - first)
        ranges = [Range(self._offset + first * size, before_wrap * size)]
        if before_wrap < self._look:
            ranges.append(Range(self._offset, (self._look - before_wrap) * size))
        return ranges

    def read(self, written: int) -> list[Record]:
        """All complete records below `written`; one that is torn or has not arrived, and what follows it, is left for
        the next call.

        Raises:
            ChannelError: `written` lies behind the reader, or the device overwrote records that were not read.
        """
        count = self._unread(written)
        if count == 0:
            return []
        records = self._copy(count)
        head, body = records["head"], records["body"]
        complete = self._complete(head, body)
        self.position += complete
        return _decode(head[:complete], body[:complete])

    def read_plain(self, written: int) -> tuple[list[int], list[int]] | None:
        """The quick way for what is nearly always there: sequences and tokens of all records below `written`, where all
        are complete, tokens, nobody's last, and without a detail. None, with nothing read, where `read` has to look.

        Raises:
            ChannelError: see `read`.
        """
        count = self._unread(written)
        first = self.position % self._slots
        if count == 0 or first + count > self._slots:
            return None
        records = self._copy(count)
        head, body = records["head"], records["body"]
        lap = self.position // self._slots % _LAPS + 1
        plain = arena.pack_token_head(lap, arena.RecordKind.TOKEN, arena.Finish.NONE, 0)
        alone = arena.pack_token_body(lap, 0, 0)
        if ((head & _BELOW_SEQUENCE) != plain).any() or ((body & _BELOW_TOKEN) != alone).any():
            return None
        self.position += count
        return (head >> 32).tolist(), (body >> 32).tolist()

    def unread(self, count: int) -> None:
        """Leaves the last `count` records for the next call."""
        self.position -= count

    def _unread(self, written: int) -> int:
        count = written - self.position
        if count and not 0 < count <= self._slots:
            raise ChannelError(f"the token log's position moved by {count} records of {self._slots}")
        if count:
            self._look = min(max(2 * count, _SHORTEST_LOOK), _LONGEST_LOOK, self._slots)
        return count

    def _copy(self, count: int) -> NDArray[np.void]:
        size = arena.TokenRecord.itemsize
        first = self.position % self._slots
        before_wrap = min(count, self._slots - first)
        raw = self._transport.read(self._offset + first * size, before_wrap * size)
        if before_wrap < count:
            raw += self._transport.read(self._offset, (count - before_wrap) * size)
        return np.frombuffer(raw, arena.TokenRecord)

    def _complete(self, head: NDArray[np.uint64], body: NDArray[np.uint64]) -> int:
        positions = np.arange(self.position, self.position + len(head), dtype=np.uint64)
        laps = positions // np.uint64(self._slots) % np.uint64(_LAPS) + np.uint64(1)
        valid = (arena.unpack_token_head(head)[0] == laps) & (arena.unpack_token_body(body)[0] == laps)
        return len(head) if valid.all() else int(valid.argmin())


def _decode(head: NDArray[np.uint64], body: NDArray[np.uint64]) -> list[Record]:
    _, kind, finish, sequence = arena.unpack_token_head(head)
    _, detail, token = arena.unpack_token_body(body)
    columns = (sequence, kind, finish, detail, token)
    return list(map(_record, zip(*[column.tolist() for column in columns], strict=True)))
