"""Letting front ends in and shutting them out: slow devices hold nobody else up, and nothing is left half done."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from blink_proto import control_pb2
from gpu_runtime.control.sessions import REVOKE_SECONDS
from tests.doors import Doors, doors

PROMPT = 0.2


def play(patch: pytest.MonkeyPatch, scene: Callable[[Doors], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(60), doors(patch) as made:
            await scene(made)

    asyncio.run(run())


async def slowest_answer(doors: Doors, meanwhile: Awaitable[object]) -> float:
    """Seconds of the slowest of all checks and looks that were answered while something else was under way."""
    health, slowest, count = health_pb2_grpc.HealthStub(doors.channel), 0.0, 0
    work = asyncio.ensure_future(meanwhile)
    while not work.done():
        began = time.monotonic()
        await health.Check(health_pb2.HealthCheckRequest(service="tiny"), timeout=5)
        await doors.stub.GetServerInfo(control_pb2.GetServerInfoRequest(), timeout=5)
        await doors.stub.ListSessions(control_pb2.ListSessionsRequest(), timeout=5)
        slowest, count = max(slowest, time.monotonic() - began), count + 1
        await asyncio.sleep(0.01)
    await work
    assert count > 2
    return slowest


def test_a_slow_device_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it lets two front ends in, shuts one of them out to let it in again, and sweeps one away."""

    async def scene(doors: Doors) -> None:
        registrar, entrance = doors.registrar, doors.life.entrance
        registrar.registering, registrar.revoking = 0.4, 0.3

        async def both() -> None:
            opened = await asyncio.gather(doors.open("a"), doors.open("b"))
            assert sorted(one.channels[0] for one in opened) == [0, 1]

        assert await slowest_answer(doors, both()) < PROMPT
        assert await slowest_answer(doors, doors.open("a")) < PROMPT
        assert sorted(keys.revoked for keys in registrar.given) == [False, False, True]
        for session in entrance.sessions.all():
            session.opened -= 100
        assert await slowest_answer(doors, asyncio.gather(entrance.sweep(), entrance.sweep())) < PROMPT
        assert all(keys.revoked for keys in registrar.given)
        assert entrance.sessions.all() == []

    play(monkeypatch, scene)


def test_who_lives_is_noted_while_a_device_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a front end would seem silent for as long as others were let in."""

    async def scene(doors: Doors) -> None:
        await doors.open("a")
        (session,) = doors.life.sessions.all()
        doors.live(0)
        doors.registrar.registering = 0.5
        opening = asyncio.ensure_future(doors.open("b"))
        await asyncio.sleep(0.2)
        before = time.monotonic()
        await doors.life.entrance.sweep()
        assert session.lived is not None
        assert session.lived >= before
        assert not opening.done()
        await opening

    play(monkeypatch, scene)


def test_a_caller_that_goes_away_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time is over while the device works; and while it waits for its turn, when the device hears nothing of it."""

    async def scene(doors: Doors) -> None:
        registrar = doors.registrar
        registrar.registering = 0.5
        calls = [doors.open("a", 0.25), doors.open("b", 0.25)]
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await call
            assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await doors.until_idle()
        assert [keys.revoked for keys in registrar.given] == [True]
        assert doors.life.sessions.all() == []
        registrar.registering = 0.0
        assert list((await doors.open("c")).channels) == [0]

    play(monkeypatch, scene)


def test_a_front_end_keeps_its_channel_when_it_goes_away_in_the_midst(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a worker holds the lease. No key opens anything by then."""

    async def scene(doors: Doors) -> None:
        await doors.open("other")
        await doors.open("a")
        doors.live(1)
        doors.registrar.revoking = 0.4
        call = doors.open("a")
        await asyncio.sleep(0.2)
        call.cancel()
        await doors.until_idle()
        assert [keys.revoked for keys in doors.registrar.given] == [False, True, True]
        assert {session.front_end: session.channels for session in doors.life.sessions.all()} == {
            "other": (0,),
            "a": (1,),
        }
        doors.registrar.revoking = 0.0
        assert list((await doors.open("a")).channels) == [1]

    play(monkeypatch, scene)


def test_the_end_comes_after_what_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(doors: Doors) -> None:
        doors.registrar.registering = doors.registrar.revoking = 0.3
        opening = asyncio.ensure_future(doors.open("a"))
        await asyncio.sleep(0.1)
        late = asyncio.ensure_future(doors.open("b"))
        await asyncio.sleep(0.1)
        await doors.life.entrance.close()
        assert [keys.revoked for keys in doors.registrar.given] == [True]
        assert doors.registrar.closed
        assert list((await opening).channels) == [0]
        with pytest.raises(grpc.aio.AioRpcError, match="ending"):
            await late
        assert doors.life.sessions.all() == []

    play(monkeypatch, scene)


def test_a_device_that_fails_to_shut_one_out_does_not_keep_others_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked again at the next look."""

    async def scene(doors: Doors) -> None:
        entrance = doors.life.entrance
        for name in ("a", "b"):
            await doors.open(name)
        for session in doors.life.sessions.all():
            session.lived = time.monotonic() - REVOKE_SECONDS - 100
        stuck = doors.registrar.given[0]
        stuck.registrar = None  # type: ignore[assignment]
        await entrance.sweep()
        assert [session.front_end for session in doors.life.sessions.all()] == ["a"]
        stuck.registrar = doors.registrar
        await entrance.sweep()
        assert doors.life.sessions.all() == []
        assert [keys.revoked for keys in doors.registrar.given] == [True, True]

    play(monkeypatch, scene)
