"""The runtime's state: which model is loaded, and the way from one state to the next."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from blink_proto import control_pb2
from blink_proto.control_pb2 import Phase
from gpu_runtime.chain.process import ChainError, Progress
from gpu_runtime.config import RuntimeConfig
from gpu_runtime.control.chain_life import ChainLife
from gpu_runtime.control.errors import BadRequestError, NoSuchModelError, NotReadyError
from gpu_runtime.control.memory import available_bytes
from gpu_runtime.control.prepare import Prepared, prepare
from gpu_runtime.model.errors import ModelError
from gpu_runtime.model.source import ModelFolder, resolve_model


@dataclass
class Watch:
    """The present state, and a wake-up for everybody who waits for the next one."""

    state: control_pb2.State = field(default_factory=lambda: control_pb2.State(phase=Phase.PHASE_IDLE))
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def set(self, phase: Phase, epoch: int, model: str = "", detail: str = "") -> None:
        """Moves to another state."""
        self.state = control_pb2.State(phase=phase, epoch=epoch, model=model, detail=detail)
        self.changed.set()
        self.changed = asyncio.Event()

    async def follow(self) -> AsyncIterator[control_pb2.State]:
        """The present state, then every later one; states that come faster than they are taken are merged."""
        while True:
            changed, state = self.changed, self.state
            yield state
            await changed.wait()


class Runtime:
    """Loads and unloads models. All methods belong to one event loop."""

    def __init__(self, config: RuntimeConfig) -> None:
        self.config = config
        self.watch = Watch()
        self.failed = asyncio.Event()
        self._life: ChainLife | None = None
        self._epoch = 0
        self._busy = asyncio.Lock()
        self._ending = False

    @property
    def life(self) -> ChainLife:
        """The present life of the chain.

        Raises:
            NotReadyError: no model is loaded.
        """
        if self._life is None:
            raise NotReadyError("no model is loaded")
        return self._life

    def models(self) -> list[control_pb2.Model]:
        """What is loaded."""
        return [] if self._life is None else [self._life.model]

    async def load(self, source: str, name: str, progress: Progress) -> control_pb2.Model:
        """Loads a model; one that is loaded already is simply returned.

        Raises:
            NotReadyError: another model is loaded, or a change is under way.
            BadRequestError: the model is unsupported or broken.
            ExhaustedError: too little memory.
            ChainError: the chain ended during its start.
        """
        if self._busy.locked():
            raise NotReadyError("another load, unload or drain is under way")
        async with self._busy:
            folder = await self._resolve(source, progress)
            name = name or folder.name
            if self._life is not None:
                return self._already_loaded(folder.path, name)
            prepared = await asyncio.to_thread(self._prepare, folder, name)
            self._epoch += 1
            self.watch.set(Phase.PHASE_LOADING, self._epoch, name)
            try:
                self._life = await ChainLife.begin(prepared, self._epoch, progress)
            except BaseException as error:
                self.watch.set(Phase.PHASE_IDLE, self._epoch, detail=f"{name}: {error}")
                raise
            self._end_watcher = asyncio.create_task(self._watch_chain(self._life))
            self.watch.set(Phase.PHASE_SERVING, self._epoch, name)
            return self._life.model

    async def unload(self, name: str, grace_seconds: float) -> None:
        """Drains the chain and frees the model.

        Raises:
            NoSuchModelError: it is not loaded.
            NotReadyError: a change is under way.
        """
        if self._life is None or self._life.model.name != name:
            raise NoSuchModelError(f"no model named {name!r} is loaded")
        if self._busy.locked():
            raise NotReadyError("another load, unload or drain is under way")
        async with self._busy:
            await self._end_life(grace_seconds)

    async def drain(self, grace_seconds: float) -> bool:
        """Takes nothing new and waits; see ChainLife.drain.

        Raises:
            NotReadyError: no model is loaded, or a change is under way.
        """
        life = self.life
        if self._busy.locked():
            raise NotReadyError("another load, unload or drain is under way")
        async with self._busy:
            self.watch.set(Phase.PHASE_DRAINING, self._epoch, life.model.name)
            return await life.drain(grace_seconds)

    def resume(self) -> None:
        """Takes submissions again after a drain.

        Raises:
            NotReadyError: no model is loaded.
        """
        life = self.life
        life.resume()
        self.watch.set(Phase.PHASE_SERVING, self._epoch, life.model.name)

    async def close(self, grace_seconds: float) -> None:
        """Ends in order: drains within the grace time, then stops the chain."""
        self._ending = True
        if self._life is not None:
            await self._end_life(grace_seconds)

    async def _end_life(self, grace_seconds: float) -> None:
        life = self.life
        self.watch.set(Phase.PHASE_DRAINING, self._epoch, life.model.name)
        await life.drain(grace_seconds)
        self._life = None
        await life.end()
        self.watch.set(Phase.PHASE_IDLE, self._epoch)

    async def _watch_chain(self, life: ChainLife) -> None:
        """Blocks on the chain's end; when nobody asked for it, the runtime has failed."""
        await life.chain.wait()
        if self._life is not life:
            return
        detail = await life.chain.failure()
        self._life = None
        life.arena.unlink()
        self.watch.set(Phase.PHASE_FAILED, self._epoch, life.model.name, detail)
        self.failed.set()

    def _prepare(self, folder: ModelFolder, name: str) -> Prepared:
        return prepare(self.config, folder, name, available_bytes(self.config))

    async def _resolve(self, source: str, progress: Progress) -> ModelFolder:
        loop = asyncio.get_running_loop()

        def report(done: int, total: int, what: str) -> None:
            loop.call_soon_threadsafe(progress, done, total, what)

        try:
            return await asyncio.to_thread(resolve_model, source, report, weights=not self.config.random_weights)
        except ModelError as error:
            raise BadRequestError(str(error)) from error

    def _already_loaded(self, path: Path, name: str) -> control_pb2.Model:
        life = self.life
        if life.folder == path and life.model.name == name:
            return life.model
        raise NotReadyError(f"{life.model.name!r} is loaded; unload it first")


__all__ = ["ChainError", "Runtime", "Watch"]
