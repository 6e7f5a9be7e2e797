"""One life of the chain with its model and its arena: an epoch."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from blink_proto import arena, control_pb2
from blink_proto.secret import SecretInt
from gpu_runtime.chain.process import ChainError, ChainProcess, Progress
from gpu_runtime.chain.spec import ChainSpec
from gpu_runtime.control.entrance import Entrance
from gpu_runtime.control.patience import in_thread
from gpu_runtime.control.prepare import Prepared
from gpu_runtime.control.sessions import Session, Sessions
from gpu_runtime.scheduler import layout
from gpu_runtime.shared_arena import ArenaLimits, SharedArena

SWEEP_SECONDS = 0.5


@dataclass
class ChainLife:
    """A loaded model, its arena and its running chain."""

    model: control_pb2.Model
    folder: Path
    arena: SharedArena
    chain: ChainProcess
    entrance: Entrance
    nonce: int
    epoch: int
    tokenizer: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """Contents of the tokenizer files. Front ends get them from here: a file server that is gone by then keeps none of
    them out, and however many ask, the memory is taken once."""
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
        shared = await in_thread(lambda: SharedArena.create(sizes, limits), SharedArena.unlink)
        try:
            entrance = await in_thread(lambda: Entrance(prepared.config, shared), Entrance.let_go)
            chain = await cls._start_chain(prepared, shared, entrance, progress)
        except BaseException:
            shared.unlink()
            raise
        model, folder = describe_model(prepared), prepared.folder.path
        life = cls(model, folder, shared, chain, entrance, nonce, epoch, prepared.tokenizer)
        life._sweeper = asyncio.create_task(life._sweep())
        return life

    @staticmethod
    async def _start_chain(
        prepared: Prepared, shared: SharedArena, entrance: Entrance, progress: Progress
    ) -> ChainProcess:
        config, folder, wants = prepared.config, str(prepared.folder.path), entrance.memory_descriptor

        def spec(mailbox: int) -> ChainSpec:
            return ChainSpec(folder, config, prepared.limits, shared.name, mailbox, wants)

        try:
            chain = await ChainProcess.start(config.device, spec, [wants] if wants >= 0 else [])
        except BaseException:
            await entrance.close()
            raise
        try:
            await chain.wait_ready(progress)
            entrance.open_doors(chain.mailbox, lambda: chain.ended)
        except BaseException:
            await chain.stop(entrance.close)
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
        """Stops the chain, shuts front ends out and unlinks the arena; whoever calls it waits for the same end."""
        if self._end is None:
            self._end = asyncio.create_task(self._stop())
        await asyncio.shield(self._end)

    async def _stop(self) -> None:
        try:
            await self.chain.stop(self.entrance.close)
        finally:
            if self._sweeper is not None:
                self._sweeper.cancel()
            self.arena.unlink()

    async def _sweep(self) -> None:
        while not self.chain.ended:
            await asyncio.sleep(SWEEP_SECONDS)
            await self.entrance.sweep()

    @property
    def sessions(self) -> Sessions:
        """Who holds which channels."""
        return self.entrance.sessions

    def list_sessions(self) -> list[control_pb2.Session]:
        """Who holds which channels."""
        return [self._describe_session(session) for session in self.sessions.all()]

    def _describe_session(self, session: Session) -> control_pb2.Session:
        made = control_pb2.Session(
            front_end=session.front_end,
            transport=session.transport,
            opened_unix_seconds=session.opened_unix_seconds,
            gpu_memory=self.entrance.way_of(session.transport),
        )
        for index in session.channels:
            page = self.arena.channel_out(index)[0]
            made.channels.add(index=index, live=bool(page["live"]), lease=int(page["lease"]))
        return made

    async def open_session(
        self, front_end: str, channels: int, transport: str, offer: bytes, owner: str = "", fingerprint: str = ""
    ) -> control_pb2.OpenSessionResponse:
        """Hands out channels; `owner` and `fingerprint` are subject and SHA-256 of the caller's certificate.

        Raises:
            as Entrance.open
        """
        session = await self.entrance.open(front_end, channels, transport, offer, owner, fingerprint)
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
            channels=session.channels,
            transport_blob=session.registration.answer,
            model=self.model,
        )


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


__all__ = ["ChainError", "ChainLife"]
