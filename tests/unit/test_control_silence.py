"""Ends of the control plane that fall silent, and calls that are never answered, are noticed in the time that is set.

Times of keep-alive are a hundredth of the real ones, out of the real settings.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest

from blink_proto import control_pb2, dial
from blink_proto.control_pb2_grpc import ControlServicer, ControlStub, add_ControlServicer_to_server
from blink_proto.dial import Dial
from blink_proto.grpc_settings import CLIENT_OPTIONS, CLIENT_PING_MS, SERVER_OPTIONS, SERVER_PING_MS
from dpu_service import runtime_link
from dpu_service.runtime_link import RuntimeLink
from gpu_runtime.control import server
from tests.black_hole import black_hole
from tests.doors import doors

WATCH, OPEN, FETCH = "WatchState", "OpenSession", "FetchTokenizer"


def hundredth(options: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Of what is about pings."""
    return [(name, value // 100 if "keepalive_t" in name or "ping" in name else value) for name, value in options]


class Serving(ControlServicer):  # type: ignore[misc]
    """Counts calls; those of some names are never answered. Without any it serves no model, and is only watched."""

    def __init__(self, *silent: str) -> None:
        self.silent = silent
        self.calls: Counter[str] = Counter()

    async def _note(self, name: str) -> None:
        self.calls[name] += 1
        if name in self.silent:
            await asyncio.sleep(60)

    async def WatchState(self, request: Any, context: Any) -> AsyncIterator[control_pb2.State]:
        phase = control_pb2.PHASE_SERVING if self.silent else control_pb2.PHASE_IDLE
        yield control_pb2.State(phase=phase, epoch=1, life=1)
        await self._note(WATCH)
        await asyncio.sleep(60)

    async def OpenSession(self, request: Any, context: Any) -> control_pb2.OpenSessionResponse:
        await self._note(OPEN)
        return control_pb2.OpenSessionResponse(nonce=1, epoch=1, model=control_pb2.Model(name="tiny"))

    async def FetchTokenizer(self, request: Any, context: Any) -> AsyncIterator[control_pb2.FetchTokenizerChunk]:
        yield control_pb2.FetchTokenizerChunk(file="tokenizer.json", content=b"{}")
        await self._note(FETCH)


def play(serving: Serving, scene: Callable[[int], Awaitable[None]]) -> None:
    """With its port."""

    async def run() -> None:
        made = grpc.aio.server(options=hundredth(SERVER_OPTIONS))
        add_ControlServicer_to_server(serving, made)
        port = made.add_insecure_port("127.0.0.1:0")
        await made.start()
        try:
            await scene(port)
        finally:
            await made.stop(None)

    asyncio.run(run())


async def until(condition: Callable[[], bool]) -> float:
    """Seconds that it takes."""
    began = time.monotonic()
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)
    return time.monotonic() - began


async def linked(port: int, condition: Callable[[], bool]) -> None:
    """A front end's link, until something holds."""

    async def no_offer(worker: int) -> bytes:
        return b""

    link = RuntimeLink(Dial(f"127.0.0.1:{port}"), "a", 1, "shm", no_offer, lambda worker, session: None)
    following = asyncio.create_task(link.follow())
    try:
        await until(condition)
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


@pytest.mark.parametrize("silent", [OPEN, FETCH])
def test_a_front_end_gives_up_a_call_without_an_answer(monkeypatch: pytest.MonkeyPatch, silent: str) -> None:
    """And tries again."""
    monkeypatch.setattr(runtime_link, "CALL_SECONDS", 0.3)
    monkeypatch.setattr(runtime_link, "RETRY_SECONDS", 0.05)
    serving = Serving(silent)
    play(serving, lambda port: linked(port, lambda: serving.calls[silent] >= 2))


def test_a_front_end_watches_anew_after_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_link, "WATCH_SECONDS", 0.3)
    monkeypatch.setattr(runtime_link, "RETRY_SECONDS", 0.05)
    serving = Serving()
    play(serving, lambda port: linked(port, lambda: serving.calls[WATCH] >= 2))


def test_a_front_end_notices_a_runtime_that_fell_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though nothing tells it: no packet comes any more. It dials anew."""
    monkeypatch.setattr(dial, "CLIENT_OPTIONS", hundredth(CLIENT_OPTIONS))
    monkeypatch.setattr(runtime_link, "RETRY_SECONDS", 0.05)
    serving = Serving()

    async def scene(port: int) -> None:
        async with black_hole(port) as way:

            async def cut() -> None:
                await until(lambda: serving.calls[WATCH] == 1)
                await asyncio.sleep(2 * CLIENT_PING_MS / 100_000)
                assert serving.calls[WATCH] == 1, "it does not dial for nothing"
                way.swallow()

            cutting = asyncio.create_task(cut())
            await linked(way.port, lambda: serving.calls[WATCH] >= 2)
            await cutting

    play(serving, scene)


def test_a_runtime_notices_a_caller_that_fell_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its calls are over then, and count no longer."""
    monkeypatch.setattr(server, "SERVER_OPTIONS", hundredth(SERVER_OPTIONS))

    async def main() -> None:
        async with doors(monkeypatch) as made, black_hole(made.port) as way:
            running = made.server.guard._running
            async with grpc.aio.insecure_channel(f"127.0.0.1:{way.port}") as channel:
                states = ControlStub(channel).WatchState(control_pb2.WatchStateRequest())
                await states.read()
                await asyncio.sleep(2 * SERVER_PING_MS / 100_000)
                assert len(running) == 1, "who answers pings is let be"
                way.swallow()
                assert await until(lambda: not running) < 5
                states.cancel()

    asyncio.run(main())
