"""A device that speaks on all its sequences at a fixed rate, cheaply enough to share a core with a client.

Each token is the number of the tick in which it was written, and the clock of every tick is kept, so that a client can
compare its own stamps with them. Both are CLOCK_MONOTONIC, which all processes of a machine share.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from blink_proto import arena
from blink_proto.arena import Finish, RecordKind
from tests.bench.front import text
from tests.replay import Channel, Playing, ReplayDevice, Script

SIZES = arena.Sizes(channels=1, submit_slots=512, cancel_slots=512, log_slots=1 << 15, heap_tokens=1 << 16)
WINDOW = 1 << 14
IDLE_SECONDS = 0.0005
_LAPS = 0xFFFF


class PacedDevice(ReplayDevice):
    """Waits until `gate` sequences run, then gives each one token in every period of `phases` ticks.

    Args:
        gate: sequences that speak; those of one phase speak in the same tick, as those of one step do.
        rate: tokens/s of each sequence.
        phases: 1: all speak at once; else each tick a share of them does.
        on_start: called when all of them run.
        cores: that its thread may use.
    """

    def __init__(self, gate: int, rate: float, phases: int, on_start: Callable[[], None], cores: list[int]) -> None:
        super().__init__(SIZES, text.vocab_size(), WINDOW)
        self.script = lambda submission: Script([], Finish.NONE)
        self.stamps: list[int] = []
        self._gate, self._phases, self._on_start = gate, phases, on_start
        self._cores = cores
        self._period = 1 / (rate * phases)
        self._due = 0.0
        self._said = np.zeros(0, np.int64)
        self._ready = threading.Event()

    def _run(self) -> None:
        os.sched_setaffinity(0, self._cores)  # of this thread
        while not self._stopped.wait(self._wait()):
            self.turn()

    def _wait(self) -> float:
        return min(max(self._due - time.monotonic(), 0.0), IDLE_SECONDS) if self._ready.is_set() else IDLE_SECONDS

    def _speak(self, index: int, channel: Channel, now: float) -> None:
        if not self._ready.is_set():
            if len(channel.playing) < self._gate:
                return
            self._ready.set()
            self._on_start()
            self._due = time.monotonic()
        if now >= self._due and channel.playing:
            self._due = max(self._due + self._period, now - 0.1)  # a stalled device does not speak ever faster
            self._tick(index, channel)

    def _tick(self, index: int, channel: Channel) -> None:
        tick = len(self.stamps)
        speaking = [one for place, one in channel.playing.items() if place % self._phases == tick % self._phases]
        if len(speaking) > self.sizes.log_slots - (channel.log_next - channel.log_read):
            return  # the worker is far behind: the sequences wait, as on the real device
        heads = self._heads(channel, speaking)  # by Python one after the other: no part of the delay
        self.stamps.append(time.monotonic_ns())
        self._write(index, channel, heads, text.first_tick() + tick % text.TICKS)

    def _heads(self, channel: Channel, speaking: list[Playing]) -> list[int]:
        heads = []
        for one in speaking:
            one.said += 1
            over = one.said == one.submission.max_tokens
            finish = Finish.LENGTH if over else Finish.NONE
            heads.append(arena.pack_token_head(0, RecordKind.TOKEN, finish, one.submission.position))
            if over:
                del channel.playing[one.submission.position]
        return heads

    def _write(self, index: int, channel: Channel, heads: list[int], token: int) -> None:
        positions = np.arange(channel.log_next, channel.log_next + len(heads), dtype=np.uint64)
        laps = np.uint64(1) + positions // np.uint64(self.sizes.log_slots) % np.uint64(_LAPS)
        slots = positions % np.uint64(self.sizes.log_slots)
        log = self._log(index)
        log["body"][slots] = np.uint64(arena.pack_token_body(0, 0, token)) | laps
        log["head"][slots] = np.array(heads, np.uint64) | laps
        channel.log_next += len(heads)
        self._generated += len(heads)

    def _log(self, index: int) -> Any:
        offset = self._out.channel_offset(index) + self._out.channel_log_offset
        return np.frombuffer(self.outbound, arena.TokenRecord, self.sizes.log_slots, offset)
