"""Administrators end sessions and shut certificates out; nothing of either is left open."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import pytest

from blink_deploy import authority
from blink_proto import control_pb2
from blink_proto.control_pb2_grpc import ControlStub
from blink_proto.roles import Role
from gpu_runtime.config import ConfigError
from gpu_runtime.control import entrance, server
from gpu_runtime.control.refused import ListError, RefusedCertificates
from gpu_runtime.control.server import Listen, check_listen
from tests.doors import Doors, doors

UNKNOWN_CALLER = grpc.StatusCode.UNAUTHENTICATED


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shut-out") / "certs"
    authority.initialise(folder, [], 30)
    authority.issue(folder, Role.FRONT_END, "dpu-a", 30)
    authority.issue(folder, Role.FRONT_END, "dpu-b", 30)
    return folder


def fingerprint(folder: Path, name: str) -> str:
    return next(one.fingerprint for one in authority.show(folder) if one.name == name)


def play(
    patch: pytest.MonkeyPatch, scene: Callable[[Doors], Awaitable[None]], certificates: Path, **options: str
) -> None:
    patch.setattr(server, "LOOK_SECONDS", 0.05)

    async def run() -> None:
        async with asyncio.timeout(60), doors(patch, certificates, **options) as made:
            await scene(made)

    asyncio.run(run())


async def open_by(doors: Doors, certificate: str, name: str) -> control_pb2.OpenSessionResponse:
    async with doors.connection(certificate) as doors.channel:
        opened: control_pb2.OpenSessionResponse = await doors.open(name)
        return opened


async def end(doors: Doors, name: str) -> control_pb2.CloseSessionResponse:
    async with doors.connection("administrator") as channel:
        request = control_pb2.CloseSessionRequest(front_end=name)
        ended: control_pb2.CloseSessionResponse = await ControlStub(channel).CloseSession(request, timeout=10)
        return ended


async def refused(call: Awaitable[object]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value.code(), str(error.value.details())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


def test_a_session_is_ended(monkeypatch: pytest.MonkeyPatch, certificates: Path) -> None:
    """Keys and lease at once, though its worker is there; others' are let be. It may come again."""

    async def scene(doors: Doors) -> None:
        await open_by(doors, "dpu-a", "a")
        await open_by(doors, "dpu-b", "b")
        for channel in (0, 1):
            doors.live(channel)
        assert (await end(doors, "a")).freed
        assert [keys.revoked for keys in doors.registrar.given] == [True, False]
        assert doors.life.sessions.free() == [0, 2, 3]
        assert [one.front_end for one in doors.life.list_sessions()] == ["b"]
        assert await refused(end(doors, "a")) == (
            grpc.StatusCode.NOT_FOUND,
            "no session of a front end named 'a'",
        )
        assert list((await open_by(doors, "dpu-b", "c")).channels) == [0]
        assert list((await open_by(doors, "dpu-a", "a")).channels) == [2]

    play(monkeypatch, scene, certificates)


def test_memory_of_this_machine_cannot_be_taken_away(monkeypatch: pytest.MonkeyPatch, certificates: Path) -> None:
    """Which is said, and nothing changes, while the front end lives."""

    async def scene(doors: Doors) -> None:
        await open_by(doors, "dpu-a", "a")
        doors.live(0)
        code, words = await refused(end(doors, "a"))
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert "until its process ends" in words
        assert not doors.registrar.given[0].revoked
        assert [one.front_end for one in doors.life.list_sessions()] == ["a"]
        doors.live(0, 0)
        assert (await end(doors, "a")).freed
        assert doors.life.sessions.free() == [0, 1, 2, 3]

    play(monkeypatch, scene, certificates, transport="shm")


@pytest.mark.parametrize("by", ["subject", "fingerprint"])
def test_a_certificate_is_shut_out(
    monkeypatch: pytest.MonkeyPatch, certificates: Path, tmp_path: Path, by: str
) -> None:
    """Its calls, those that are open too, and its sessions; until the file lets it in again."""
    path = tmp_path / "refused"
    path.write_text("# nobody\n\n")

    async def scene(doors: Doors) -> None:
        await open_by(doors, "dpu-b", "b")
        await open_by(doors, "dpu-a", "a")
        for channel in (0, 1):
            doors.live(channel)
        async with doors.connection("dpu-a") as channel, doors.connection("dpu-b") as other:
            stubs, watch = [ControlStub(channel), ControlStub(other)], control_pb2.WatchStateRequest()
            states = [stub.WatchState(watch) for stub in stubs]
            for each in states:
                await each.read()
            doors.registrar.registering = 0.5
            doors.channel = channel
            opening = asyncio.ensure_future(refused(doors.open("a2")))
            await asyncio.sleep(0.2)
            line = {"subject": "CN=blink dpu-a", "fingerprint": fingerprint(certificates, "dpu-a").upper()}[by]
            path.write_text(f"# lost in transport\n{line}\n")
            for call in (states[0].read(), opening):
                found = await (call if call is opening else refused(call))
                assert found == (UNKNOWN_CALLER, "this certificate is refused by this runtime")
            assert (await refused(doors.open("a")))[0] is UNKNOWN_CALLER
            info = control_pb2.GetServerInfoRequest()
            assert (await refused(stubs[0].GetServerInfo(info, timeout=5)))[0] is UNKNOWN_CALLER
            await until(lambda: [one.front_end for one in doors.life.list_sessions()] == ["b"])
            await doors.until_idle()
            assert [keys.revoked for keys in doors.registrar.given] == [False, True, True]
            assert doors.life.sessions.free() == [1, 2, 3]
            doors.registrar.registering = 0.0
            await stubs[1].GetServerInfo(info, timeout=5)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(states[1].read(), 0.2)  # nothing new, and not its end
            path.write_text("")
            await until(
                lambda: not doors.server.guard._refused.has("CN=blink dpu-a", fingerprint(certificates, "dpu-a"))
            )
            doors.channel = channel
            await doors.open("a")

    play(monkeypatch, scene, certificates, refused=str(path))


