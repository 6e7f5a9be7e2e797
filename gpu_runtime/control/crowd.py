"""How many calls are open, and whose: so that nobody's calls keep others out."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from blink_proto.grpc_settings import MAX_CALLS
from blink_proto.roles import Role
from gpu_runtime.control.caller import Caller


@dataclass(frozen=True)
class Limits:
    """Calls at a time. An arena has 64 channels at most, so that many front ends may share a certificate, twice over
    while connections that broke are not known to be dead.
    """

    of_one: int = 192
    """Of one certificate, or in plain text of one address."""
    streams_of_one: int = 128
    """Of those, streams: they have no end, and leave room for questions."""
    of_others: int = MAX_CALLS - 192
    """Of all that are no administrators; the rest of what the server takes is kept for those."""


class Crowd:
    """Counts them."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._calls: Counter[str] = Counter()
        self._streams: Counter[str] = Counter()
        self._others = 0

    def full(self, caller: Caller, *, streams: bool) -> str | None:
        """Why one more call is too many; None if it is not."""
        limits, who, whose = self._limits, _who(caller), "certificate" if caller.secure else "address"
        if streams and self._streams[who] >= limits.streams_of_one:
            return f"this {whose} has {limits.streams_of_one} streams open, and may not have more"
        if self._calls[who] >= limits.of_one:
            return f"this {whose} has {limits.of_one} calls open, and may not have more"
        if _is_other(caller) and self._others >= limits.of_others:
            return f"{limits.of_others} calls are open; what is left is for administrators"
        return None

    @contextmanager
    def inside(self, caller: Caller, *, streams: bool) -> Iterator[None]:
        """Counts a call while it runs."""
        who, other = _who(caller), _is_other(caller)
        counted = [self._calls, self._streams] if streams else [self._calls]
        for counter in counted:
            counter[who] += 1
        self._others += other
        try:
            yield
        finally:
            self._others -= other
            for counter in counted:
                counter[who] -= 1
                if not counter[who]:
                    del counter[who]


class Turns:
    """So many at a time of one certificate, or in plain text of one address; the others wait."""

    def __init__(self, of_one: int) -> None:
        self._of_one = of_one
        self._free: dict[str, asyncio.Semaphore] = {}
        self._here: Counter[str] = Counter()

    @asynccontextmanager
    async def turn(self, caller: Caller) -> AsyncIterator[None]:
        """Waits for one, and has it."""
        who = _who(caller)
        self._here[who] += 1
        try:
            async with self._free.setdefault(who, asyncio.Semaphore(self._of_one)):
                yield
        finally:
            self._here[who] -= 1
            if not self._here[who]:
                del self._here[who], self._free[who]


def _who(caller: Caller) -> str:
    return caller.fingerprint if caller.secure else caller.peer.rpartition(":")[0]


def _is_other(caller: Caller) -> bool:
    return caller.role is not Role.ADMINISTRATOR
