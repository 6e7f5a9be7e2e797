"""Parts of the control plane by themselves: who may what, sessions, watchers, settings, secrets, the audit log."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest

from blink_proto import control_pb2, grpc_settings
from blink_proto.control_pb2 import Phase
from blink_proto.control_pb2_grpc import ControlServicer, ControlStub, add_ControlServicer_to_server
from blink_proto.dial import Dial, DialError
from blink_proto.grpc_settings import CLIENT_OPTIONS, SERVER_OPTIONS, is_local
from blink_proto.roles import Role, role_of
from blink_proto.secret import SecretBytes, SecretInt
from gpu_runtime.config import ConfigError
from gpu_runtime.control.audit import Audit, Entry
from gpu_runtime.control.caller import Caller
from gpu_runtime.control.errors import BadRequestError, ExhaustedError, TakenError
from gpu_runtime.control.server import Listen, check_listen
from gpu_runtime.control.sessions import REVOKE_SECONDS, Sessions
from gpu_runtime.control.tls import TlsFiles
from gpu_runtime.control.watch import MOST_WAITING, Watch
from gpu_runtime.shared_arena import ArenaLimits


@dataclass
class Given:
    """A registration that counts."""

    answer: bytes = b"blob-5533"
    revoked: int = 0

    def revoke(self) -> None:
        self.revoked += 1


@dataclass
class World:
    """Sessions over four channels, some of which are live."""

    live: set[int] = field(default_factory=set)
    given: list[Given] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sessions = Sessions(4, lambda channel: channel in self.live, 10.0)

    def open(self, name: str, count: int, owner: str = "") -> tuple[int, ...]:
        return asyncio.run(self.sessions.open(name, count, "shm", owner, self._register)).channels

    def sweep(self, now: float) -> None:
        asyncio.run(self.sessions.sweep(now))

    async def _register(self, channels: tuple[int, ...]) -> Given:
        self.given.append(Given())
        return self.given[-1]


def test_sessions_keep_and_give_back_channels() -> None:
    world = World()
    assert world.open("a", 2) == (0, 1)
    assert world.open("b", 1) == (2,)
    assert world.open("a", 2) == (0, 1)
    assert [one.revoked for one in world.given] == [1, 0, 0], "the earlier answer to the same name is void"
    assert world.open("a", 1) == (0,)
    assert world.sessions.free() == [1, 3]
    with pytest.raises(ExhaustedError, match="3 channels asked for, 2 of 4 are free"):
        world.open("c", 3)
    for name, count in (("", 1), ("x" * 129, 1), ("x", 0)):
        with pytest.raises(BadRequestError):
            world.open(name, count)


def test_a_session_ends_when_its_front_end_is_silent() -> None:
    world = World()
    world.open("dies", 2)
    world.open("never-came", 1)
    now = time.monotonic()
    world.live = {1}
    world.sweep(now + 100)  # one live channel is enough
    assert [session.front_end for session in world.sessions.all()] == ["dies"]
    assert world.given[1].revoked
    world.live = set()
    world.sweep(now + 100 + REVOKE_SECONDS)
    assert world.given[0].revoked, "what it was given goes before its channels do"
    assert world.sessions.free() == [2, 3]
    world.sweep(now + 100 + 2 * 10)
    assert world.sessions.free() == [0, 1, 2, 3]
    world.live = {0}  # it was only stopped, and goes on
    assert world.sessions.free() == [1, 2, 3]
    assert "blob" not in repr(world.sessions.all())


def test_a_name_belongs_to_its_certificate_while_it_lives() -> None:
    world = World()
    assert world.open("a", 1, "CN=one") == (0,)
    world.live = {0}
    assert world.open("a", 1, "CN=one") == (0,), "renewed certificates keep their subject"
    with pytest.raises(TakenError):
        world.open("a", 1, "CN=two")
    assert not world.given[1].revoked
    world.live = set()
    assert world.open("a", 1, "CN=two") == (0,)
    assert world.given[1].revoked


def test_a_slow_watcher_gets_the_latest_state_and_costs_little() -> None:
    async def main() -> None:
        watch = Watch()
        slow, quick = watch.follow(), watch.follow()
        assert (await anext(slow)).phase == Phase.PHASE_IDLE
        assert (await anext(quick)).phase == Phase.PHASE_IDLE
        for epoch in range(1, 11):
            watch.set(Phase.PHASE_SERVING, epoch)
        assert [(await anext(quick)).epoch for _ in range(10)] == list(range(1, 11)), "nothing is left out"
        for epoch in range(11, 10_000):
            watch.set(Phase.PHASE_SERVING, epoch)
        seen = [(await anext(slow)).epoch for _ in range(MOST_WAITING)]
        assert seen == list(range(10_000 - MOST_WAITING, 10_000))
        watch.set(Phase.PHASE_IDLE, 10_000)
        assert (await anext(slow)).epoch == 10_000
        await slow.aclose()  # type: ignore[attr-defined]
        await quick.aclose()  # type: ignore[attr-defined]
        assert not watch._watchers

    asyncio.run(main())


def test_addresses_that_only_this_machine_reaches() -> None:
    for address in ("127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "localhost:1", "unix:/run/blink", "dns:///localhost:1"):
        assert is_local(address), address
    for address in (
        "0.0.0.0:1",
        "[::]:1",
        "10.0.0.1:1",
        "gpu.example:1",
        ":1",
        "*:1",
        "127.0.0.1.example:1",
        "localhost",
    ):
        assert not is_local(address), address


def test_roles() -> None:
    for role in Role:
        assert role_of([role.uri]) is role
        assert role_of(["spiffe://else/x", role.uri, "https://a.example"]) is role
    for uris in ([], ["spiffe://blink/role/"], [Role.READER.uri.upper()], [Role.READER.uri, Role.FRONT_END.uri]):
        assert role_of(uris) is None


def test_dial_refuses_what_cannot_work(tmp_path: Path) -> None:
    Dial("127.0.0.1:1").check()
    Dial("10.0.0.1:1", insecure=True).check()
    (tmp_path / "broken.pem").write_text("-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----\n")
    broken = str(tmp_path / "broken.pem")
    for dial in (Dial("10.0.0.1:1"), Dial("127.0.0.1:1", ca="x"), Dial("h:1", broken, broken, broken)):
        with pytest.raises(DialError):
            dial.check()


def test_a_listener_is_checked_before_anything_starts(tmp_path: Path) -> None:
    absent = str(tmp_path / "absent.pem")
    for listen, words in (
        (Listen("[::]:0"), "--insecure"),
        (Listen("gpu.example:50051"), "--insecure"),
        (Listen("127.0.0.1:0", TlsFiles(absent, absent, absent)), "No such file"),
        (Listen("127.0.0.1:0", audit_log=str(tmp_path / "absent" / "log")), "No such file"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_listen(listen)
    assert check_listen(Listen("0.0.0.0:0", insecure=True))[0] is None


def test_client_pings_are_rarer_than_what_the_server_takes_for_abuse() -> None:
    assert grpc_settings.CLIENT_PING_MS >= 2 * grpc_settings.LEAST_PING_MS
    assert grpc_settings.SERVER_PING_MS > grpc_settings.SERVER_PING_TIMEOUT_MS


class Silent(ControlServicer):
    """Says one state and then nothing."""

    async def WatchState(
        self, request: control_pb2.WatchStateRequest, context: object
    ) -> AsyncIterator[control_pb2.State]:
        yield control_pb2.State(epoch=7)
        await asyncio.sleep(60)


def quicker(options: list[tuple[str, int]], times: int) -> list[tuple[str, int]]:
    """The same settings with all times divided."""
    return [(name, value // times if name.endswith("_ms") and value > 5000 else value) for name, value in options]


def test_an_idle_stream_lives_with_these_settings() -> None:
    """Twelve pings and more of the client, no GOAWAY: all times are a hundredth."""

    async def main() -> grpc.aio.AioRpcError:
        server = grpc.aio.server(options=quicker(SERVER_OPTIONS, 100))
        add_ControlServicer_to_server(Silent(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=quicker(CLIENT_OPTIONS, 100)) as channel:
                call = ControlStub(channel).WatchState(control_pb2.WatchStateRequest(), timeout=4)
                assert (await call.read()).epoch == 7
                with pytest.raises(grpc.aio.AioRpcError) as ended:
                    await call.read()
                return ended.value
        finally:
            await server.stop(None)

    ended = asyncio.run(main())
    assert ended.code() is grpc.StatusCode.DEADLINE_EXCEEDED, ended.details()


def test_calls_of_one_connection_are_bounded() -> None:
    async def main() -> int:
        server = grpc.aio.server(options=SERVER_OPTIONS)
        add_ControlServicer_to_server(Silent(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CLIENT_OPTIONS) as channel:
                stub, request = ControlStub(channel), control_pb2.WatchStateRequest()
                calls = [stub.WatchState(request, timeout=3) for _ in range(grpc_settings.MAX_STREAMS + 5)]
                reads = [asyncio.ensure_future(call.read()) for call in calls]
                done, waiting = await asyncio.wait(reads, timeout=1)
                for call in calls:
                    call.cancel()
                await asyncio.gather(*waiting, return_exceptions=True)
                return len(done)
        finally:
            await server.stop(None)

    assert asyncio.run(main()) == grpc_settings.MAX_STREAMS


def test_secrets_print_as_words() -> None:
    nonce, blob = SecretInt(77123456789), SecretBytes(b"rkey-991")
    for text in (repr(nonce), str(nonce), f"{nonce}", f"{nonce:x}", f"{[nonce]}", "%s" % nonce):  # noqa: UP031
        assert "redacted" in text
        assert "77123456789" not in text
    for text in (repr(blob), str(blob), f"{blob}", f"{(blob,)}"):
        assert "redacted" in text
        assert "991" not in text
    assert json.dumps(nonce) == "77123456789"
    assert (nonce, blob) == (77123456789, b"rkey-991")
    assert "77123456789" not in repr(ArenaLimits(nonce, 1, 2, 3, 4))


def test_messages_with_secrets_do_not_tell_them() -> None:
    """Wherever a message may get into a text: of its own, in others, in an exception."""
    request = control_pb2.OpenSessionRequest(front_end="dpu-7", transport="verbs", offer=b"rkey-991")
    answer = control_pb2.OpenSessionResponse(epoch=5, nonce=77123456789, transport_blob=b"blob-4711", channels=[3])
    for message, plain in ((request, "dpu-7"), (answer, "epoch: 5")):
        for text in (str(message), repr(message), f"{message}", f"{[message]}", str(ValueError(message))):
            assert plain in text
            assert "redacted" in text
            assert not [secret for secret in ("991", "77123456789", "4711") if secret in text]
    assert (request.offer, answer.nonce, answer.transport_blob) == (b"rkey-991", 77123456789, b"blob-4711")
    assert control_pb2.OpenSessionResponse.FromString(answer.SerializeToString()) == answer
    assert str(control_pb2.State(epoch=5)) == "epoch: 5\n", "others are as they were"


DUMP_SETTINGS = """
import ctypes, resource
from blink_proto.secret import forbid_core_dumps
before = resource.getrlimit(resource.RLIMIT_CORE)
forbid_core_dumps()
now = resource.getrlimit(resource.RLIMIT_CORE)
print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0), now == (0, 0), now == before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_no_core_files_and_no_looks_into_memory() -> None:
    def settings(**environment: str) -> list[str]:
        command = [sys.executable, "-c", DUMP_SETTINGS]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, env={**os.environ, **environment}
        ).stdout.split()

    assert settings(BLINK_CORE_DUMPS="")[:2] == ["0", "True"]
    kept = settings(BLINK_CORE_DUMPS="1")
    assert (kept[0], kept[2]) == ("1", "True")


def test_an_audit_file_that_cannot_be_written_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OSError, match="No such file"):
        Audit(str(tmp_path / "absent" / "log"))
    folder = tmp_path / "folder"
    folder.mkdir()
    audit = Audit(str(folder / "log"))
    (folder / "log").unlink()
    folder.rmdir()
    request = control_pb2.OpenSessionRequest(front_end="x" * 2000, transport="verbs")
    audit.write(Entry("OpenSession", Caller(True, Role.FRONT_END, "CN=a", "f0", "ipv4:1"), request), "OK")
    said = capsys.readouterr().err.splitlines()
    assert "cannot write the audit log" in said[0]
    line = json.loads(said[1])
    assert (line["role"], line["outcome"], len(line["request"]["front_end"])) == ("front-end", "OK", 512)
    assert set(line["request"]) == {"front_end", "channels", "transport"}, "nothing else of a request is told"
