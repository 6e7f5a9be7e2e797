"""The end of a chain's life goes to its end, and a replacement that is not to be leaves the old one serving.

Whatever a device says. Chains are processes that compute nothing (`tests/standin/idle.py`).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from blink_proto import adapters
from blink_proto.control_pb2 import Phase
from gpu_runtime import main
from gpu_runtime.chain import process
from gpu_runtime.config import make_config
from gpu_runtime.control import chain_life, patience
from gpu_runtime.control import runtime as runtime_module
from gpu_runtime.control.entrance import Entrance
from gpu_runtime.control.errors import NotReadyError, StalledError
from gpu_runtime.control.runtime import Runtime
from gpu_runtime.control.server import Listen
from gpu_runtime.registration import verbs
from gpu_runtime.scheduler import layout
from gpu_runtime.shared_arena import SHM_FOLDER
from tests.lives import ignore, play_lives
from tests.tiny import save_tiny


@dataclass
class Port:
    """An RDMA device that fails as it is told to."""

    opening: Exception | None = None
    closing: Exception | None = None
    name: str = "standin0"
    binding: str = "standin"
    no_windows: str = ""

    def __call__(self, *choice: object) -> Port:
        if self.opening is not None:
            raise self.opening
        return self

    def close(self) -> None:
        if self.closing is not None:
            raise self.closing


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Port:
    made = Port()
    for module in (verbs, adapters):
        monkeypatch.setattr(module, "open_device", made)
    return made


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Two models."""
    made = [save_tiny(tmp_path_factory.mktemp(family), family) for family in ("llama", "qwen2")]
    return str(made[0]), str(made[1])


def play(monkeypatch: pytest.MonkeyPatch, scene: Callable[[Runtime], Awaitable[None]]) -> None:
    play_lives(monkeypatch, scene, transports=("shm", "verbs"), rdma_address="192.0.2.1")


