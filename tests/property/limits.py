"""Limits of one scheduler under test, and the memory that it shares with its front ends."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blink_proto import arena
from gpu_runtime.scheduler import layout


@dataclass(frozen=True)
class Limits:
    """`layout.SchedulerConfig` as plain Python."""

    channels: int = 1
    submit_slots: int = 4
    cancel_slots: int = 4
    log_slots: int = 16
    heap_tokens: int = 64
    vocab_size: int = 32
    max_model_tokens: int = 48
    max_sequences: int = 4
    max_running: int = 4
    token_budget: int = 16
    block_tokens: int = 4
    blocks: int = 33
    blocks_per_sequence: int = 12
    eos_tokens: tuple[int, ...] = (2,)
    buckets: tuple[int, ...] = (1, 4, 16)
    intake_tokens: int = 1 << 16
    lease_timeout_ns: int = 1_000_000_000
    hash_seed: int = 99
    prefix_cache: bool = True

    def record(self) -> NDArray[np.void]:
        """The structured form, 0-d `layout.SchedulerConfig`."""
        record = np.zeros((), layout.SchedulerConfig)
        names = layout.SchedulerConfig.names
        assert names is not None
        for name in names:
            if hasattr(self, name) and name not in ("eos_tokens", "buckets"):
                record[name] = getattr(self, name)
        record["eos_count"] = len(self.eos_tokens)
        record["eos_tokens"][: len(self.eos_tokens)] = self.eos_tokens
        record["bucket_count"] = len(self.buckets)
        record["buckets"][: len(self.buckets)] = self.buckets
        return record

    @property
    def sizes(self) -> arena.Sizes:
        """Sizes of the arena."""
        return arena.Sizes(self.channels, self.submit_slots, self.cancel_slots, self.log_slots, self.heap_tokens)


def aligned_bytes(size: int, alignment: int = 4096) -> NDArray[np.uint8]:
    """Zeroed uint8 array [size] that starts on a multiple of `alignment`."""
    raw = np.zeros(size + alignment, np.uint8)
    skip = -raw.ctypes.data % alignment
    return raw[skip : skip + size]


class Region:
    """Words of a region as plain Python integers; offsets are in bytes."""

    def __init__(self, size: int) -> None:
        self.bytes = aligned_bytes(size)
        self.view = self.bytes.data
        self.words = self.view.cast("Q")
        self.halves = self.view.cast("I")


class Inbound(Region):
    """The inbound region: what front ends write and the scheduler reads, which wipes it for a lease."""

    def __init__(self, sizes: arena.Sizes) -> None:
        self.sizes = sizes
        self.layout = arena.InboundLayout(sizes)
        super().__init__(self.layout.total_bytes)

    def control_at(self, channel: int, field: str) -> int:
        """Index in `words` of a field of ChannelIn."""
        base = self.layout.channel_offset(channel) + self.layout.channel_control_offset
        return (base + arena.CHANNEL_IN_OFFSETS[field]) // 8

    def submit_at(self, channel: int, position: int) -> int:
        """Byte offset of a submission's slot."""
        slot = position % self.sizes.submit_slots
        return self.layout.channel_offset(channel) + self.layout.channel_submit_offset + 128 * slot

    def cancel_at(self, channel: int, position: int) -> int:
        """Byte offset of a cancel record's slot."""
        slot = position % self.sizes.cancel_slots
        return self.layout.channel_offset(channel) + self.layout.channel_cancel_offset + 16 * slot

    def submit_commit_at(self, channel: int, position: int) -> int:
        """Index in `words` of a submission's commit word."""
        return (self.submit_at(channel, position) + arena.SUBMIT_RECORD_OFFSETS["commit"]) // 8

    def cancel_commit_at(self, channel: int, position: int) -> int:
        """Index in `words` of a cancel record's commit word."""
        return (self.cancel_at(channel, position) + arena.CANCEL_RECORD_OFFSETS["commit"]) // 8

    def heap_at(self, channel: int) -> int:
        """Index in `halves` of a channel's prompt heap."""
        return (self.layout.channel_offset(channel) + self.layout.channel_heap_offset) // 4


class Outbound(Region):
    """The outbound region: what the scheduler writes and front ends read."""

    def __init__(self, sizes: arena.Sizes) -> None:
        self.sizes = sizes
        self.layout = arena.OutboundLayout(sizes)
        super().__init__(self.layout.total_bytes)

    def control_at(self, channel: int, field: str) -> int:
        """Index in `words` of a field of ChannelOut."""
        base = self.layout.channel_offset(channel) + self.layout.channel_control_offset
        return (base + arena.CHANNEL_OUT_OFFSETS[field]) // 8

    def telemetry_at(self, field: str) -> int:
        """Index in `words` of a field of Telemetry."""
        return (self.layout.telemetry_offset + arena.TELEMETRY_OFFSETS[field]) // 8

    def log_at(self, channel: int, position: int) -> int:
        """Index in `words` of a token record's first word."""
        slot = position % self.sizes.log_slots
        return (self.layout.channel_offset(channel) + self.layout.channel_log_offset + 16 * slot) // 8

    def control(self, channel: int, field: str) -> int:
        """A field of ChannelOut."""
        return self.words[self.control_at(channel, field)]

    def telemetry(self, field: str) -> int:
        """A field of Telemetry."""
        return self.words[self.telemetry_at(field)]

    def token_record(self, channel: int, position: int) -> tuple[int, int]:
        """Both words of the token record at a position."""
        at = self.log_at(channel, position)
        return self.words[at], self.words[at + 1]
