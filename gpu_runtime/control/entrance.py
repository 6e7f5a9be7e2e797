"""The ways into one arena: who holds which channels, by which transport, and what they were given for it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from contextlib import ExitStack, suppress
from typing import Any, TypeVar

from gpu_runtime.chain.process import ChainError
from gpu_runtime.config import RuntimeConfig
from gpu_runtime.control.direct import DirectChannels, clear_words
from gpu_runtime.control.errors import BadRequestError, NoSuchSessionError, NotReadyError
from gpu_runtime.control.patience import in_thread
from gpu_runtime.control.sessions import Session, Sessions
from gpu_runtime.control.successors import Holder, Successors
from gpu_runtime.mailbox import Mailbox
from gpu_runtime.registration.base import NotNowError, Registrar, Registration, RegistrationError
from gpu_runtime.registration.choose import make_registrar
from gpu_runtime.registration.memory import HostMemory, LentMemory
from gpu_runtime.shared_arena import SharedArena

log = logging.getLogger(__name__)

GIVE_UP_SECONDS = 1.0
"""For the device to take note that a lease was given up; it looks once a step."""
Done = TypeVar("Done")


class Entrance:
    """Made before the chain, so that a missing adapter is known early; nobody enters before `open_doors`.

    Devices let front ends in and shut them out in threads of their own, one at a time: that can take seconds. The event
    loop goes on meanwhile, but not while `pyverbs` registers memory: that keeps the interpreter lock (8 ms for each MiB
    on an emulated machine, and a channel of the usual size has 1.2). With memory windows it is done once for a channel.

    Raises:
        BadRequestError: a transport cannot be had.
    """

    def __init__(self, config: RuntimeConfig, shared: SharedArena) -> None:
        self._config, self._arena = config, shared
        self.sessions = Sessions(config.channels, self._is_live, config.lease_timeout_seconds)
        self._one_at_a_time = asyncio.Lock()
        self._undoing: set[asyncio.Task[None]] = set()
        self._said: set[str] = set()
        self._direct: DirectChannels | None = None
        self._successors = Successors(shared, self._is_live, lambda: not self._open)
        self._open = False
        with ExitStack() as undo:
            self._memory = LentMemory(shared.sizes) if config.device == "cuda" and config.uses_rdma else None
            if self._memory is not None:
                undo.callback(self._memory.close)
            self._registrars = self._make_registrars(undo)
            self._undo = undo.pop_all()

    def _make_registrars(self, undo: ExitStack) -> dict[str, Registrar]:
        config, made = self._config, {}
        memory = HostMemory(self._arena) if self._memory is None else self._memory
        try:
            for name in config.transports:
                made[name] = make_registrar(name, self._arena, memory, config.rdma)
                undo.callback(made[name].close)
        except RegistrationError as error:
            raise BadRequestError(str(error)) from error
        return made

    def _is_live(self, channel: int) -> bool:
        return bool(self._arena.channel_out(channel)[0]["live"])

    @property
    def memory_descriptor(self) -> int:
        """For the chain's process to inherit: a socket to hand device memory over by; -1 when it is not wanted."""
        return -1 if self._memory is None else self._memory.chain_end.fileno()

    def way_of(self, transport: str) -> str:
        """How front ends of a transport reach a CUDA device's memory, see `registration.ways`; else empty."""
        return "" if self._memory is None or transport == "shm" else self._memory.way

    def open_doors(self, mailbox: Mailbox, is_over: Callable[[], bool]) -> None:
        """To be called when the chain is ready.

        Args:
            is_over: whether its process is gone.

        Raises:
            ChainError: its process has not handed over what it should.
        """
        if self._memory is not None:
            try:
                self._memory.receive(is_over)
            except RegistrationError as error:
                raise ChainError(str(error)) from error
            if self._config.serves_local:
                self._direct = DirectChannels(mailbox, self._arena, lambda: not self._open)
        self._open = True

    async def open(
        self, front_end: str, count: int, transport: str, offer: bytes, owner: str, fingerprint: str = ""
    ) -> Session:
        """Channels for a front end, and what it needs to reach them. Should the caller go away meanwhile, what was
        given is taken back.

        Args:
            owner, fingerprint: subject and SHA-256 of the caller's certificate.

        Raises:
            BadRequestError: the transport is not offered here, or the offer not one of it.
            NotReadyError: the chain is ending, its process does not answer, or see Sessions.open.
            ExhaustedError, TakenError: see Sessions.open.
        """
        registrar = self._registrars.get(transport)
        if registrar is None:
            has = ", ".join(self._registrars)
            raise BadRequestError(f"transport {transport!r} is not offered; this runtime has: {has}")

        holder = Holder(front_end, owner, transport == "shm")

        async def register(channels: tuple[int, ...]) -> Registration:
            if self._direct is not None:
                await self._direct.assign(channels, direct=not holder.is_local)
            await self._successors.wait(channels, holder)
            self._refuse_when_closed()
            self._successors.note(channels, holder)
            try:
                return await in_thread(lambda: registrar.register(offer, channels))
            except NotNowError as error:
                raise NotReadyError(str(error)) from error
            except RegistrationError as error:
                raise BadRequestError(str(error)) from error

        async def let_in() -> Session:
            self._refuse_when_closed()
            return await self.sessions.open(front_end, count, transport, owner, register, fingerprint)

        return await self._alone(let_in(), self.sessions.take_back)

    async def end(self, front_end: str) -> bool:
        """Ends a session, whoever is there: its front end is shut out at once, and gives its leases up.

        Returns:
            Whether its channels are free now; if not they are when the lease's time is over.

        Raises:
            NoSuchSessionError: nobody of that name has one.
            NotReadyError: this machine's memory is mapped there and cannot be taken away; the device does not take it
                away, and shall again; or the chain is ending.
        """
        return await self._alone(self._end(front_end))

    async def _end(self, front_end: str) -> bool:
        self._refuse_when_closed()
        session = self.sessions.named(front_end)
        if session.transport == "shm" and self.sessions.is_live(session):
            raise NotReadyError(f"{front_end!r} has this machine's memory mapped, until its process ends")
        await self.sessions.end(session)
        await self._give_up(session)
        return not self.sessions.is_live(session)

    async def _give_up(self, session: Session) -> None:
        """The leases of a front end that is shut out, where its words can be reached."""
        if self._memory is None:
            for channel in session.channels:
                clear_words(self._arena, channel)
        elif self._direct is None:
            return  # its words are in device memory alone: nothing here can end its lease before its time
        else:
            with suppress(NotReadyError):
                await self._direct.assign(session.channels, direct=False)
        deadline = time.monotonic() + GIVE_UP_SECONDS
        while self.sessions.is_live(session) and time.monotonic() < deadline:
            await asyncio.sleep(0.005)

    async def end_those(self, chosen: Callable[[Session], bool]) -> None:
        """Ends some sessions. What stays of them is said once, and tried again at the next call."""
        names = [session.front_end for session in self.sessions.all() if chosen(session)]
        for name in names:
            try:
                await self.end(name)
            except NoSuchSessionError:
                continue
            except Exception as error:  # whatever a device says: the other ones shall end too
                if name not in self._said:
                    log.error("a session that shall end stays: %s", error)
                self._said.add(name)
        self._said &= set(names)

    async def sweep(self) -> None:
        """See `Sessions.sweep`; to be called about once a second."""
        if self.sessions.look(time.monotonic()):
            await self._alone(self._sweep())

    async def _sweep(self) -> None:
        await self.sessions.sweep(time.monotonic())

    async def _alone(
        self,
        work: Coroutine[Any, Any, Done],
        undo: Callable[[Done], Coroutine[Any, Any, None]] | None = None,
    ) -> Done:
        """Does work on the sessions when nobody else does any, and to its end, even if its caller is cancelled.

        Args:
            undo: for its outcome, should the caller be cancelled once it has begun.
        """
        try:
            await self._one_at_a_time.acquire()
        except asyncio.CancelledError:
            work.close()
            raise
        job = asyncio.create_task(work)
        job.add_done_callback(lambda done: self._one_at_a_time.release())
        try:
            return await asyncio.shield(job)
        except asyncio.CancelledError:
            if undo is not None:
                job.add_done_callback(lambda done: self._undo_later(done, undo))
            raise

    def _undo_later(self, done: asyncio.Task[Done], undo: Callable[[Done], Coroutine[Any, Any, None]]) -> None:
        if done.cancelled() or done.exception() is not None:
            return
        undoing = asyncio.create_task(self._alone(undo(done.result())))
        self._undoing.add(undoing)
        undoing.add_done_callback(self._undoing.discard)

    def _refuse_when_closed(self) -> None:
        if not self._open:
            raise NotReadyError("the chain is ending")

    async def close(self) -> None:
        """Shuts everybody out, then lets the memory go. May be called again."""
        self._open = False
        await self._alone(self._close())

    async def _close(self) -> None:
        await self.sessions.close()
        await in_thread(self.let_go)

    def let_go(self) -> None:
        """Closes the devices; may take seconds. Nobody may be inside."""
        try:
            self._undo.close()
        except Exception as error:  # what is left of a device must not keep the chain and its arena
            log.error("a way into the arena could not be closed: %s", error)
