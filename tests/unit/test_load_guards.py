"""What a load must find out before the model that serves is dropped, and what it must not leave behind.

Chains are processes that compute nothing (`tests/standin/idle.py`).
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from blink_proto import adapters, arena
from blink_proto.control_pb2 import Phase
from blink_proto.rdma.binding import RdmaError
from gpu_runtime import shared_arena
from gpu_runtime.chain import process
from gpu_runtime.config import make_config
from gpu_runtime.control.errors import ExhaustedError, NotReadyError
from gpu_runtime.control.runtime import Runtime
from gpu_runtime.registration import verbs
from gpu_runtime.shared_arena import ArenaLimits, SharedArena
from tests.tiny import save_tiny

SIZES = arena.Sizes(channels=1, submit_slots=4, cancel_slots=4, log_slots=8, heap_tokens=1 << 12)


class Port:
    """An RDMA device that can be opened while it is up."""

    name, binding, no_windows = "standin0", "standin", ""

    def __init__(self) -> None:
        self.up, self.open = True, 0

    def __call__(self, *choice: object) -> Port:
        if not self.up:
            raise RdmaError("the port of standin0 is not active")
        self.open += 1
        return self

    def close(self) -> None:
        self.open -= 1


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[Port]:
    made = Port()
    for module in (verbs, adapters):
        monkeypatch.setattr(module, "open_device", made)
    yield made
    assert made.open == 0


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Two models."""
    made = [save_tiny(tmp_path_factory.mktemp(family), family) for family in ("llama", "qwen2")]
    return str(made[0]), str(made[1])


def ignore(done: int, total: int, what: str) -> None:
    """Progress that nobody watches."""


def play(monkeypatch: pytest.MonkeyPatch, scene: Callable[[Runtime], Awaitable[None]], **choices: Any) -> None:
    """A runtime over chains that are not there, until the end of the scene."""
    monkeypatch.setitem(process._MODULES, "cpu", "tests.standin.idle")

    async def run() -> None:
        runtime = Runtime(make_config("cpu", channels=1, kv_tokens=64, **choices))
        try:
            await scene(runtime)
        finally:
            await runtime.close(0.0)

    asyncio.run(run())


def serves(runtime: Runtime, name: str, epoch: int) -> bool:
    state = runtime.watch.state
    assert not runtime.life.chain.ended
    return (state.phase, state.model, state.epoch) == (Phase.PHASE_SERVING, name, epoch)


def test_a_port_that_is_down_does_not_cost_the_model_that_serves(
    monkeypatch: pytest.MonkeyPatch, port: Port, folders: tuple[str, str]
) -> None:
    async def scene(runtime: Runtime) -> None:
        await runtime.load(folders[0], "old", ignore)
        chain = runtime.life.chain
        port.up = False
        with pytest.raises(NotReadyError, match="port of standin0 is not active"):
            await runtime.load(folders[1], "new", ignore, replace_grace=0.0)
        assert serves(runtime, "old", 1)
        assert (runtime.life.chain, port.open) == (chain, 1)
        assert (await runtime.load(folders[0], "old", ignore)).name == "old", "what is there needs nothing"
        port.up = True
        await runtime.load(folders[1], "new", ignore, replace_grace=0.0)
        assert serves(runtime, "new", 2)
        assert chain.ended

    play(monkeypatch, scene, transports=("shm", "verbs"), rdma_address="192.0.2.1")


def test_a_full_shared_memory_does_not_cost_the_model_that_serves(
    monkeypatch: pytest.MonkeyPatch, folders: tuple[str, str]
) -> None:
    async def scene(runtime: Runtime) -> None:
        await runtime.load(folders[0], "old", ignore)
        full = SimpleNamespace(f_bavail=3, f_frsize=1 << 18)
        with monkeypatch.context() as patch:
            patch.setattr(os, "statvfs", lambda path: full)
            with pytest.raises(ExhaustedError, match=r"/dev/shm has 0 MiB left, and an arena takes \d+ MiB"):
                await runtime.load(folders[1], "new", ignore, replace_grace=0.0)
        assert serves(runtime, "old", 1)

    play(monkeypatch, scene)


def test_an_arena_that_cannot_be_made_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, folders: tuple[str, str], tmp_path: Path
) -> None:
    """Neither its first file nor its second, nor their descriptors; with room there is one again."""
    allocate, calls = os.posix_fallocate, []

    def refuse(descriptor: int, offset: int, size: int) -> None:
        calls.append(descriptor)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(descriptor, offset, size)

    async def scene(runtime: Runtime) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", refuse)
            with pytest.raises(ExhaustedError, match="No space left"):
                await runtime.load(folders[0], "first", ignore)
        assert list(tmp_path.iterdir()) == []
        for descriptor in calls:
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(descriptor)
        assert (runtime.watch.state.phase, runtime.models()) == (Phase.PHASE_IDLE, [])
        made = SharedArena.create(SIZES, ArenaLimits(1, 1, 10, 10, 10))
        assert len(list(tmp_path.iterdir())) == 2
        made.unlink()

    monkeypatch.setattr(shared_arena, "SHM_FOLDER", tmp_path)
    play(monkeypatch, scene)
