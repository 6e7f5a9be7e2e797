"""The runtime's state: which model is loaded, and the way from one state to the next."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace

from blink_proto import control_pb2
from blink_proto.control_pb2 import Phase
from gpu_runtime.chain.process import ChainError, Progress
from gpu_runtime.config import RuntimeConfig
from gpu_runtime.control.chain_life import ChainLife
from gpu_runtime.control.errors import (
    BadRequestError,
    ControlError,
    ExhaustedError,
    NoSuchModelError,
    NotReadyError,
    check_name,
)
from gpu_runtime.control.memory import DeviceUse
from gpu_runtime.control.patience import in_thread, to_the_end, while_it_moves
from gpu_runtime.control.prepare import Prepared, check_tokenizer, check_ways_in, prepare
from gpu_runtime.control.watch import Watch
from gpu_runtime.model.errors import ModelError
from gpu_runtime.model.source import ModelFolder, resolve_model

log = logging.getLogger(__name__)

MEASURE_SECONDS = 10.0
"""For a device to say how much of its memory is free."""


class Runtime:
    """Loads and unloads models. All methods belong to one event loop."""

    def __init__(self, config: RuntimeConfig) -> None:
        self.config = config
        self.watch = Watch()
        self.failed = asyncio.Event()
        self._life: ChainLife | None = None
        self._leaving: ChainLife | None = None
        """The latest one that was told to end."""
        self._epoch = 0
        self._memory = DeviceUse(config)
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

    def measured(self, state: control_pb2.State) -> control_pb2.State:
        """A state with what the present chain's device counts, if it is of that chain."""
        made = control_pb2.State()
        made.CopyFrom(state)
        if self._life is not None and self._life.number == state.life:
            made.telemetry.CopyFrom(self._life.telemetry())
        return made

    async def load(
        self, source: str, name: str, progress: Progress, *, replace_grace: float | None = None
    ) -> control_pb2.Model:
        """Loads a model; one that is loaded already is simply returned.

        Args:
            replace_grace: another model that is loaded makes room, once the new one has proved sound; its running
                sequences get so many seconds. None: it is in the way.

        Raises:
            NotReadyError: another model is loaded, a change is under way, or an RDMA device cannot be opened.
            BadRequestError: the model is unsupported or broken.
            ExhaustedError: too little memory.
            StalledError: nothing was heard of it for too long; it was given up.
            ChainError: the chain ended during its start; nothing is loaded then.
        """
        self._refuse_while_busy()
        async with self._busy:
            folder = await while_it_moves(lambda moved: self._resolve(source, moved), progress)
            name = name or folder.name
            check_name("the model's name", name)
            life = self._life
            if life is not None and (life.folder, life.model.name) == (folder.path, name):
                return life.model
            if life is not None and replace_grace is None:
                raise NotReadyError(f"{life.model.name!r} is loaded; unload or replace it")
            prepared = await while_it_moves(lambda moved: in_thread(lambda: self._prepare(folder, name)), progress)
            if self._life is not None:
                progress(0, 0, f"draining {self._life.model.name}")
                await self._end_life(replace_grace or 0.0, self._look_again)
            if self._ending or self.failed.is_set():
                raise NotReadyError("the runtime is ending")
            return await self._begin_life(prepared, progress)

    async def _begin_life(self, prepared: Prepared, progress: Progress) -> control_pb2.Model:
        name = prepared.name
        self._epoch += 1
        self.watch.set(Phase.PHASE_LOADING, self._epoch, name)
        try:
            self._life = await while_it_moves(lambda moved: self._start_chain(prepared, moved), progress)
        except BaseException as error:
            self.watch.set(Phase.PHASE_IDLE, self._epoch, detail=f"{name}: {error}")
            raise
        self._end_watcher = asyncio.create_task(self._watch_chain(self._life))
        self.watch.set(Phase.PHASE_SERVING, self._epoch, name, life=self._life.number)
        return self._life.model

    async def _start_chain(self, prepared: Prepared, progress: Progress) -> ChainLife:
        await in_thread(self._memory.before_start)
        try:
            life = await ChainLife.begin(prepared, self._epoch, progress)
        except OSError as error:  # no room for the arena, no more processes or descriptors
            raise ExhaustedError(f"no chain can be started: {error}") from error
        try:
            await self._measure()
        except BaseException:
            await life.end()
            raise
        return life

    async def _measure(self) -> None:
        try:
            async with asyncio.timeout(MEASURE_SECONDS):
                await in_thread(self._memory.when_ready)
        except TimeoutError:
            log.warning("the device does not say what it has left: a model in place of this one may be refused for it")

    async def unload(self, name: str, grace_seconds: float) -> None:
        """Drains the chain and frees the model, also when the caller goes away meanwhile.

        Raises:
            NoSuchModelError: it is not loaded.
            NotReadyError: a change is under way.
        """
        if self._life is None or self._life.model.name != name:
            raise NoSuchModelError(f"no model named {name!r} is loaded")
        self._refuse_while_busy()
        await to_the_end(self._unload(grace_seconds))

    async def _unload(self, grace_seconds: float) -> None:
        async with self._busy:
            await self._end_life(grace_seconds)

    async def drain(self, grace_seconds: float) -> bool:
        """Takes nothing new and waits; see ChainLife.drain.

        Raises:
            NotReadyError: no model is loaded, or a change is under way.
        """
        life = self.life
        self._refuse_while_busy()
        async with self._busy:
            self.watch.set(Phase.PHASE_DRAINING, self._epoch, life.model.name, life=life.number)
            return await life.drain(grace_seconds)

    def resume(self) -> None:
        """Takes submissions again after a drain.

        Raises:
            NotReadyError: no model is loaded.
        """
        life = self.life
        life.resume()
        self.watch.set(Phase.PHASE_SERVING, self._epoch, life.model.name, life=life.number)

    async def close(self, grace_seconds: float) -> None:
        """Ends in order: drains within the grace time, then stops the chain."""
        self._ending = True
        if self._life is not None:
            with contextlib.suppress(NotReadyError):
                await self._end_life(grace_seconds)
        elif self._leaving is not None:
            await self._leaving.end()

    async def _look_again(self) -> None:
        await while_it_moves(lambda moved: in_thread(lambda: check_ways_in(self.config)), lambda *told: None)

    async def _end_life(self, grace_seconds: float, once_more: Callable[[], Awaitable[None]] | None = None) -> None:
        """Drains and ends the present life; `close` may do the same meanwhile, with another grace time.

        Args:
            once_more: awaited between the two; should it fail in any way, the life goes on instead.

        Raises:
            NotReadyError: the chain has ended by itself meanwhile, or the life goes on for a reason that is no
            ControlError.
        """
        life = self.life
        self.watch.set(Phase.PHASE_DRAINING, self._epoch, life.model.name, life=life.number)
        try:
            await life.drain(grace_seconds)
            if once_more is not None:
                await once_more()
        except BaseException as error:
            if self._life is life and not self._ending:
                self.resume()
            if isinstance(error, Exception) and not isinstance(error, ControlError):
                raise NotReadyError(f"{life.model.name!r} stays: {error}") from error
            raise
        if self._life is life:
            self._life, self._leaving = None, life
        elif self._leaving is not life:
            raise NotReadyError("the chain has ended by itself")
        await life.end()
        self.watch.set(Phase.PHASE_IDLE, self._epoch)

    def _refuse_while_busy(self) -> None:
        if self._busy.locked():
            raise NotReadyError("another load, unload or drain is under way")

    async def _watch_chain(self, life: ChainLife) -> None:
        """Blocks on the chain's end; when nobody asked for it, the runtime has failed."""
        await life.chain.wait()
        if self._life is not life:
            return
        detail = await life.chain.failure()
        self._life = None
        await life.end()
        self.watch.set(Phase.PHASE_FAILED, self._epoch, life.model.name, detail)
        self.failed.set()

    def _prepare(self, folder: ModelFolder, name: str) -> Prepared:
        check_ways_in(self.config)
        tokenizer = check_tokenizer(folder.path, folder.config.vocab_size)
        replaced = None if self._life is None else self._life.chain.pid
        prepared = prepare(self.config, folder, name, self._memory.available(replaced))
        return replace(prepared, tokenizer=tokenizer)

    async def _resolve(self, source: str, progress: Progress) -> ModelFolder:
        loop = asyncio.get_running_loop()

        def report(done: int, total: int, what: str) -> None:
            loop.call_soon_threadsafe(progress, done, total, what)

        try:
            return await in_thread(lambda: resolve_model(source, report, weights=not self.config.random_weights))
        except ModelError as error:
            raise BadRequestError(str(error)) from error


__all__ = ["ChainError", "Runtime", "Watch"]
