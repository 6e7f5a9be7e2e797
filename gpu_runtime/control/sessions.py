"""Which front end holds which channels of the arena, and what it was given to reach them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from gpu_runtime.control.errors import BadRequestError, ExhaustedError
from gpu_runtime.registration.base import Registration

CLAIM_SECONDS = 30.0
"""How long handed-out channels stay reserved for a front end that has not taken its leases yet."""
REVOKE_SECONDS = 5.0
"""How long a front end that had a lease and lost it keeps what it was given; enough to ask for the next lease."""

Register = Callable[[tuple[int, ...]], Registration]


@dataclass
class _Claim:
    channels: tuple[int, ...]
    opened: float
    registration: Registration
    lived: float | None = None
    """When it was last seen with a lease."""


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

    def open(self, front_end: str, count: int, register: Register) -> tuple[tuple[int, ...], Registration]:
        """Channels for a front end: the ones it had, more or fewer when it asks for another number. What it was given
        before is revoked, and `register` gives it the new channels.

        Raises:
            BadRequestError: no name, or a count of zero.
            ExhaustedError: too few channels are free.
        """
        if not front_end or len(front_end) > 128:
            raise BadRequestError("front_end must be a name of 1 to 128 characters")
        if count < 1:
            raise BadRequestError("channels must be at least 1")
        self._forget_abandoned(front_end)
        before = self._claims.get(front_end)
        kept = before.channels[:count] if before else ()
        free = [channel for channel in self.free() if channel not in kept]
        if count - len(kept) > len(free):
            raise ExhaustedError(f"{count} channels asked for, {len(kept) + len(free)} of {self._total} are free")
        channels = kept + tuple(free[: count - len(kept)])
        if before:  # first, so that two workers never reach the same channel
            before.registration.revoke()
        registration = register(channels)
        self._claims[front_end] = _Claim(channels, time.monotonic(), registration)
        return channels, registration

    def free(self) -> list[int]:
        """Channels that nobody holds."""
        taken = {channel for claim in self._claims.values() for channel in claim.channels}
        return [channel for channel in range(self._total) if channel not in taken]

    def sweep(self, now: float) -> None:
        """Takes from front ends whose leases have ended what they were given; the channels stay theirs to ask for.

        To be called about once a second, with the time of the monotonic clock.
        """
        for claim in self._claims.values():
            if any(map(self._is_live, claim.channels)):
                claim.lived = now
            elif now - (claim.lived or claim.opened) >= (REVOKE_SECONDS if claim.lived else CLAIM_SECONDS):
                claim.registration.revoke()

    def close(self) -> None:
        """Takes everything away from everybody."""
        for claim in self._claims.values():
            claim.registration.revoke()
        self._claims.clear()

    def _forget_abandoned(self, asking: str) -> None:
        now = time.monotonic()
        for name, claim in list(self._claims.items()):
            fresh = now - claim.opened < CLAIM_SECONDS
            if name != asking and not fresh and not any(map(self._is_live, claim.channels)):
                claim.registration.revoke()
                del self._claims[name]
