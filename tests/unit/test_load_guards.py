"""What a load must find out before the model that serves is dropped, and what it must not leave behind.

Chains are processes that compute nothing (`tests/standin/idle.py`).
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from blink_proto import adapters, arena, control_pb2
from blink_proto.control_pb2 import Phase
from blink_proto.control_pb2_grpc import ControlStub
from blink_proto.rdma.binding import RdmaError
from gpu_runtime import shared_arena
from gpu_runtime.chain.process import Progress
from gpu_runtime.control import patience
from gpu_runtime.control import runtime as runtime_module
from gpu_runtime.control.errors import BadRequestError, ExhaustedError, NotReadyError, StalledError
from gpu_runtime.control.prepare import Prepared, prepare
from gpu_runtime.control.runtime import Runtime
from gpu_runtime.control.server import Listen, start_server
from gpu_runtime.control.service import ControlService
from gpu_runtime.model.errors import ModelError
from gpu_runtime.registration import verbs
from gpu_runtime.scheduler import layout
from gpu_runtime.shared_arena import ArenaLimits, SharedArena
from tests.lives import ignore, play_lives
from tests.standin.idle import NEVER_READY
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

    play_lives(monkeypatch, scene, transports=("shm", "verbs"), rdma_address="192.0.2.1")


def test_a_port_that_goes_down_while_the_old_model_drains(
    monkeypatch: pytest.MonkeyPatch, port: Port, folders: tuple[str, str]
) -> None:
    """That may take an hour. Then the old one takes submissions again."""

    async def scene(runtime: Runtime) -> None:
        await runtime.load(folders[0], "old", ignore)
        life, drain = runtime.life, runtime.life.drain

        async def drain_slowly(grace_seconds: float) -> bool:
            drained = await drain(grace_seconds)
            port.up = False
            return drained

        monkeypatch.setattr(life, "drain", drain_slowly)
        with pytest.raises(NotReadyError, match="port of standin0 is not active"):
            await runtime.load(folders[1], "new", ignore, replace_grace=5.0)
        assert serves(runtime, "old", 1)
        assert (runtime.life, life.chain.mailbox.command) == (life, layout.Command.RUN)
        await runtime.unload("old", 0.0)
        assert runtime.models() == []

    play_lives(monkeypatch, scene, transports=("shm", "verbs"), rdma_address="192.0.2.1")


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

    play_lives(monkeypatch, scene)


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
    play_lives(monkeypatch, scene)


def test_a_load_that_hangs_is_given_up(
    monkeypatch: pytest.MonkeyPatch, folders: tuple[str, str], tmp_path: Path
) -> None:
    """Be it in a thread that does not return, or in a chain that does not start: others can load afterwards."""
    stuck = threading.Event()

    def hang(*arguments: object, **named: object) -> None:
        stuck.wait(60)

    async def scene(runtime: Runtime) -> None:
        await runtime.load(folders[0], "old", ignore)
        with monkeypatch.context() as patch:
            patch.setattr(patience, "STALL_SECONDS", 0.3)
            for place in ("resolve_model", "prepare"):
                with monkeypatch.context() as inner:
                    inner.setattr(runtime_module, place, hang)
                    with pytest.raises(StalledError, match="nothing was heard of it for 0 s"):
                        await runtime.load(folders[1], "new", ignore, replace_grace=0.0)
                assert serves(runtime, "old", 1)
        await runtime.load(folders[1], "new", ignore, replace_grace=0.0)
        assert serves(runtime, "new", 2)
        monkeypatch.setattr(patience, "STALL_SECONDS", 3.0)
        monkeypatch.setenv(NEVER_READY, "1")
        with pytest.raises(StalledError, match="the last being: starting the chain"):
            await runtime.load(folders[0], "stuck", ignore, replace_grace=0.0)
        assert (runtime.watch.state.phase, runtime.models()) == (Phase.PHASE_IDLE, [])
        assert "stuck: the load was given up" in runtime.watch.state.detail
        monkeypatch.delenv(NEVER_READY)
        await runtime.load(folders[0], "again", ignore)
        assert serves(runtime, "again", 4)

    began = time.monotonic()
    play_lives(monkeypatch, scene)
    assert time.monotonic() - began < 40, "nobody waits for the threads"
    stuck.set()


def test_a_load_outlives_its_callers_deadline(monkeypatch: pytest.MonkeyPatch, folders: tuple[str, str]) -> None:
    """Others are refused until it has ended, and no longer; the same request joins it."""
    go_on = threading.Event()

    def slow(*arguments: Any) -> Prepared:
        go_on.wait(30)
        return prepare(*arguments)

    async def scene(runtime: Runtime) -> None:
        server = await start_server(runtime, Listen("127.0.0.1:0"))
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            stub: Any = ControlStub(channel)

            async def load(index: int, seconds: float) -> list[control_pb2.LoadModelProgress]:
                request = control_pb2.LoadModelRequest(source=folders[index], name="ab"[index], replace=True)
                return [step async for step in stub.LoadModel(request, timeout=seconds)]

            monkeypatch.setattr(runtime_module, "prepare", slow)
            for index, status in ((0, "DEADLINE_EXCEEDED"), (1, "FAILED_PRECONDITION"), (0, "DEADLINE_EXCEEDED")):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await load(index, 1.0)
                assert refused.value.code().name == status
            go_on.set()
            assert (await load(0, 20))[-1].model.name == "a"
            assert serves(runtime, "a", 1)
            assert (await load(1, 20))[-1].model.name == "b"
        await server.stop()

    play_lives(monkeypatch, scene)


@pytest.mark.parametrize("waits", [True, False])
def test_a_failed_load_is_told_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path, waits: bool
) -> None:
    """To its caller; to the operator when that has gone."""
    go_on = threading.Event()

    def fail(*arguments: Any, **named: Any) -> None:
        go_on.wait(30)
        raise ModelError("it is broken")

    async def scene(runtime: Runtime) -> None:
        service, said = ControlService(runtime), ""
        load = service._begin(control_pb2.LoadModelRequest(source=str(tmp_path), name="a"))
        load.callers += waits
        go_on.set()
        await asyncio.wait([load.task])
        await asyncio.sleep(0)
        said = capfd.readouterr().err
        assert ("a model was not loaded: it is broken" in said) is not waits

    monkeypatch.setattr(runtime_module, "resolve_model", fail)
    play_lives(monkeypatch, scene)


def test_work_that_moves_may_take_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "STALL_SECONDS", 0.4)
    told: list[int] = []

    async def work(progress: Progress) -> str:
        for done in range(6):
            await asyncio.sleep(0.15)
            progress(done, 6, "counting")
        return "done"

    assert asyncio.run(patience.while_it_moves(work, lambda done, total, what: told.append(done))) == "done"
    assert told == list(range(6))


def test_nobody_waits_for_an_unload_that_was_abandoned(
    monkeypatch: pytest.MonkeyPatch, folders: tuple[str, str]
) -> None:
    """It goes on to its end, says so, and lets others load; in the meantime they are told that it is under way."""

    async def scene(runtime: Runtime) -> None:
        await runtime.load(folders[0], "old", ignore)
        chain = runtime.life.chain
        unloading = asyncio.create_task(runtime.unload("old", 5.0))
        while runtime.watch.state.phase != Phase.PHASE_DRAINING:
            await asyncio.sleep(0)
        unloading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await unloading
        with pytest.raises(NotReadyError, match="under way"):
            await runtime.load(folders[1], "new", ignore)
        while runtime.watch.state.phase != Phase.PHASE_IDLE:
            await asyncio.sleep(0.01)
        assert chain.ended
        await runtime.load(folders[1], "new", ignore)
        assert serves(runtime, "new", 2)

    play_lives(monkeypatch, scene)


def test_sizes_without_end_are_refused_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """However the load ends, later ones are not refused for it."""
    folder = save_tiny(tmp_path / "endless", "llama")
    sound = json.loads((folder / "config.json").read_text())

    async def scene(runtime: Runtime) -> None:
        for key in ("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads"):
            (folder / "config.json").write_text(json.dumps(sound | {key: 10**9}))
            with pytest.raises(BadRequestError, match=f"{key} is 1000000000, at most"):
                await asyncio.wait_for(runtime.load(str(folder), "endless", ignore), 5)
        (folder / "config.json").write_text(json.dumps(sound))
        await runtime.load(str(folder), "sound", ignore)
        assert serves(runtime, "sound", 1)

    play_lives(monkeypatch, scene)