def test_a_device_that_fails_to_close_ends_with_its_life(
    monkeypatch: pytest.MonkeyPatch, port: Port, folders: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """The chain, its arena and its sweeper are gone, and the next model comes."""

    async def scene(runtime: Runtime) -> None:
        await runtime.load(folders[0], "old", ignore)
        life = runtime.life
        port.closing = OSError(16, "Device or resource busy")
        await runtime.unload("old", 0.0)
        assert life.chain.ended
        assert not (SHM_FOLDER / life.arena.name.inbound).exists()
        await asyncio.sleep(0)
        assert life._sweeper is not None
        assert life._sweeper.done()
        assert "could not be closed: [Errno 16] Device or resource busy" in caplog.text
        assert runtime.watch.state.phase == Phase.PHASE_IDLE
        port.closing = None
        await runtime.load(folders[0], "again", ignore)
        assert runtime.watch.state.phase == Phase.PHASE_SERVING

    play(monkeypatch, scene)


def test_a_chain_is_ended_and_its_arena_unlinked_whatever_happens_before(
    monkeypatch: pytest.MonkeyPatch, port: Port, folders: tuple[str, str]
) -> None:
    async def scene(runtime: Runtime) -> None:
        await runtime.load(folders[0], "old", ignore)
        life, close = runtime.life, runtime.life.entrance.close

        async def fail() -> None:
            await close()
            raise RuntimeError("no way out")

        monkeypatch.setattr(life.entrance, "close", fail)
        with pytest.raises(RuntimeError, match="no way out"):
            await life.end()
        assert life.chain.ended
        assert not (SHM_FOLDER / life.arena.name.inbound).exists()
        runtime._life = None

    play(monkeypatch, scene)


def test_the_server_stops_after_a_runtime_that_does_not_close(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[str] = []

    async def start(runtime: Runtime, listen: Listen) -> Any:
        async def stop() -> None:
            stopped.append("server")

        return SimpleNamespace(port=1, stop=stop)

    async def wait(runtime: Runtime) -> int:
        return 0

    async def close(runtime: Runtime, grace_seconds: float) -> None:
        raise RuntimeError("no way out")

    monkeypatch.setattr(main, "start_server", start)
    monkeypatch.setattr(main, "wait_for_end", wait)
    monkeypatch.setattr(Runtime, "close", close)
    with pytest.raises(RuntimeError, match="no way out"):
        asyncio.run(main.serve(make_config("cpu"), Listen("127.0.0.1:0"), "", "", 0.0, -1))
    assert stopped == ["server"]


def test_a_device_that_hangs_keeps_no_chain(
    monkeypatch: pytest.MonkeyPatch, port: Port, folders: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process, "LET_GO_SECONDS", 0.2)
    go_on = threading.Event()

    async def scene(runtime: Runtime) -> None:
        await runtime.load(folders[0], "old", ignore)
        life = runtime.life
        life.entrance._undo.callback(go_on.wait, 30)
        await asyncio.wait_for(runtime.unload("old", 0.0), 5)
        assert life.chain.ended
        assert "the chain ends without that" in caplog.text
        go_on.set()

    play(monkeypatch, scene)


def test_ways_in_that_hang_hold_nobody_up(
    monkeypatch: pytest.MonkeyPatch, port: Port, folders: tuple[str, str]
) -> None:
    """The load is given up, and what comes of it late is closed."""
    go_on, let_go = threading.Event(), threading.Event()

    class Slow(Entrance):
        def __init__(self, *arguments: Any) -> None:
            go_on.wait(30)
            super().__init__(*arguments)
            self._undo.callback(let_go.set)

    async def scene(runtime: Runtime) -> None:
        monkeypatch.setattr(patience, "STALL_SECONDS", 0.5)
        monkeypatch.setattr(chain_life, "Entrance", Slow)
        loading, ticks = asyncio.ensure_future(runtime.load(folders[0], "old", ignore)), 0
        while not loading.done():
            await asyncio.sleep(0.01)
            ticks += 1
        assert ticks > 10
        with pytest.raises(StalledError):
            await loading
        assert runtime.watch.state.phase == Phase.PHASE_IDLE
        go_on.set()
        assert await asyncio.to_thread(let_go.wait, 10)

    play(monkeypatch, scene)


def test_a_driver_that_hangs_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch, port: Port, folders: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """Before the start the load is given up; when the chain is ready, it serves."""
    go_on = threading.Event()

    async def scene(runtime: Runtime) -> None:
        monkeypatch.setattr(runtime_module, "MEASURE_SECONDS", 0.2)
        with monkeypatch.context() as patch:
            patch.setattr(patience, "STALL_SECONDS", 0.5)
            patch.setattr(runtime._memory, "before_start", lambda: go_on.wait(30))
            with pytest.raises(StalledError):
                await runtime.load(folders[0], "old", ignore)
        monkeypatch.setattr(runtime._memory, "when_ready", lambda: go_on.wait(30))
        await runtime.load(folders[0], "old", ignore)
        assert runtime.watch.state.phase == Phase.PHASE_SERVING
        assert "does not say what it has left" in caplog.text
        go_on.set()

    play(monkeypatch, scene)


@pytest.mark.parametrize("drains", [True, False], ids=["looking", "draining"])
def test_whatever_fails_before_a_replacement_the_old_model_serves_on(
    monkeypatch: pytest.MonkeyPatch, port: Port, folders: tuple[str, str], drains: bool
) -> None:
    """Also what no one has thought of: here a device that is gone altogether, and a broken drain."""
    gone = OSError(19, "No such device")

    async def scene(runtime: Runtime) -> None:
        await runtime.load(folders[0], "old", ignore)
        life, drain = runtime.life, runtime.life.drain

        async def drain_and_lose(grace_seconds: float) -> bool:
            drained = await drain(grace_seconds)
            if not drains:
                raise gone
            port.opening = gone
            return drained

        with monkeypatch.context() as patch:
            patch.setattr(life, "drain", drain_and_lose)
            with pytest.raises(NotReadyError, match=r"'old' stays: .*No such device"):
                await runtime.load(folders[1], "new", ignore, replace_grace=1.0)
        assert (runtime.life, life.chain.ended) == (life, False)
        assert runtime.watch.state.phase == Phase.PHASE_SERVING
        assert life.chain.mailbox.command == layout.Command.RUN
        port.opening = None
        await runtime.load(folders[1], "new", ignore, replace_grace=1.0)
        assert runtime.life.model.name == "new"

    play(monkeypatch, scene)
