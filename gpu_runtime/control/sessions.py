"""Which front end holds which channels of the arena."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from gpu_runtime.control.errors import BadRequestError, ExhaustedError

CLAIM_SECONDS = 30.0
"""How long handed-out channels stay reserved for a front end that has not taken its leases yet."""


@dataclass
class _Claim:
    channels: tuple[int, ...]
    opened: float


class Sessions:
    """Channels by front end.

    Args:
        total: channels of the arena.
        is_live: whether a worker holds the lease of a channel now.
    """

    def __init__(self, total: int, is_live: Callable[[int], bool]) -> None:
        self._total = total
        self._is_live = is_live
        self._claims: dict[str, _Claim] = {}

    def open(self, front_end: str, count: int) -> tuple[int, ...]:
        """Channels for a front end: the ones it had, more or fewer when it asks for another number.

        Raises:
            BadRequestError: no name, or a count of zero.
            ExhaustedError: too few channels are free.
        """
        if not front_end or len(front_end) > 128:
            raise BadRequestError("front_end must be a name of 1 to 128 characters")
        if count < 1:
            raise BadRequestError("channels must be at least 1")
        self._forget_abandoned(front_end)
        kept = self._claims[front_end].channels[:count] if front_end in self._claims else ()
        free = [channel for channel in self.free() if channel not in kept]
        if count - len(kept) > len(free):
            raise ExhaustedError(f"{count} channels asked for, {len(kept) + len(free)} of {self._total} are free")
        channels = kept + tuple(free[: count - len(kept)])
        self._claims[front_end] = _Claim(channels, time.monotonic())
        return channels

    def free(self) -> list[int]:
        """Channels that nobody holds."""
        taken = {channel for claim in self._claims.values() for channel in claim.channels}
        return [channel for channel in range(self._total) if channel not in taken]

    def _forget_abandoned(self, asking: str) -> None:
        now = time.monotonic()
        for name, claim in list(self._claims.items()):
            fresh = now - claim.opened < CLAIM_SECONDS
            if name != asking and not fresh and not any(map(self._is_live, claim.channels)):
                del self._claims[name]
