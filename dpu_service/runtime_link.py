"""The gRPC side of the supervisor: watches the runtime and opens a session for each epoch of the chain.

Nothing here is in the path of a request: a runtime whose control process hangs is not even noticed, and one whose
control process is gone is only waited for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import grpc

from blink_proto import arena, control_pb2
from blink_proto.control_pb2_grpc import ControlStub
from dpu_service.channel.errors import ChannelError
from dpu_service.channel.geometry import Geometry
from dpu_service.config import ModelInfo
from dpu_service.text.bundle import BUNDLE_FILES
from dpu_service.wire import Session

log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
CALL_SECONDS = 30.0
MAX_BUNDLE_BYTES = 256 << 20
_OPTIONS = [
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.enable_http_proxy", 0),
]

OnSessions = Callable[[list[Session]], Awaitable[None]]


class RuntimeLink:
    """Keeps a session with one runtime.

    Args:
        address: of its control plane.
        front_end: a stable name; the same one gets its channels back.
        workers: channels wanted.
        on_sessions: gets one session for each worker whenever there is a new epoch.
    """

    def __init__(self, address: str, front_end: str, workers: int, on_sessions: OnSessions) -> None:
        self._address = address
        self._front_end = front_end
        self._workers = workers
        self._on_sessions = on_sessions
        self._epoch: tuple[int, int] | None = None
        self._said = ""

    async def follow(self) -> None:
        """Runs for ever."""
        async with grpc.aio.insecure_channel(self._address, options=_OPTIONS) as channel:
            stub = ControlStub(channel)
            while True:
                try:
                    async for state in stub.WatchState(control_pb2.WatchStateRequest()):
                        await self._note(stub, state)
                except grpc.aio.AioRpcError as error:
                    self._say(f"no answer from the GPU runtime at {self._address}: {error.code().name}")
                except ChannelError as error:
                    self._say(f"cannot work with the GPU runtime at {self._address}: {error}")
                await asyncio.sleep(RETRY_SECONDS)

    async def _note(self, stub: ControlStub, state: control_pb2.State) -> None:
        if state.phase not in (control_pb2.PHASE_SERVING, control_pb2.PHASE_DRAINING):
            phase = control_pb2.Phase.Name(state.phase).removeprefix("PHASE_").lower()
            self._say(f"the GPU runtime at {self._address} serves no model yet (it is {phase})")
            return
        if self._epoch is not None and self._epoch[0] == state.epoch and not self._said:
            return
        opened = await self._open(stub)
        if (opened.epoch, opened.nonce) == self._epoch:
            self._said = ""
            return
        sessions = _sessions(opened, await _fetch_tokenizer(stub, opened.model.name), self._workers)
        self._epoch = (opened.epoch, opened.nonce)
        self._said = ""
        log.info("session opened", extra={"fields": {"model": opened.model.name, "epoch": opened.epoch}})
        await self._on_sessions(sessions)

    async def _open(self, stub: ControlStub) -> control_pb2.OpenSessionResponse:
        request = control_pb2.OpenSessionRequest(
            front_end=self._front_end, channels=self._workers, transport="shm", layout_hash=arena.LAYOUT_HASH
        )
        opened: control_pb2.OpenSessionResponse = await stub.OpenSession(request, timeout=CALL_SECONDS)
        return opened

    def _say(self, message: str) -> None:
        if message != self._said:
            self._said = message
            log.warning(message)


async def _fetch_tokenizer(stub: ControlStub, model: str) -> dict[str, bytes]:
    parts: dict[str, list[bytes]] = {}
    total = 0
    request = control_pb2.FetchTokenizerRequest(model=model)
    async for chunk in stub.FetchTokenizer(request, timeout=CALL_SECONDS):
        total += len(chunk.content)
        if chunk.file not in BUNDLE_FILES or total > MAX_BUNDLE_BYTES:
            raise ChannelError("the runtime sent a tokenizer file that is unknown or too large")
        parts.setdefault(chunk.file, []).append(chunk.content)
    return {name: b"".join(pieces) for name, pieces in parts.items()}


def _sessions(opened: control_pb2.OpenSessionResponse, files: dict[str, bytes], workers: int) -> list[Session]:
    """One for each worker.

    Raises:
        ChannelError: what the runtime handed out cannot be used.
    """
    geometry = _geometry(opened)
    geometry.check()
    channels = list(opened.channels)
    if len(channels) != workers or len(set(channels)) != workers or max(channels) >= geometry.channels:
        raise ChannelError("the runtime handed out other channels than asked for")
    model = ModelInfo(
        name=opened.model.name,
        architecture=opened.model.architecture,
        parameters=opened.model.parameters,
        loaded_unix_seconds=opened.model.loaded_unix_seconds,
        dtype=opened.model.dtype,
    )
    return [Session(geometry, channel, "shm", opened.transport_blob, model, files) for channel in channels]


def _geometry(opened: control_pb2.OpenSessionResponse) -> Geometry:
    layout = opened.layout
    return Geometry(
        layout_hash=layout.layout_hash,
        version=layout.version,
        channels=layout.channels,
        submit_slots=layout.submit_slots,
        cancel_slots=layout.cancel_slots,
        log_slots=layout.log_slots,
        heap_tokens=layout.heap_tokens,
        inbound_bytes=layout.inbound_bytes,
        outbound_bytes=layout.outbound_bytes,
        nonce=opened.nonce,
        epoch=opened.epoch,
        vocab_size=opened.model.vocab_size,
        max_model_tokens=opened.model.max_model_tokens,
        max_sequence_tokens=opened.model.max_sequence_tokens,
    )
