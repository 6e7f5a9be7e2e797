"""The gRPC side of the supervisor: watches a runtime and opens a session for each epoch of the chain.

Nothing here is in the path of a request: a runtime whose control process hangs is not even noticed, and one whose
control process is gone is only waited for.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

import grpc

from blink_proto import arena, control_pb2
from blink_proto.control_pb2_grpc import ControlStub
from blink_proto.dial import Dial, DialError
from blink_proto.tokenizer.files import BUNDLE_FILES, MOST_BYTES
from dpu_service.channel.errors import ChannelError
from dpu_service.channel.geometry import Geometry
from dpu_service.config import ModelInfo
from dpu_service.identity import Identities, Identity, digest_of
from dpu_service.transport.base import TransportError
from dpu_service.wire import Session

log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
CALL_SECONDS = 30.0
WATCH_SECONDS = 3600.0
"""After so long the link dials anew, with its certificate as it is then."""
FORGET_SECONDS = 30.0
"""A runtime whose control plane does not answer and whose device no worker has reached for so long has ended."""

MakeOffer = Callable[[int], Awaitable[bytes]]
OnSession = Callable[[int, Session], None]


class RuntimeLink:
    """Keeps a session with one runtime for each worker.

    Args:
        dial: how to call its control plane. The files in it are read for every connection.
        front_end: a stable name; workers are numbered behind it, and the same name gets its channel back.
        workers: channels wanted.
        transport: by which they will reach the arena.
        make_offer: a worker's end of a new connection; may raise TransportError.
        on_session: gets the session of a worker, whenever there is a new life of the chain or `renew` asked for it.
        runtime: its number.
        identities: what all runtimes serve.
        in_use: whether any worker can still reach its device; asked while its control plane does not answer.
    """

    def __init__(
        self,
        dial: Dial,
        front_end: str,
        workers: int,
        transport: str,
        make_offer: MakeOffer,
        on_session: OnSession,
        runtime: int = 0,
        identities: Identities | None = None,
        in_use: Callable[[], bool] = lambda: True,
    ) -> None:
        self._dial = dial
        self._address = dial.address
        self._front_end = front_end
        self._workers = workers
        self._transport = transport
        self._make_offer = make_offer
        self._on_session = on_session
        self._runtime = runtime
        self._identities = identities or Identities()
        self._in_use = in_use
        self._stub: ControlStub | None = None
        self._life: tuple[int, int] | None = None
        """Epoch and number of the life that has sessions."""
        self._nonce: int | None = None
        self._files: dict[str, bytes] = {}
        self._files_of: int | None = None
        """The nonce with which they came."""
        self._opening = asyncio.Lock()
        self._renewals: dict[int, asyncio.Task[None]] = {}
        self._last_used = time.monotonic()
        self._said = ""

    async def follow(self) -> None:
        """Runs for ever."""
        while True:
            began = time.monotonic()
            try:
                await self._follow_once()
            except (grpc.aio.AioRpcError, ChannelError, TransportError, DialError) as error:
                if time.monotonic() - began < WATCH_SECONDS:
                    self._say_error(error)
            finally:
                self._stub = None
            self._note_use(time.monotonic())
            await asyncio.sleep(RETRY_SECONDS)

    def _note_use(self, now: float) -> None:
        """Without this a runtime that never comes back would keep its model's name from a newer version for ever."""
        if self._in_use():
            self._last_used = now
        elif now - self._last_used > FORGET_SECONDS:
            self._forget_life()

    async def _follow_once(self) -> None:
        async with self._channel() as channel:
            self._stub = ControlStub(channel)
            async for state in self._stub.WatchState(control_pb2.WatchStateRequest(), timeout=WATCH_SECONDS):
                await self._note(self._stub, state)

    def _channel(self) -> grpc.aio.Channel:
        """A new connection.

        Raises:
            DialError: a file cannot be used at the moment.
        """
        options = self._dial.options()
        if self._dial.is_secure:
            return grpc.aio.secure_channel(self._address, self._dial.credentials(), options=options)
        return grpc.aio.insecure_channel(self._address, options=options)

    def renew(self, worker: int) -> None:
        """Opens a new session for a worker that has none or whose connection broke; soon, and again until it works."""
        if worker not in self._renewals:
            self._renewals[worker] = asyncio.create_task(self._renew(worker))

    async def _renew(self, worker: int) -> None:
        try:
            while not await self._tried(worker):
                await asyncio.sleep(RETRY_SECONDS)
        finally:
            del self._renewals[worker]

    async def _tried(self, worker: int) -> bool:
        async with self._opening:
            if self._life is None:
                return True  # the next life brings a session
            if self._stub is None:
                return False
            try:
                return await self._open_for(self._stub, worker)
            except (grpc.aio.AioRpcError, ChannelError, TransportError) as error:
                self._say_error(error)
        return False

    async def _note(self, stub: ControlStub, state: control_pb2.State) -> None:
        if state.phase not in (control_pb2.PHASE_SERVING, control_pb2.PHASE_DRAINING):
            self._forget_life()
            phase = control_pb2.Phase.Name(state.phase).removeprefix("PHASE_").lower()
            self._say(f"the GPU runtime at {self._address} serves no model yet (it is {phase})")
            return
        life = (state.epoch, state.life)
        if life == self._life and (state.life or not self._said):
            self._said = ""
            return
        async with self._opening:
            for worker in range(self._workers):
                if not await self._open_for(stub, worker, unless_known=worker == 0):
                    break
            self._life = life
        self._said = ""

    async def _open_for(self, stub: ControlStub, worker: int, *, unless_known: bool = False) -> bool:
        """Opens a worker's session; False when its life is known already and that was not wanted."""
        request = control_pb2.OpenSessionRequest(
            front_end=f"{self._front_end}/{worker}",
            channels=1,
            transport=self._transport,
            layout_hash=arena.LAYOUT_HASH,
            offer=await self._make_offer(worker),
        )
        opened: control_pb2.OpenSessionResponse = await stub.OpenSession(request, timeout=CALL_SECONDS)
        if opened.nonce == self._nonce and unless_known:
            return False
        if opened.nonce != self._files_of:
            self._files = await _fetch_tokenizer(stub, opened.model.name)
            self._files_of = opened.nonce
        session = _session(opened, self._runtime, self._transport, self._files)
        self._identities.claim(self._runtime, opened.nonce, opened.model.name, _identity(session))
        self._nonce = opened.nonce
        fields = {"runtime": self._runtime, "model": opened.model.name, "epoch": opened.epoch, "worker": worker}
        log.info("session opened", extra={"fields": fields})
        self._on_session(worker, session)
        return True

    def _forget_life(self) -> None:
        self._life = self._nonce = None
        self._identities.drop(self._runtime)

    def _say_error(self, error: Exception) -> None:
        if isinstance(error, grpc.aio.AioRpcError):
            reason = f"{error.code().name}: {error.details()}".removesuffix(": ")
            self._say(f"no answer from the GPU runtime at {self._address}: {reason}")
        else:
            self._say(f"cannot work with the GPU runtime at {self._address}: {error}")

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
        if chunk.file not in BUNDLE_FILES or total > MOST_BYTES:
            raise ChannelError("the runtime sent a tokenizer file that is unknown or too large")
        parts.setdefault(chunk.file, []).append(chunk.content)
    return {name: b"".join(pieces) for name, pieces in parts.items()}


def _session(opened: control_pb2.OpenSessionResponse, runtime: int, transport: str, files: dict[str, bytes]) -> Session:
    """Raises:
    ChannelError: what the runtime handed out cannot be used.
    """
    geometry = _geometry(opened)
    geometry.check()
    if len(opened.channels) != 1 or opened.channels[0] >= geometry.channels:
        raise ChannelError("the runtime handed out other channels than asked for")
    model = ModelInfo(
        name=opened.model.name,
        architecture=opened.model.architecture,
        parameters=opened.model.parameters,
        loaded_unix_seconds=opened.model.loaded_unix_seconds,
        dtype=opened.model.dtype,
    )
    return Session(runtime, geometry, opened.channels[0], transport, opened.transport_blob, model, files)


def _identity(session: Session) -> Identity:
    model = session.model
    tokenizer = digest_of(session.tokenizer_files)
    return Identity(model.architecture, model.parameters, model.dtype, session.geometry.vocab_size, tokenizer)


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
