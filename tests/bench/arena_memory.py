"""The arena's memory as a test sees it: typed views for the front end's side and for the checks."""

from __future__ import annotations

import numpy as np

from blink_proto import arena
from gpu_runtime.scheduler import layout


def make_config(**changes):
    """A small scheduler configuration; `changes` override its fields, `eos` and `buckets` are lists."""
    config = np.zeros((), layout.SchedulerConfig)
    fields = {
        "channels": 2,
        "submit_slots": 4,
        "cancel_slots": 4,
        "log_slots": 8,
        "heap_tokens": 64,
        "vocab_size": 50,
        "max_model_tokens": 40,
        "max_sequences": 6,
        "max_running": 4,
        "token_budget": 8,
        "block_tokens": 4,
        "blocks": 17,
        "blocks_per_sequence": 10,
        "lease_timeout_ns": 1000,
        "intake_tokens": 1 << 16,
    }
    eos = changes.pop("eos", [2])
    fields |= changes
    buckets = fields.pop("buckets", None) or [b for b in (1, 2, 4, 8, 16) if b < fields["token_budget"]] + [
        fields["token_budget"]
    ]
    for name, value in fields.items():
        config[name] = value
    config["eos_count"], config["eos_tokens"][: len(eos)] = len(eos), eos
    config["bucket_count"], config["buckets"][: len(buckets)] = len(buckets), buckets
    return config


def aligned(size: int) -> np.ndarray:
    """Zeroed bytes on a 64-byte boundary."""
    raw = np.zeros(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size]


class Memory:
    """Both regions of one arena."""

    def __init__(self, config) -> None:
        names = ("channels", "submit_slots", "cancel_slots", "log_slots", "heap_tokens")
        self.sizes = arena.Sizes(**{name: int(config[name]) for name in names})
        self._in, self._out = arena.InboundLayout(self.sizes), arena.OutboundLayout(self.sizes)
        self.show(aligned(self._in.total_bytes), aligned(self._out.total_bytes))

    def show(self, inbound: np.ndarray, outbound: np.ndarray) -> None:
        """Makes the views those of these regions."""
        self.inbound, self.outbound, s = inbound, outbound, self.sizes
        channels = range(s.channels)
        self.control = [self._inbound(c, self._in.channel_control_offset, arena.ChannelIn, 1)[0] for c in channels]
        self.submit = [
            self._inbound(c, self._in.channel_submit_offset, arena.SubmitRecord, s.submit_slots) for c in channels
        ]
        self.cancels = [
            self._inbound(c, self._in.channel_cancel_offset, arena.CancelRecord, s.cancel_slots) for c in channels
        ]
        self.heap = [self._inbound(c, self._in.channel_heap_offset, np.dtype("<u4"), s.heap_tokens) for c in channels]
        self.out = [self._outbound(c, self._out.channel_control_offset, arena.ChannelOut, 1)[0] for c in channels]
        self.log = [self._outbound(c, self._out.channel_log_offset, arena.TokenRecord, s.log_slots) for c in channels]
        start = self._out.telemetry_offset
        self.telemetry = self.outbound[start : start + arena.Telemetry.itemsize].view(arena.Telemetry)[0]

    def _inbound(self, channel: int, offset: int, kind, count: int):
        start = self._in.channel_offset(channel) + offset
        return self.inbound[start : start + kind.itemsize * count].view(kind)

    def _outbound(self, channel: int, offset: int, kind, count: int):
        start = self._out.channel_offset(channel) + offset
        return self.outbound[start : start + kind.itemsize * count].view(kind)

    # The twin reads through these.

    def channel_words(self, channel: int) -> tuple[int, int, int]:
        control = self.control[channel]
        return int(control["lease"]), int(control["heartbeat"]), int(control["log_read"])

    def submission(self, channel: int, slot: int) -> dict:
        record = self.submit[channel][slot]
        return {name: record[name].tolist() for name in arena.SubmitRecord.names}

    def prompt(self, channel: int, offset: int, count: int) -> list[int]:
        return self.heap[channel][offset : offset + count].tolist()

    def cancel(self, channel: int, slot: int) -> tuple[int, int]:
        record = self.cancels[channel][slot]
        return int(record["target"]), int(record["commit"])
