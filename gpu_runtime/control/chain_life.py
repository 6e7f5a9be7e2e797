"""One life of the chain with its model and its arena: an epoch."""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path

from blink_proto import arena, control_pb2
from gpu_runtime.chain.process import ChainError, ChainProcess, Progress
from gpu_runtime.chain.spec import ChainSpec
from gpu_runtime.control.prepare import Prepared
from gpu_runtime.control.sessions import Sessions
from gpu_runtime.scheduler import layout
from gpu_runtime.shared_arena import ArenaLimits, SharedArena

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass
class ChainLife:
    """A loaded model, its arena and its running chain."""

    model: control_pb2.Model
    folder: Path
    arena: SharedArena
    chain: ChainProcess
    sessions: Sessions
    nonce: int
    epoch: int
    _end: asyncio.Task[None] | None = field(default=None, init=False)

    @classmethod
    async def begin(cls, prepared: Prepared, epoch: int, progress: Progress) -> ChainLife:
        """Makes the arena, starts the chain and waits until it takes submissions.

        Raises:
            ChainError: the chain ended instead.
        """
        sizes, nonce = prepared.config.arena_sizes(), secrets.randbits(64)
        limits = ArenaLimits(nonce, epoch, prepared.limits.vocab_size, prepared.window, prepared.longest)
        shared = SharedArena.create(sizes, limits)
        try:
            chain = await cls._start_chain(prepared, shared, progress)
        except BaseException:
            shared.unlink()
            raise
        sessions = Sessions(sizes.channels, lambda channel: bool(shared.channel_out(channel)[0]["live"]))
        return cls(describe_model(prepared), prepared.folder.path, shared, chain, sessions, nonce, epoch)

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
        self.arena.unlink()

    def open_session(self, front_end: str, channels: int) -> control_pb2.OpenSessionResponse:
        """Hands out channels (errors: see Sessions.open)."""
        granted = self.sessions.open(front_end, channels)
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
            transport_blob=self.arena.name.transport_blob(),
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


__all__ = ["TOKENIZER_FILES", "ChainError", "ChainLife"]
