"""One life of the chain with its model and its arena: an epoch."""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path

from blink_proto import arena, control_pb2
from blink_proto.secret import SecretInt
from gpu_runtime.chain.process import ChainError, ChainProcess, Progress
from gpu_runtime.chain.spec import ChainSpec
from gpu_runtime.config import RuntimeConfig
from gpu_runtime.control.errors import BadRequestError
from gpu_runtime.control.prepare import Prepared
from gpu_runtime.control.sessions import Session, Sessions
from gpu_runtime.registration.base import Registrar, Registration, RegistrationError
from gpu_runtime.registration.choose import RdmaChoice, make_registrar
from gpu_runtime.scheduler import layout
from gpu_runtime.shared_arena import ArenaLimits, SharedArena

SWEEP_SECONDS = 0.5
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass
class ChainLife:
    """A loaded model, its arena and its running chain."""

    model: control_pb2.Model
    folder: Path
    arena: SharedArena
    chain: ChainProcess
    sessions: Sessions
    registrars: dict[str, Registrar]
    """By the name of the transport."""
    nonce: int
    epoch: int
    number: int = field(default_factory=lambda: secrets.randbits(63) | 1)
    """Drawn at random for each life; unlike the nonce no secret."""
    _sweeper: asyncio.Task[None] | None = field(default=None, init=False)
    _end: asyncio.Task[None] | None = field(default=None, init=False)

    @classmethod
    async def begin(cls, prepared: Prepared, epoch: int, progress: Progress) -> ChainLife:
        """Makes the arena, starts the chain and waits until it takes submissions.

        Raises:
            ChainError: the chain ended instead.
            BadRequestError: a transport cannot be had.
        """
        sizes, nonce = prepared.config.arena_sizes(), SecretInt(secrets.randbits(64))
        limits = ArenaLimits(nonce, epoch, prepared.limits.vocab_size, prepared.window, prepared.longest)
        shared = SharedArena.create(sizes, limits)
        try:
            registrars = _registrars(prepared.config, shared)
            chain = await cls._start_chain(prepared, shared, progress)
        except BaseException:
            shared.unlink()
            raise
        sessions = Sessions(
            sizes.channels,
            lambda channel: bool(shared.channel_out(channel)[0]["live"]),
            prepared.config.lease_timeout_seconds,
        )
        life = cls(describe_model(prepared), prepared.folder.path, shared, chain, sessions, registrars, nonce, epoch)
        life._sweeper = asyncio.create_task(life._sweep())
        return life

    @staticmethod
    async def _start_chain(prepared: Prepared, shared: SharedArena, progress: Progress) -> ChainProcess:
        config, folder = prepared.config, str(prepared.folder.path)
        chain = await ChainProcess.start(
            config.device, lambda mailbox: ChainSpec(folder, config, prepared.limits, shared.name, mailbox)
        )
        try:
            await chain.wait_ready(progress)
        except BaseException:
            await chain.stop()
            raise
        return chain

    async def drain(self, grace_seconds: float) -> bool:
        """Takes nothing new and waits for the rest; False when some were left, at the end of the grace time or of the
        chain.
        """
        self.chain.mailbox.command = layout.Command.DRAIN
        deadline = time.monotonic() + grace_seconds
        while not self.is_drained():
            if time.monotonic() >= deadline or self.chain.ended:
                return False
            await asyncio.sleep(0.02)
        return True

    def is_drained(self) -> bool:
        """The chain has seen the drain command and holds no sequence."""
        page = self.arena.telemetry[0]
        idle = int(page["running"]) + int(page["waiting"]) == 0
        return int(page["state"]) == arena.DeviceState.DRAINING and idle

    def telemetry(self) -> control_pb2.Telemetry:
        """What the device counts, now."""
        page = self.arena.telemetry[0]
        names = control_pb2.Telemetry.DESCRIPTOR.fields_by_name
        return control_pb2.Telemetry(**{name: int(page[name]) for name in names})

    def resume(self) -> None:
        """Takes submissions again."""
        self.chain.mailbox.command = layout.Command.RUN

    async def end(self) -> None:
        """Stops the chain and gives the arena's name back; whoever calls it waits for the same end."""
        if self._end is None:
            self._end = asyncio.create_task(self._stop())
        await asyncio.shield(self._end)

    async def _stop(self) -> None:
        await self.chain.stop()
        if self._sweeper is not None:
            self._sweeper.cancel()
        self.sessions.close()
        for registrar in self.registrars.values():
            registrar.close()
        self.arena.unlink()

    async def _sweep(self) -> None:
        while not self.chain.ended:
            await asyncio.sleep(SWEEP_SECONDS)
            self.sessions.sweep(time.monotonic())

    def list_sessions(self) -> list[control_pb2.Session]:
        """Who holds which channels."""
        return [self._describe_session(session) for session in self.sessions.all()]

    def _describe_session(self, session: Session) -> control_pb2.Session:
        made = control_pb2.Session(
            front_end=session.front_end, transport=session.transport, opened_unix_seconds=session.opened_unix_seconds
        )
        for index in session.channels:
            page = self.arena.channel_out(index)[0]
            made.channels.add(index=index, live=bool(page["live"]), lease=int(page["lease"]))
        return made

    def open_session(
        self, front_end: str, channels: int, transport: str, offer: bytes, owner: str = ""
    ) -> control_pb2.OpenSessionResponse:
        """Hands out channels; `owner` is the subject of the caller's certificate.

        Raises:
            BadRequestError: the transport is not offered here, or the offer not one of it.
            ExhaustedError, TakenError: see Sessions.open.
        """
        registrar = self.registrars.get(transport)
        if registrar is None:
            has = ", ".join(self.registrars)
            raise BadRequestError(f"transport {transport!r} is not offered; this runtime has: {has}")

        def register(granted: tuple[int, ...]) -> Registration:
            try:
                return registrar.register(offer, granted)
            except RegistrationError as error:
                raise BadRequestError(str(error)) from error

        granted, registration = self.sessions.open(front_end, channels, transport, owner, register)
        sizes = self.arena.sizes
        return control_pb2.OpenSessionResponse(
            layout=control_pb2.ArenaLayout(
                version=arena.VERSION,
                layout_hash=arena.LAYOUT_HASH,
                channels=sizes.channels,
                submit_slots=sizes.submit_slots,
                cancel_slots=sizes.cancel_slots,
                log_slots=sizes.log_slots,
                heap_tokens=sizes.heap_tokens,
                inbound_bytes=self.arena.inbound_layout.total_bytes,
                outbound_bytes=self.arena.outbound_layout.total_bytes,
            ),
            nonce=self.nonce,
            epoch=self.epoch,
            channels=granted,
            transport_blob=registration.answer,
            model=self.model,
        )


def _registrars(config: RuntimeConfig, shared: SharedArena) -> dict[str, Registrar]:
    rdma = RdmaChoice(config.rdma_device, config.rdma_address, config.verbs_binding)
    try:
        return {name: make_registrar(name, shared, rdma) for name in config.transports}
    except RegistrationError as error:
        raise BadRequestError(str(error)) from error


def describe_model(prepared: Prepared) -> control_pb2.Model:
    """The model as the control plane shows it."""
    folder = prepared.folder
    return control_pb2.Model(
        name=prepared.name,
        architecture=folder.config.architecture,
        vocab_size=folder.config.vocab_size,
        max_model_tokens=prepared.window,
        max_sequence_tokens=prepared.longest,
        eos_token_ids=folder.eos_token_ids,
        parameters=folder.parameters,
        loaded_unix_seconds=int(time.time()),
        dtype=prepared.config.dtype,
    )


__all__ = ["TOKENIZER_FILES", "ChainError", "ChainLife"]
