"""A scheduler behind the relay, as `relay.cpp` builds it: on emulated threads, with a device's arena of its own."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from blink_proto import arena
from gpu_runtime.scheduler import host
from tests.bench.arena_memory import Memory, make_config


class Relayed:
    """Front ends' memory, the scheduler with a device's arena of its own, and the relay between them.

    `memory` is what the relay takes for host memory; `device` are views of the arena that the scheduler looks at, as a
    network card reaches it.
    """

    def __init__(self, library: Path, **changes: int) -> None:
        sizes = {"submit_slots": 64, "heap_tokens": 1 << 18, "log_slots": 64, "max_sequences": 4, "max_running": 4}
        config = make_config(**{**sizes, "lease_timeout_ns": 10**15, **changes})
        self.memory, self.device = Memory(config), Memory(config)
        self._scheduler = host.HostScheduler(config, self.memory.inbound, self.memory.outbound)
        self._calls = calls = ctypes.CDLL(str(library))
        for name in ("pull", "step", "set_direct"):
            getattr(calls, f"blink_relay_{name}").argtypes = [ctypes.c_void_p, ctypes.c_uint64]
        for name in ("inbound", "outbound", "direct_seen", "rests"):
            getattr(calls, f"blink_relay_{name}").argtypes = [ctypes.c_void_p]
        calls.blink_relay_inbound.restype = calls.blink_relay_outbound.restype = ctypes.c_void_p
        calls.blink_relay_direct_seen.restype = ctypes.c_uint64
        self.device.show(self._region("inbound"), self._region("outbound"))

    def _region(self, name: str) -> NDArray[np.uint8]:
        address = getattr(self._calls, f"blink_relay_{name}")(self._scheduler._handle)
        size = getattr(self.memory, name).nbytes
        return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_uint8)), (size,))

    def ring(self) -> None:
        """The bell."""
        self.memory.inbound[:8].view(np.uint64)[0] += 1

    def pull(self, now: int) -> bool:
        """Whether the idle poll would wait after it, as far as the bell is concerned."""
        return bool(self._calls.blink_relay_pull(self._scheduler._handle, now))

    def step(self, now: int) -> None:
        """The scheduler's, without a pull in front; then a push."""
        self._calls.blink_relay_step(self._scheduler._handle, now)

    def set_direct(self, channels: int) -> None:
        """A bit for each channel that the relay leaves alone from the next pull on."""
        self._calls.blink_relay_set_direct(self._scheduler._handle, channels)

    @property
    def direct_seen(self) -> int:
        """As of the last pull."""
        return int(self._calls.blink_relay_direct_seen(self._scheduler._handle))

    @property
    def rests(self) -> bool:
        """Whether the idle poll would wait, as far as the device's memory is concerned."""
        return bool(self._calls.blink_relay_rests(self._scheduler._handle))

    @property
    def taken(self) -> int:
        """Submissions of channel 0."""
        return int(self.memory.out[0]["submit_read"])

    @property
    def lease(self) -> int:
        """Of channel 0."""
        return int(self.memory.out[0]["lease"])


def ask_lease(memory: Memory, lease: int = 1, channel: int = 0) -> None:
    """Writes a front end's control words."""
    memory.control[channel]["heartbeat"] += 1
    memory.control[channel]["lease"] = lease


def submit(memory: Memory, count: int, lease: int = 1, first: int = 0, channel: int = 0, **fields: int) -> None:
    """Writes submissions of two prompt tokens to one lap of the ring."""
    for record in memory.submit[channel][first : first + count]:
        record["prompt_tokens"], record["max_tokens"], record["top_p"] = 2, 2, 1.0
        for name, value in fields.items():
            record[name] = value
        record["commit"] = arena.pack_commit_word(1, lease)
