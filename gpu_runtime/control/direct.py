"""Which channels' front ends reach a CUDA device's memory by themselves (RDMA), as the device's relay is told.

Local front ends write into host memory, and the relay copies what they wrote over the device's words. So a channel
belongs to one way at a time. It changes hands when it is granted: the new front end is told nothing before the
device has taken note, from when on no copy goes by what was before. The words that local front ends left in host memory
are cleared before the relay looks at a channel again: the first copy then ends the lease of whoever had it over RDMA.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import numpy as np

from blink_proto import arena
from gpu_runtime.control.errors import NotReadyError
from gpu_runtime.mailbox import Mailbox
from gpu_runtime.shared_arena import SharedArena

HANDOVER_SECONDS = 5.0
"""A device takes note within a step, or 20 ms when it is idle; its process looks every 10 ms."""
_LOOK_SECONDS = 0.002


class DirectChannels:
    """The word that says so, and the way to change it. One change at a time.

    Args:
        is_over: whether nobody is to be let in any more.
    """

    def __init__(self, mailbox: Mailbox, shared: SharedArena, is_over: Callable[[], bool] = lambda: False) -> None:
        self._mailbox, self._arena, self._is_over = mailbox, shared, is_over

    async def assign(self, channels: tuple[int, ...], direct: bool) -> None:
        """Returns when the relay leaves these channels alone, or looks after them again.

        Raises:
            NotReadyError: the device has not taken note in time. The change is still to come then, unless it is over.
        """
        bits, before = sum(1 << channel for channel in channels), self._mailbox.direct
        wanted = before | bits if direct else before & ~bits
        for channel in channels:
            if before & ~wanted & 1 << channel:
                clear_words(self._arena, channel)
        self._mailbox.direct = wanted
        await self._wait(wanted)

    async def _wait(self, wanted: int) -> None:
        deadline = time.monotonic() + HANDOVER_SECONDS
        while self._mailbox.direct_seen != wanted and not self._is_over():
            if time.monotonic() >= deadline:
                raise NotReadyError(
                    "the chain's process does not answer, so that channels cannot change their transport"
                )
            await asyncio.sleep(_LOOK_SECONDS)


def clear_words(shared: SharedArena, channel: int) -> None:
    """Gives the channel's lease up, in host memory, for whoever wrote there last."""
    layout = shared.inbound_layout
    start = layout.channel_offset(channel) + layout.channel_control_offset
    words = shared.inbound[start : start + arena.ChannelIn.itemsize].view(np.uint64)
    words[:] = 0
