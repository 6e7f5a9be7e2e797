"""A control plane over an arena without a chain, whose registrar is as slow as it is told to be."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from blink_proto import arena, control_pb2
from blink_proto.control_pb2_grpc import ControlStub
from gpu_runtime.config import make_config
from gpu_runtime.control import entrance
from gpu_runtime.control.chain_life import ChainLife
from gpu_runtime.control.entrance import Entrance
from gpu_runtime.control.runtime import Runtime
from gpu_runtime.control.server import ControlServer, Listen, start_server
from gpu_runtime.control.tls import TlsFiles
from gpu_runtime.shared_arena import ArenaLimits, SharedArena


@dataclass
class Keys:
    """What one front end was given."""

    registrar: SlowRegistrar
    channels: tuple[int, ...]
    answer: bytes = b"keys"
    revoked: bool = False

    def revoke(self) -> None:
        self.registrar.work(self.registrar.revoking)
        self.revoked = True


@dataclass
class SlowRegistrar:
    """Notes what it gives, and that nobody calls it while it works."""

    registering: float = 0.0
    revoking: float = 0.0
    given: list[Keys] = field(default_factory=list)
    closed: bool = False
    busy: threading.Event = field(default_factory=threading.Event)

    def work(self, seconds: float) -> None:
        assert not self.busy.is_set(), "one at a time"
        self.busy.set()
        time.sleep(seconds)
        self.busy.clear()

    def register(self, offer: bytes, channels: tuple[int, ...]) -> Keys:
        self.work(self.registering)
        self.given.append(Keys(self, channels))
        return self.given[-1]

    def close(self) -> None:
        assert not self.busy.is_set()
        assert all(keys.revoked for keys in self.given)
        self.closed = True


@dataclass
class Doors:
    """A runtime that serves, as far as the control plane can tell."""

    transport: str
    life: ChainLife
    registrar: SlowRegistrar
    server: ControlServer
    certificates: Path | None
    channel: Any = None
    """A front end's."""

    @property
    def port(self) -> int:
        return self.server.port

    def connection(self, name: str) -> grpc.aio.Channel:
        """A new one, with a certificate of the folder; in plain text where there is none."""
        where, options = f"127.0.0.1:{self.port}", [("grpc.use_local_subchannel_pool", 1)]
        if self.certificates is None:
            return grpc.aio.insecure_channel(where, options=options)
        files = [(self.certificates / file).read_bytes() for file in ("ca.pem", f"{name}-key.pem", f"{name}.pem")]
        return grpc.aio.secure_channel(where, grpc.ssl_channel_credentials(*files), options=options)

    @property
    def stub(self) -> ControlStub:
        return ControlStub(self.channel)

    def open(self, name: str, timeout: float = 20.0) -> Any:
        request = control_pb2.OpenSessionRequest(
            front_end=name, channels=1, transport=self.transport, layout_hash=arena.LAYOUT_HASH
        )
        return self.stub.OpenSession(request, timeout=timeout)

    def live(self, channel: int, value: int = 1) -> None:
        """A worker takes its lease, or gives it up."""
        shared = self.life.arena
        at = shared.inbound_layout.channel_offset(channel) + shared.inbound_layout.channel_control_offset
        shared.inbound[at : at + arena.ChannelIn.itemsize].view(arena.ChannelIn)[0]["lease"] = value
        shared.channel_out(channel)[0]["live"] = value

    async def until_idle(self) -> None:
        """Nothing more is under way."""
        async with asyncio.timeout(10):
            while self.life.entrance._one_at_a_time.locked() or self.life.entrance._undoing:
                await asyncio.sleep(0.01)


def _tls(folder: Path) -> TlsFiles:
    return TlsFiles(*(str(folder / name) for name in ("server.pem", "server-key.pem", "ca.pem")))


async def _go_on(shared: SharedArena) -> None:
    """As the device's scheduler does: a lease that is given up ends."""
    layout = shared.inbound_layout
    while True:
        shared.telemetry[0]["heartbeat"] += 1
        for channel in range(shared.sizes.channels):
            at = layout.channel_offset(channel) + layout.channel_control_offset
            words = shared.inbound[at : at + arena.ChannelIn.itemsize].view(arena.ChannelIn)[0]
            shared.channel_out(channel)[0]["live"] = int(words["lease"] != 0)
        await asyncio.sleep(0.01)


@asynccontextmanager
async def doors(
    patch: pytest.MonkeyPatch, certificates: Path | None = None, refused: str = "", transport: str = "verbs"
) -> AsyncIterator[Doors]:
    """Four channels; plain text without a folder of certificates."""
    registrar = SlowRegistrar()
    patch.setattr(entrance, "make_registrar", lambda *choice: registrar)
    config = make_config(
        "cpu", channels=4, transports=(transport,), rdma_address="192.0.2.1", lease_timeout_seconds=2.0
    )
    shared = SharedArena.create(config.arena_sizes(), ArenaLimits(1, 1, 100, 100, 100))
    way_in = Entrance(config, shared)
    way_in._open = True
    chain: Any = None
    life = ChainLife(control_pb2.Model(name="tiny"), Path("/"), shared, chain, way_in, 1, 1)
    runtime = Runtime(config)
    runtime._life = life
    runtime.watch.set(control_pb2.PHASE_SERVING, 1, "tiny", life=life.number)
    device = asyncio.create_task(_go_on(shared))
    server = await start_server(
        runtime, Listen("127.0.0.1:0", certificates and _tls(certificates), refused_certificates=refused)
    )
    made = Doors(transport, life, registrar, server, certificates)
    try:
        async with made.connection("front-end") as made.channel:
            yield made
    finally:
        await way_in.close()
        await server.stop()
        device.cancel()
        shared.unlink()
        assert registrar.closed


def play_doors(
    patch: pytest.MonkeyPatch, scene: Callable[[Doors], Awaitable[None]], certificates: Path | None = None
) -> None:
    """A scene at them, for a minute at most."""

    async def run() -> None:
        async with asyncio.timeout(60), doors(patch, certificates) as made:
            await scene(made)

    asyncio.run(run())
