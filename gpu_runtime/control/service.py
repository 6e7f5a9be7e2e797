"""The gRPC service: translates between `control.proto` and the runtime."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc

from blink_proto import VERSION, arena, control_pb2
from blink_proto.control_pb2_grpc import ControlServicer
from gpu_runtime.control.caller import caller_of
from gpu_runtime.control.crowd import Turns
from gpu_runtime.control.errors import BadRequestError, ControlError, NoSuchModelError, NotReadyError
from gpu_runtime.control.runtime import ChainError, Runtime

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]
else:
    Context = Any

CHUNK_BYTES = 64 << 10
"""What a caller that takes nothing costs; gRPC holds a piece or two for it until its connection ends."""
FETCHES = 8
"""Of tokenizers, of one certificate at a time."""
MAX_GRACE_SECONDS = 3600
LEAST_MILLISECONDS = 100
"""Between two states that a watcher asks for."""
LOOK_SECONDS, SILENT_SECONDS = 0.05, 1.0
"""Of a load's progress."""


@dataclass(eq=False)
class _Load:
    """A load under way, whoever asked for it."""

    request: control_pb2.LoadModelRequest
    task: asyncio.Task[control_pb2.Model]
    latest: control_pb2.LoadModelProgress
    callers: int = 0
    """Who wait for it."""


