"""Sizes and limits of the arena as the session tells them, and the check that the arena agrees."""

from __future__ import annotations

import msgspec
import numpy as np

from blink_proto import arena
from dpu_service.channel.errors import ChannelError
from dpu_service.transport.base import Transport

MOST_BLOCK_TOKENS = 4096


class Geometry(msgspec.Struct, frozen=True):
    """What the session says of the arena."""

    layout_hash: int
    version: int
    channels: int
    submit_slots: int
    cancel_slots: int
    log_slots: int
    heap_tokens: int
    inbound_bytes: int
    outbound_bytes: int
    nonce: int
    epoch: int
    vocab_size: int
    max_model_tokens: int
    max_sequence_tokens: int

    def __repr__(self) -> str:
        return f"Geometry(epoch={self.epoch}, channels={self.channels}, nonce redacted)"

    @property
    def sizes(self) -> arena.Sizes:
        """Sizes on which the layout depends."""
        return arena.Sizes(
            channels=self.channels,
            submit_slots=self.submit_slots,
            cancel_slots=self.cancel_slots,
            log_slots=self.log_slots,
            heap_tokens=self.heap_tokens,
        )

    @property
    def window(self) -> int:
        """Tokens of one sequence (prompt + generated) at most."""
        return min(self.max_model_tokens, self.max_sequence_tokens)

    def check(self) -> None:
        """Refuses what this front end cannot work with.

        Raises:
            ChannelError: another layout, or impossible sizes.
        """
        if self.version != arena.VERSION or self.layout_hash != arena.LAYOUT_HASH:
            raise ChannelError("the runtime was built for another arena layout; use the same version of both programs")
        rings = (self.submit_slots, self.cancel_slots, self.log_slots)
        if any(slots < 1 or slots & (slots - 1) for slots in rings):
            raise ChannelError("the arena's ring sizes are not powers of two")
        if not 1 <= self.channels <= arena.MAX_CHANNELS or not 1 <= self.heap_tokens < 1 << 32:
            raise ChannelError("the arena's channel count or heap size is out of range")
        if not 1 <= self.vocab_size < 1 << 32 or self.window < 2:
            raise ChannelError("the model's vocabulary or context window is empty")
        total = (arena.InboundLayout(self.sizes).total_bytes, arena.OutboundLayout(self.sizes).total_bytes)
        if total != (self.inbound_bytes, self.outbound_bytes):
            raise ChannelError("the arena's region sizes do not follow from its ring sizes")


def check_header(transport: Transport, geometry: Geometry) -> int:
    """Compares the arena's own header with the session; gives the one thing that it says besides, the tokens of a block
    of the KV cache.

    Raises:
        ChannelError: a field differs (an arena of another epoch, version or byte order).
    """
    layout = arena.OutboundLayout(geometry.sizes)
    raw = transport.read(layout.header_offset, arena.ArenaHeader.itemsize)
    header = np.frombuffer(raw, arena.ArenaHeader)[0]
    if int(header["magic"]) != arena.MAGIC or int(header["byte_order"]) != arena.BYTE_ORDER_MARK:
        raise ChannelError("there is no arena in this byte order behind the session")
    for field in msgspec.structs.fields(Geometry):
        if int(header[field.name]) != getattr(geometry, field.name):
            raise ChannelError(f"the arena's header and the session differ in {field.name}")
    block_tokens = int(header["block_tokens"])
    if not 1 <= block_tokens <= MOST_BLOCK_TOKENS:
        raise ChannelError("the arena's blocks have an impossible size")
    return block_tokens