def test_a_renewed_certificate(certificates: Path, tmp_path: Path) -> None:
    """Is refused like the one before by its subject, and is another one by its fingerprint."""
    path = tmp_path / "refused"
    path.write_text(f"{fingerprint(certificates, 'dpu-a')}\nCN=blink dpu-b\n")
    found = RefusedCertificates(str(path))
    assert found.has("CN=blink dpu-a", fingerprint(certificates, "dpu-a"))
    assert not found.has("CN=blink dpu-a", "0" * 64)
    assert found.has("CN=blink dpu-b", "0" * 64)
    assert not RefusedCertificates().has("", "")


def test_a_subject_as_it_is_and_as_the_audit_log_tells_it(tmp_path: Path) -> None:
    """The log's lines are JSON: a comma that belongs to a name has one backslash here and two there."""
    path = tmp_path / "list"
    path.write_text('O=Plain\\, Inc.,CN=a\n"O=Example\\\\, Inc.,CN=\\u00e9"\n')
    found = RefusedCertificates(str(path))
    assert found.has("O=Plain\\, Inc.,CN=a", "")
    assert found.has("O=Example\\, Inc.,CN=é", "")
    assert not found.has("O=Example\\\\, Inc.,CN=é", "")
    path.write_text('"O=Example, no end\n')
    with pytest.raises(ListError, match="line 1"):
        RefusedCertificates(str(path))


def test_lists_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused at start; later the old one holds, and that is said once."""
    path = tmp_path / "refused"
    with pytest.raises(ListError, match="No such file"):
        RefusedCertificates(str(path))
    path.write_text("ab:" * 31 + "ab\n\ndpu-a\n")
    with pytest.raises(ListError, match="line 3: neither"):
        RefusedCertificates(str(path))
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ListError, match="no text"):
        RefusedCertificates(str(path))
    with pytest.raises(ConfigError, match="needs TLS"):
        check_listen(Listen("127.0.0.1:0", refused_certificates=str(path)))
    path.write_text(":".join(["AB"] * 32))
    found = RefusedCertificates(str(path))
    assert found.has("CN=x", "ab" * 32)

    async def look(times: int) -> None:
        for _ in range(times):
            await found.look()

    path.write_text("nonsense")
    asyncio.run(look(3))
    os.remove(path)
    asyncio.run(look(3))
    assert found.has("CN=x", "ab" * 32)
    said = capsys.readouterr().err.splitlines()
    assert ["kept the old list" in line for line in said] == [True, True]
    path.write_text("CN=y\n")
    asyncio.run(look(3))
    assert (found.has("CN=x", "ab" * 32), found.has("CN=y", "cd" * 32)) == (False, True)


def test_a_device_that_hangs_does_not_keep_calls_open(
    monkeypatch: pytest.MonkeyPatch, certificates: Path, tmp_path: Path
) -> None:
    """While it voids one session, another certificate is refused: its calls end at once, and its session later."""
    path = tmp_path / "refused"
    path.write_text("")

    async def scene(doors: Doors) -> None:
        for certificate, name in (("dpu-a", "a"), ("dpu-b", "b")):
            await open_by(doors, certificate, name)
        async with doors.connection("dpu-b") as channel:
            states = ControlStub(channel).WatchState(control_pb2.WatchStateRequest())
            await states.read()
            doors.registrar.revoking = 2.0
            path.write_text("CN=blink dpu-a\n")
            await until(doors.registrar.busy.is_set)
            path.write_text("CN=blink dpu-a\nCN=blink dpu-b\n")
            async with asyncio.timeout(1.6):
                assert (await refused(states.read()))[0] is UNKNOWN_CALLER
            assert [keys.revoked for keys in doors.registrar.given] == [False, False]
            doors.registrar.revoking = 0.0
            await until(lambda: doors.life.list_sessions() == [])
            assert [keys.revoked for keys in doors.registrar.given] == [True, True]

    play(monkeypatch, scene, certificates, refused=str(path))


def test_a_list_is_followed_though_nothing_can_be_said(
    monkeypatch: pytest.MonkeyPatch, certificates: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Standard error may be gone."""
    path = tmp_path / "refused"
    path.write_text("")

    def gone(text: str) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("gpu_runtime.control.refused.say", gone)

    async def scene(doors: Doors) -> None:
        await open_by(doors, "dpu-a", "a")
        for line in ("CN=nobody\n", "CN=blink dpu-a\n"):
            path.write_text(line)
            await asyncio.sleep(0.3)
        await until(lambda: doors.life.list_sessions() == [])
        assert caplog.text.count("Broken pipe") >= 1

    play(monkeypatch, scene, certificates, refused=str(path))


def test_leases_that_only_the_device_can_end_are_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, certificates: Path
) -> None:
    """Where front ends write into a CUDA device's memory alone: the answer is that its time must pass."""

    async def scene(doors: Doors) -> None:
        await open_by(doors, "dpu-a", "a")
        doors.live(0)
        monkeypatch.setattr(doors.life.entrance, "_memory", object())
        monkeypatch.setattr(entrance, "GIVE_UP_SECONDS", 5.0)
        began = time.monotonic()
        assert not (await end(doors, "a")).freed
        assert time.monotonic() - began < 3.0
        assert doors.registrar.given[0].revoked

    play(monkeypatch, scene, certificates)