class ControlService(ControlServicer):
    """See `control.proto` for what each call does and refuses."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._fetches = Turns(FETCHES)
        self._load: _Load | None = None
        """The latest one."""

    async def GetServerInfo(
        self, request: control_pb2.GetServerInfoRequest, context: Context
    ) -> control_pb2.GetServerInfoResponse:
        """What this runtime is."""
        runtime = self._runtime
        free = len(runtime.life.sessions.free()) if runtime.models() else 0
        return control_pb2.GetServerInfoResponse(
            version=VERSION,
            device=runtime.config.device,
            state=runtime.watch.state,
            arena_version=arena.VERSION,
            layout_hash=arena.LAYOUT_HASH,
            channels=runtime.config.channels,
            channels_free=free,
        )

    async def LoadModel(
        self, request: control_pb2.LoadModelRequest, context: Context
    ) -> AsyncIterator[control_pb2.LoadModelProgress]:
        """Streams progress. The load goes on when the caller goes away, and the same request joins it."""
        if not request.source:
            await refuse(context, BadRequestError("source is empty"))
        load = self._join(request) or self._begin(request)
        load.callers += 1
        try:
            async for latest in _news(load):
                yield latest
            model = await answer(context, lambda: asyncio.shield(load.task))
        finally:
            load.callers -= 1
        done, total = load.latest.done_units, load.latest.total_units
        yield control_pb2.LoadModelProgress(stage="ready", done_units=done, total_units=total, done=True, model=model)

    def _join(self, request: control_pb2.LoadModelRequest) -> _Load | None:
        load = self._load
        return load if load is not None and load.request == request and not load.task.done() else None

    def _begin(self, request: control_pb2.LoadModelRequest) -> _Load:
        latest = control_pb2.LoadModelProgress(stage="starting")

        def report(done: int, total: int, what: str) -> None:
            latest.stage, latest.done_units, latest.total_units = what, done, total

        grace = min(request.grace_seconds, MAX_GRACE_SECONDS) if request.replace else None
        task = asyncio.create_task(self._runtime.load(request.source, request.name, report, replace_grace=grace))
        begun = _Load(request, task, latest)
        task.add_done_callback(lambda done: _note_outcome(begun))
        if self._load is None or self._load.task.done():
            self._load = begun  # otherwise the runtime refuses this one
        return begun

    async def UnloadModel(
        self, request: control_pb2.UnloadModelRequest, context: Context
    ) -> control_pb2.UnloadModelResponse:
        """Drains and frees."""
        grace = min(request.grace_seconds, MAX_GRACE_SECONDS)
        await answer(context, lambda: self._runtime.unload(request.name, grace))
        return control_pb2.UnloadModelResponse()

    async def ListModels(
        self, request: control_pb2.ListModelsRequest, context: Context
    ) -> control_pb2.ListModelsResponse:
        """What is loaded."""
        return control_pb2.ListModelsResponse(models=self._runtime.models())

    async def OpenSession(
        self, request: control_pb2.OpenSessionRequest, context: Context
    ) -> control_pb2.OpenSessionResponse:
        """Hands out channels."""

        async def open_session() -> control_pb2.OpenSessionResponse:
            if request.layout_hash != arena.LAYOUT_HASH:
                raise NotReadyError("the front end was built for another arena layout; use the same version")
            life = self._runtime.life
            caller = caller_of(context.auth_context(), context.peer())
            wanted = (request.front_end, request.channels, request.transport, request.offer)
            return await life.open_session(*wanted, caller.subject, caller.fingerprint)

        opened: control_pb2.OpenSessionResponse = await answer(context, open_session)
        return opened

    async def CloseSession(
        self, request: control_pb2.CloseSessionRequest, context: Context
    ) -> control_pb2.CloseSessionResponse:
        """Shuts a front end out."""

        async def close() -> bool:
            return await self._runtime.life.entrance.end(request.front_end)

        return control_pb2.CloseSessionResponse(freed=await answer(context, close))

    async def ListSessions(
        self, request: control_pb2.ListSessionsRequest, context: Context
    ) -> control_pb2.ListSessionsResponse:
        """Who holds which channels; nothing without a model."""
        sessions = self._runtime.life.list_sessions() if self._runtime.models() else []
        return control_pb2.ListSessionsResponse(sessions=sessions)

    async def FetchTokenizer(
        self, request: control_pb2.FetchTokenizerRequest, context: Context
    ) -> AsyncIterator[control_pb2.FetchTokenizerChunk]:
        """The model's tokenizer files, piece by piece."""
        async with self._fetches.turn(caller_of(context.auth_context(), context.peer())):
            files = await answer(context, lambda: self._tokenizer_of(request.model))
            for name, content in files.items():
                for at in range(0, len(content), CHUNK_BYTES):
                    yield control_pb2.FetchTokenizerChunk(file=name, content=content[at : at + CHUNK_BYTES])

    async def Drain(self, request: control_pb2.DrainRequest, context: Context) -> control_pb2.DrainResponse:
        """Drains or resumes."""

        async def run() -> bool:
            if request.resume:
                self._runtime.resume()
                return False
            return await self._runtime.drain(min(request.grace_seconds, MAX_GRACE_SECONDS))

        return control_pb2.DrainResponse(drained=await answer(context, run))

    async def WatchState(
        self, request: control_pb2.WatchStateRequest, context: Context
    ) -> AsyncIterator[control_pb2.State]:
        """The present state, then every change, and as often as asked what the device counts."""
        asked = request.every_milliseconds
        every = max(asked, LEAST_MILLISECONDS) / 1000 if asked else None
        async for state in self._runtime.watch.follow(every):
            yield self._runtime.measured(state) if asked else state

    async def _tokenizer_of(self, model: str) -> Mapping[str, bytes]:
        if model not in [loaded.name for loaded in self._runtime.models()]:
            raise NoSuchModelError(f"no model named {model!r} is loaded")
        return self._runtime.life.tokenizer


async def _news(load: _Load) -> AsyncIterator[control_pb2.LoadModelProgress]:
    """What is new of a load, to its end; once a second also what is not."""
    told, told_at = None, 0.0
    while not load.task.done() or load.latest != told:
        if load.latest != told or time.monotonic() - told_at > SILENT_SECONDS:
            told, told_at = control_pb2.LoadModelProgress(), time.monotonic()
            told.CopyFrom(load.latest)
            yield told
        await asyncio.wait([load.task], timeout=LOOK_SECONDS)


def _note_outcome(load: _Load) -> None:
    """A load that fails when nobody waits for it any more is told to the operator."""
    if not load.task.cancelled() and (error := load.task.exception()) is not None and not load.callers:
        sys.stderr.write(f"a model was not loaded: {error}\n")


async def answer(context: Context, call: Callable[[], Awaitable[Any]]) -> Any:
    """Awaits a call; what it refuses becomes the gRPC status."""
    try:
        return await call()
    except ControlError as error:
        await refuse(context, error)
    except ChainError as error:
        await context.abort(grpc.StatusCode.ABORTED, str(error))


async def refuse(context: Context, error: ControlError) -> None:
    """Ends the call with the error's status."""
    await context.abort(error.code, str(error))
