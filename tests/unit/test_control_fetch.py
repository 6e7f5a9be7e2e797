"""Fetching tokenizers takes neither the memory nor the threads that others need."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from blink_deploy import authority
from blink_proto import control_pb2
from blink_proto.control_pb2_grpc import ControlStub
from gpu_runtime.control import guard
from gpu_runtime.control.refused import RefusedCertificates
from gpu_runtime.control.service import FETCHES
from tests.doors import Doors, play_doors

TOKENIZER = {"tokenizer.json": bytes(range(256)) * (20 << 12), "chat_template.jinja": b"{{ messages }}"}
"""20 MiB and a little."""


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fetch") / "certs"
    authority.initialise(folder, [], 30)
    return folder


def play(
    patch: pytest.MonkeyPatch, scene: Callable[[Doors], Awaitable[None]], certificates: Path | None = None
) -> None:
    async def with_files(made: Doors) -> None:
        made.life.tokenizer = TOKENIZER
        await scene(made)

    play_doors(patch, with_files, certificates)


def fetch(channel: grpc.aio.Channel) -> Any:
    return ControlStub(channel).FetchTokenizer(control_pb2.FetchTokenizerRequest(model="tiny"))


async def whole(call: Any) -> dict[str, bytes]:
    parts: dict[str, list[bytes]] = {}
    async for chunk in call:
        parts.setdefault(chunk.file, []).append(chunk.content)
    return {name: b"".join(pieces) for name, pieces in parts.items()}


def test_callers_that_take_nothing(monkeypatch: pytest.MonkeyPatch, certificates: Path) -> None:
    """24 calls of one certificate hold little, and let others of it have their turn when their time is over."""
    monkeypatch.setattr(guard, "CALL_SECONDS", 3.0)

    async def scene(doors: Doors) -> None:
        before, began = psutil.Process().memory_info().rss, time.monotonic()
        calls = [fetch(doors.channel) for _ in range(24)]
        outcomes = [asyncio.ensure_future(call.read()) for call in calls]
        while sum(outcome.done() for outcome in outcomes) < FETCHES:
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)
        assert sum(outcome.done() for outcome in outcomes) == FETCHES
        grown = psutil.Process().memory_info().rss - before
        assert grown < 160 << 20, "both sides, of 480 MiB that were asked for"
        async with doors.connection("administrator") as another:
            assert (await ControlStub(another).ListModels(control_pb2.ListModelsRequest())).models[0].name == "tiny"
        while time.monotonic() < began + 3.2:
            await asyncio.sleep(0.05)
        async with doors.connection("front-end") as another:
            assert await whole(fetch(another)) == TOKENIZER, "no turn in its time would be an error"
        await asyncio.gather(*outcomes, return_exceptions=True)
        for call in calls:
            call.cancel()

    play(monkeypatch, scene, certificates)


def test_threads_that_hang_hold_no_front_end(
    monkeypatch: pytest.MonkeyPatch, certificates: Path, tmp_path: Path
) -> None:
    """All that the event loop has for everybody: keys are given and voided, and files taken up, without them."""
    monkeypatch.setattr("gpu_runtime.control.tls.LOOK_SECONDS", 0.05)
    path, free = tmp_path / "refused", threading.Event()
    path.write_text("")

    async def scene(doors: Doors) -> None:
        pool = ThreadPoolExecutor(1)
        asyncio.get_running_loop().set_default_executor(pool)
        pool.submit(free.wait)
        try:
            async with asyncio.timeout(10):
                await doors.open("a")
                await doors.open("a")
                assert [keys.revoked for keys in doors.registrar.given] == [True, False]
                async with doors.connection("administrator") as channel:
                    request = control_pb2.CloseSessionRequest(front_end="a")
                    assert (await ControlStub(channel).CloseSession(request)).freed
                refused = RefusedCertificates(str(path))
                path.write_text("CN=x\n")
                await refused.look()
                assert refused.has("CN=x", "")
                await doors.life.entrance.close()
                assert doors.registrar.closed
        finally:
            free.set()

    play(monkeypatch, scene, certificates)


def test_a_new_certificate_is_taken_up_though_threads_hang(
    monkeypatch: pytest.MonkeyPatch, certificates: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gpu_runtime.control.tls.LOOK_SECONDS", 0.05)
    free = threading.Event()

    async def scene(doors: Doors) -> None:
        pool = ThreadPoolExecutor(1)
        asyncio.get_running_loop().set_default_executor(pool)
        pool.submit(free.wait)
        try:
            (certificates / "server.pem").touch()
            said = ""
            async with asyncio.timeout(10):
                while "took up a new certificate" not in said:
                    await asyncio.sleep(0.05)
                    said += capsys.readouterr().err
        finally:
            free.set()

    play(monkeypatch, scene, certificates)
