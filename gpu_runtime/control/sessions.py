"""Which front end holds which channels of the arena, and what it was given to reach them."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from gpu_runtime.control.errors import (
    BadRequestError,
    ExhaustedError,
    NoSuchSessionError,
    NotReadyError,
    TakenError,
    check_name,
)
from gpu_runtime.control.patience import in_thread
from gpu_runtime.registration.base import Registration, RegistrationError

log = logging.getLogger(__name__)

REVOKE_SECONDS = 5.0
"""How long a front end that had a lease and lost it keeps what it was given; enough to ask for the next lease."""
SILENT_LEASES = 2.0
"""A session ends when none of its channels was live for so many lease times: long enough for workers that are started
again, and for front ends that have their session and not yet their leases."""

Register = Callable[[tuple[int, ...]], Awaitable[Registration]]


@dataclass
class Session:
    """What one front end holds."""

    front_end: str
    transport: str
    channels: tuple[int, ...]
    owner: str
    """Subject of the certificate that opened it; empty in plain text."""
    fingerprint: str
    """Of that certificate."""
    registration: Registration = field(repr=False)
    opened: float
    """By the monotonic clock."""
    lived: float | None = None
    """When it was last seen with a lease."""
    revoked: bool = False
    """What it was given is void; its channels are kept for it."""
    opened_unix_seconds: int = field(default_factory=lambda: int(time.time()))

    def silence(self, now: float) -> float:
        """Seconds without a lease."""
        return now - (self.opened if self.lived is None else self.lived)

    async def revoke(self) -> None:
        """Takes away what it was given, in a thread: some devices take seconds for it.

        Raises:
            NotReadyError: the device does not take it all back; to be tried again.
        """
        if not self.revoked:
            try:
                await in_thread(self.registration.revoke)
            except RegistrationError as error:
                raise NotReadyError(f"what {self.front_end!r} was given cannot be taken away yet: {error}") from error
            self.revoked = True


class Sessions:
    """Channels by front end. What is awaited here changes them: one at a time, and each to its end.

    Args:
        total: channels of the arena.
        is_live: whether a worker holds the lease of a channel now.
        lease_seconds: how long a lease lasts without a heartbeat.
    """

    def __init__(self, total: int, is_live: Callable[[int], bool], lease_seconds: float = 15.0) -> None:
        self._total = total
        self._is_live = is_live
        self._patience = SILENT_LEASES * lease_seconds
        self._sessions: dict[str, Session] = {}

    async def open(
        self, front_end: str, count: int, transport: str, owner: str, register: Register, fingerprint: str = ""
    ) -> Session:
        """Channels for a front end: the ones it had, more or fewer when it asks for another number. What it was given
        before is revoked, and `register` gives it the new channels.

        Raises:
            BadRequestError: no name, or not a good one; or a count of zero.
            TakenError: another owner has a session of that name, and it lives.
            ExhaustedError: too few channels are free.
            NotReadyError: what it had cannot be taken away yet.
        """
        check_name("front_end", front_end)
        if count < 1:
            raise BadRequestError("channels must be at least 1")
        now = time.monotonic()
        await self.sweep(now)
        before = self._sessions.get(front_end)
        if before and before.owner != owner and self.is_live(before):
            raise TakenError(f"{front_end!r} is the name of a front end with another certificate's subject")
        kept = before.channels[:count] if before else ()
        free = [channel for channel in self.free() if channel not in kept]
        if count - len(kept) > len(free):
            raise ExhaustedError(f"{count} channels asked for, {len(kept) + len(free)} of {self._total} are free")
        channels = kept + tuple(free[: count - len(kept)])
        if before:  # first, so that two workers never reach the same channel
            await before.revoke()
        registration = await register(channels)
        made = Session(front_end, transport, channels, owner, fingerprint, registration, now)
        self._sessions[front_end] = made
        return made

    async def take_back(self, session: Session) -> None:
        """Ends one that its front end has not heard of. Its channels are kept for it while one of them is live."""
        await session.revoke()
        if self._sessions.get(session.front_end) is session and not self.is_live(session):
            del self._sessions[session.front_end]

    def named(self, front_end: str) -> Session:
        """Raises:
        NoSuchSessionError: nobody of that name has one.
        """
        try:
            return self._sessions[front_end]
        except KeyError:
            raise NoSuchSessionError(f"no session of a front end named {front_end!r}") from None

    def is_live(self, session: Session) -> bool:
        """Whether a worker holds the lease of one of its channels."""
        return any(map(self._is_live, session.channels))

    async def end(self, session: Session) -> None:
        """Ends one, whoever is there."""
        await session.revoke()
        self._sessions.pop(session.front_end, None)

    def all(self) -> list[Session]:
        """Every open session, in the order of the first opening."""
        return list(self._sessions.values())

    def free(self) -> list[int]:
        """Channels that nobody holds: neither a session nor a lease. A front end that was stopped for long may come
        back to a channel that is no longer its own.
        """
        taken = {channel for session in self.all() for channel in session.channels}
        return [channel for channel in range(self._total) if channel not in taken and not self._is_live(channel)]

    def look(self, now: float) -> bool:
        """Notes who is alive; whether there is something to sweep. To be called about once a second, also while they
        change, with the time of the monotonic clock.
        """
        for session in self.all():
            if self.is_live(session):
                session.lived = now
        return any(self._is_over(session, now) or self._is_due(session, now) for session in self.all())

    def _is_over(self, session: Session, now: float) -> bool:
        return session.silence(now) >= self._patience

    def _is_due(self, session: Session, now: float) -> bool:
        return not session.revoked and session.lived is not None and session.silence(now) >= REVOKE_SECONDS

    async def sweep(self, now: float) -> None:
        """Takes from front ends whose leases have ended what they were given; the channels stay theirs to ask for until
        the session ends too.
        """
        self.look(now)
        for session in self.all():
            over = self._is_over(session, now)
            if not over and not self._is_due(session, now):
                continue
            if await _revoked(session) and over:
                del self._sessions[session.front_end]

    async def close(self) -> None:
        """Takes everything away from everybody."""
        for session in self.all():
            await _revoked(session)
        self._sessions.clear()


async def _revoked(session: Session) -> bool:
    """Whether a session's front end is shut out now. Whatever a device says: the other sessions do not wait for it."""
    try:
        await session.revoke()
    except Exception as error:
        log.error("a front end could not be shut out yet: %s", error)
        return False
    return True
