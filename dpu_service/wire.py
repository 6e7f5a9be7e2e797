"""Messages between the supervisor and its workers: MessagePack, each behind its length, over a socket pair.

They never touch a disk or a command line, because the session in them is a secret.
"""

from __future__ import annotations

import asyncio
import struct

import msgspec

from dpu_service.channel.geometry import Geometry
from dpu_service.config import ModelInfo, WorkerConfig
from dpu_service.tenants.tenant import Tenant

_LENGTH = struct.Struct(">I")
MAX_MESSAGE_BYTES = 1 << 30


class ListenerSpec(msgspec.Struct, frozen=True):
    """An inherited listening socket."""

    descriptor: int
    tls: bool


class Start(msgspec.Struct, tag="start", frozen=True):
    """First message to a worker."""

    config: WorkerConfig
    listeners: list[ListenerSpec]
    worker: int
    """From 0: the worker's row in the counter page."""
    workers: int
    counters: int
    """Descriptor of the counter page."""
    runtimes: int
    """They have numbers from 0."""
    prefixes: int
    """Descriptor of the page of prefixes."""


class MakeOffer(msgspec.Struct, tag="make_offer", frozen=True):
    """A session with a runtime is about to be opened: answer with the offer of a new connector, and this number."""

    number: int
    runtime: int


class Session(msgspec.Struct, tag="session", frozen=True):
    """A session with a runtime, and the channel that is this worker's."""

    runtime: int
    geometry: Geometry
    channel: int
    transport: str
    transport_blob: bytes
    model: ModelInfo
    tokenizer_files: dict[str, bytes]

    def __repr__(self) -> str:
        return f"Session(runtime={self.runtime}, epoch={self.geometry.epoch}, channel={self.channel}, redacted)"


class Tenants(msgspec.Struct, tag="tenants", frozen=True):
    """Who may use the service from now on."""

    tenants: list[Tenant]


class Drain(msgspec.Struct, tag="drain", frozen=True):
    """Tell probes that you are not ready and serve for `unready` seconds more; finish what runs within `grace` seconds;
    end."""

    grace: float
    unready: float = 0.0


class Status(msgspec.Struct, tag="status", frozen=True):
    """A worker's readiness, whenever it changes."""

    ready: bool
    reason: str
    alive: list[bool]
    """Of each runtime whether its device is there, ready or not."""


class Offer(msgspec.Struct, tag="offer", frozen=True):
    """The worker's end of a connection to the arena."""

    number: int
    offer: bytes
    error: str = ""
    """Why there is none."""

    def __repr__(self) -> str:
        return "Offer(redacted)"


class Broken(msgspec.Struct, tag="broken", frozen=True):
    """The worker lost its connection to the arena of a runtime and needs a new session."""

    runtime: int


ToWorker = Start | MakeOffer | Session | Tenants | Drain
FromWorker = Status | Offer | Broken
_to_worker = msgspec.msgpack.Decoder(ToWorker)
_from_worker = msgspec.msgpack.Decoder(FromWorker)


def encode(message: ToWorker | FromWorker) -> bytes:
    """A message as it goes over the socket."""
    payload = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(payload)) + payload


async def read_to_worker(reader: asyncio.StreamReader) -> ToWorker | None:
    """The supervisor's next message; None when it is gone."""
    payload = await _read(reader)
    return None if payload is None else _to_worker.decode(payload)


async def read_from_worker(reader: asyncio.StreamReader) -> FromWorker | None:
    """The worker's next message; None when it is gone."""
    payload = await _read(reader)
    return None if payload is None else _from_worker.decode(payload)


async def _read(reader: asyncio.StreamReader) -> bytes | None:
    try:
        (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if size > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {size} bytes")
        return await reader.readexactly(size)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
