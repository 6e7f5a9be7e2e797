"""Whoever opens calls without end keeps nobody else out: bounds on calls by caller, in all, and in time."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from blink_deploy import authority
from blink_proto import arena, control_pb2
from blink_proto.control_pb2_grpc import ControlStub
from blink_proto.grpc_settings import MAX_STREAMS
from blink_proto.roles import Role
from gpu_runtime.control import guard, server
from gpu_runtime.control.caller import Caller
from gpu_runtime.control.crowd import Crowd, Limits
from tests.doors import Doors, play_doors

CONNECTIONS, EACH = 17, 31
INFO = "/blink.control.v1.Control/GetServerInfo"
EXHAUSTED, LATE = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("crowd") / "certs"
    authority.initialise(folder, [], 30)
    return folder


async def begun(call: Any) -> str:
    """What a stream's first message says, or its error."""
    try:
        state = await call.read()
        return str(control_pb2.Phase.Name(state.phase))
    except grpc.aio.AioRpcError as error:
        return str(error.details()) if error.code() is EXHAUSTED else repr(error)


async def ask(channel: grpc.aio.Channel) -> None:
    await ControlStub(channel).GetServerInfo(control_pb2.GetServerInfoRequest(), timeout=5)


@pytest.mark.parametrize("secure", [True, False])
def test_streams_without_end(monkeypatch: pytest.MonkeyPatch, certificates: Path, secure: bool) -> None:
    """As many as 17 connections of a reader take; everybody else's calls, and its own questions, are answered."""
    limits, whose = Limits(), "certificate" if secure else "address"

    async def scene(doors: Doors) -> None:
        async with AsyncExitStack() as opened:
            readers = [await opened.enter_async_context(doors.connection("reader")) for _ in range(CONNECTIONS)]
            request = control_pb2.WatchStateRequest()
            calls = [ControlStub(reader).WatchState(request) for reader in readers for _ in range(EACH)]
            said = Counter(await asyncio.gather(*map(begun, calls)))
            assert said == {
                "PHASE_SERVING": limits.streams_of_one,
                f"this {whose} has {limits.streams_of_one} streams open, and may not have more": CONNECTIONS * EACH
                - limits.streams_of_one,
            }
            for name in ("administrator", "front-end", "reader"):
                async with doors.connection(name) as channel:
                    await ask(channel)
            await doors.open("a", 5)
            if secure:
                async with doors.connection("administrator") as channel:
                    assert await begun(ControlStub(channel).WatchState(request)) == "PHASE_SERVING"
            for call in calls:
                call.cancel()
        async with asyncio.timeout(5), doors.connection("reader") as channel:
            while await begun(ControlStub(channel).WatchState(request)) != "PHASE_SERVING":
                await asyncio.sleep(0.05)  # what was given up is free again

    play_doors(monkeypatch, scene, certificates if secure else None)


async def never() -> AsyncIterator[bytes]:
    await asyncio.sleep(60)
    yield b""


def test_calls_whose_request_never_comes(monkeypatch: pytest.MonkeyPatch, certificates: Path) -> None:
    """They count, and are ended; before, nobody would have been asked who they are of."""
    monkeypatch.setattr(guard, "REQUEST_SECONDS", 1.0)

    async def outcome(call: Any) -> tuple[grpc.StatusCode, str]:
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await call
        return ended.value.code(), str(ended.value.details())

    async def scene(doors: Doors) -> None:
        count = Limits().of_one + 40
        async with AsyncExitStack() as opened:
            readers = [
                await opened.enter_async_context(doors.connection("reader")) for _ in range(count // MAX_STREAMS + 1)
            ]
            asked = [reader.stream_unary(INFO, None, None) for reader in readers]
            calls = [asked[number // MAX_STREAMS](never()) for number in range(count)]
            waiting = asyncio.gather(*map(outcome, calls))
            async with doors.connection("administrator") as channel:
                await ask(channel)
            assert Counter(await waiting) == {
                (LATE, "the request did not come in time"): Limits().of_one,
                (EXHAUSTED, f"this certificate has {Limits().of_one} calls open, and may not have more"): 40,
            }
            await ask(readers[0])

    play_doors(monkeypatch, scene, certificates)


def test_a_call_without_a_deadline_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what it has begun is undone. A grace time that it names comes on top; streams go on."""
    monkeypatch.setattr(guard, "CALL_SECONDS", 0.4)

    async def scene(doors: Doors) -> None:
        states = doors.stub.WatchState(control_pb2.WatchStateRequest(every_milliseconds=100))
        await states.read()
        doors.registrar.registering = 1.2
        request = control_pb2.OpenSessionRequest(
            front_end="a", channels=1, transport="verbs", layout_hash=arena.LAYOUT_HASH, offer=b""
        )
        began = time.monotonic()
        with pytest.raises(grpc.aio.AioRpcError, match="longer than") as ended:
            await doors.stub.OpenSession(request)
        assert ended.value.code() is LATE
        assert 0.3 < time.monotonic() - began < 1.1
        await doors.until_idle()
        assert [keys.revoked for keys in doors.registrar.given] == [True]
        began = time.monotonic()
        monkeypatch.setattr(doors.life, "drain", lambda grace: asyncio.sleep(1.0, True))
        assert (await doors.stub.Drain(control_pb2.DrainRequest(grace_seconds=1))).drained
        assert time.monotonic() - began > 0.9
        assert (await states.read()).phase == control_pb2.PHASE_SERVING

    play_doors(monkeypatch, scene)


def test_calls_of_all_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """By gRPC itself, whatever the guard would say."""
    monkeypatch.setattr(server, "MAX_CALLS", 8)

    async def scene(doors: Doors) -> None:
        calls = [doors.stub.WatchState(control_pb2.WatchStateRequest(), timeout=20) for _ in range(10)]
        said = Counter(await asyncio.gather(*map(begun, calls)))
        assert said["PHASE_SERVING"] == 8
        assert sum(said.values()) == 10
        for call in calls:
            call.cancel()

    play_doors(monkeypatch, scene)


def caller(role: Role, certificate: str) -> Caller:
    return Caller(True, role, "CN=x", certificate, "ipv4:192.0.2.1:4711")


@contextmanager
def crowd_of(crowd: Crowd, callers: list[Caller]) -> Iterator[None]:
    """So many streams are open."""
    with ExitStack() as opened:
        for one in callers:
            opened.enter_context(crowd.inside(one, streams=True))
        yield


def test_room_for_administrators() -> None:
    """Others share less than all there is; each administrator has a bound too."""
    crowd = Crowd(Limits(of_one=3, streams_of_one=2, of_others=4))
    with crowd_of(crowd, [caller(Role.READER, "a")] * 2 + [caller(Role.FRONT_END, "b")] * 2):
        assert "for administrators" in str(crowd.full(caller(Role.READER, "c"), streams=False))
        assert crowd.full(caller(Role.ADMINISTRATOR, "d"), streams=True) is None
        with crowd_of(crowd, [caller(Role.ADMINISTRATOR, "d")] * 2):
            assert "2 streams" in str(crowd.full(caller(Role.ADMINISTRATOR, "d"), streams=True))
            assert crowd.full(caller(Role.ADMINISTRATOR, "d"), streams=False) is None
            assert crowd.full(caller(Role.ADMINISTRATOR, "e"), streams=True) is None
    assert crowd.full(caller(Role.READER, "c"), streams=False) is None
