"""Pages of 64-bit words that the device writes, as Python values."""

from __future__ import annotations

import struct
from typing import NamedTuple

from blink_proto import arena
from dpu_service.transport.base import Transport

_OUT_FIELDS = [name for name in arena.CHANNEL_OUT_OFFSETS if not name.startswith("pad")]
_OUT_WORDS = struct.Struct(f"<{len(_OUT_FIELDS)}Q")
assert [arena.CHANNEL_OUT_OFFSETS[name] for name in _OUT_FIELDS] == [8 * i for i in range(len(_OUT_FIELDS))]
CHANNEL_OUT_BYTES = _OUT_WORDS.size
"""Of the words that `read_channel_out` looks at."""
_PAGE_FIELDS = [name for name in arena.TELEMETRY_OFFSETS if not name.startswith("pad")]
_PAGE_WORDS = struct.Struct(f"<{len(_PAGE_FIELDS)}Q")
assert [arena.TELEMETRY_OFFSETS[name] for name in _PAGE_FIELDS] == [8 * i for i in range(len(_PAGE_FIELDS))]


class ChannelOutWords(NamedTuple):
    """`ChannelOut` of one channel at one moment."""

    lease: int
    live: int
    log_start: int
    log_written: int
    submit_read: int
    cancel_read: int
    rejected: int
    protocol_errors: int


assert list(ChannelOutWords._fields) == _OUT_FIELDS


def read_channel_out(transport: Transport, offset: int) -> ChannelOutWords:
    """The words at `offset` of the outbound region."""
    return ChannelOutWords(*_OUT_WORDS.unpack(transport.read(offset, _OUT_WORDS.size)))


def read_telemetry(transport: Transport, layout: arena.OutboundLayout) -> dict[str, int]:
    """The telemetry page by field name."""
    raw = transport.read(layout.telemetry_offset, _PAGE_WORDS.size)
    return dict(zip(_PAGE_FIELDS, _PAGE_WORDS.unpack(raw), strict=True))
