"""The control plane over TLS: certificates that change, both programs together, and what never shows anywhere."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import httpx
import psutil
import pytest

from blink_deploy import authority
from blink_proto import arena, control_pb2
from tests.control import FRONT_END, READER, SecureRuntime, ctl, make_certificates, secure_runtime
from tests.front_end import ready_line


def eventually(true: Callable[[], bool], seconds: float = 15) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.05)


@contextmanager
def secured_front_end(
    runtime: SecureRuntime, folder: Path, *flags: str, role: str = FRONT_END
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A `blink-dpu` with one worker, its log in a file."""
    folder.mkdir(exist_ok=True)
    log = folder / "front-end.log"
    command = [sys.executable, "-m", "dpu_service.main", "--https", "off", "--http", "127.0.0.1:0", "--workers", "1"]
    command += ["--data-dir", str(folder), "--log-level", "debug", *runtime.front_end_flags(role), *flags]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=output)
    try:
        yield process, log
    finally:
        children = psutil.Process(process.pid).children() if process.poll() is None else []
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGINT)
            process.wait(15)
        for child in children:
            if child.is_running():
                child.kill()


def test_new_certificates_are_taken_up_and_bad_ones_are_not(tmp_path: Path) -> None:
    """The server's pair and its authorities, in one process, while a stream goes on."""
    certificates, other = make_certificates(tmp_path / "certs"), make_certificates(tmp_path / "other")
    with secure_runtime(certificates, tmp_path) as runtime:
        first = runtime.shown_certificate()
        states = runtime.stub(READER).WatchState(control_pb2.WatchStateRequest(), timeout=60)
        assert next(states).phase == control_pb2.PHASE_IDLE

        shutil.copy(other / "server.pem", certificates / "server.pem")  # its key does not come with it
        eventually(lambda: "kept the old certificate" in runtime.log.read_text())
        assert runtime.shown_certificate() == first
        authority.renew(certificates, [], 30, ["server"])
        eventually(lambda: runtime.shown_certificate() != first)
        second = runtime.shown_certificate()
        (certificates / "server-key.pem").unlink()
        eventually(lambda: runtime.log.read_text().count("kept the old certificate") >= 2)
        assert runtime.shown_certificate() == second
        authority.renew(certificates, [], 30, ["server"])
        eventually(lambda: runtime.shown_certificate() not in (first, second))

        # From now on the runtime believes another authority; its own certificate is still signed by the first.
        shutil.copy(certificates / "ca.pem", tmp_path / "first-ca.pem")
        shutil.copy(other / "ca.pem", certificates / "ca.pem")
        eventually(lambda: runtime.log.read_text().count("took up a new certificate") >= 3)
        told = ["--runtime", runtime.address, "--ca", str(tmp_path / "first-ca.pem")]
        old = ["--cert", str(certificates / "reader.pem"), "--key", str(certificates / "reader-key.pem")]
        new = ["--cert", str(other / "reader.pem"), "--key", str(other / "reader-key.pem")]
        assert "cannot reach" in ctl(*told, *old, "status", status=3).stderr
        assert "idle" in ctl(*told, *new, "status").stdout
        runtime.process.send_signal(signal.SIGTERM)
        assert runtime.process.wait(20) == 0
        with pytest.raises(grpc.RpcError):  # the old stream lived until the end
            next(states)


def run_gpu(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gpu_runtime.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_plain_text_stays_on_this_machine(tmp_path: Path) -> None:
    certificates = make_certificates(tmp_path / "certs")
    server = ["--tls-cert", str(certificates / "server.pem"), "--tls-key", str(certificates / "server-key.pem")]
    wrong_key = ["--tls-cert", str(certificates / "server.pem"), "--tls-key", str(certificates / "reader-key.pem")]
    ca = ["--client-ca", str(certificates / "ca.pem")]
    for arguments, words in (
        (["--listen", "0.0.0.0:0"], "--insecure"),
        (server, "go together"),
        ([*wrong_key, *ca], "key values mismatch"),
    ):
        ran = run_gpu(*arguments)
        assert ran.returncode == 2, ran.stderr
        assert words in ran.stderr
        assert "Traceback" not in ran.stderr
    for flags, words in (
        (["--runtime", "10.0.0.9:1"], "--runtime-insecure"),
        (["--runtime-ca", "/absent", "--runtime-cert", "/absent", "--runtime-key", "/absent"], "No such file"),
    ):
        command = [sys.executable, "-m", "dpu_service.main", "--https", "off", *flags]
        started = subprocess.run(
            command, capture_output=True, text=True, timeout=60, env={**os.environ, "COLUMNS": "300"}
        )
        assert started.returncode == 2, started.stderr
        assert words in started.stderr
    assert "declared insecure" in ctl("--runtime", "10.0.0.9:1", "status", status=2).stderr
    assert "No such file" in ctl("--certs", str(tmp_path / "absent"), "status", status=2).stderr


def test_insecure_is_possible_when_it_is_said() -> None:
    """And then everybody may administer, as on the loopback."""
    command = [sys.executable, "-m", "gpu_runtime.main", "--listen", "0.0.0.0:0", "--insecure", "--ready-fd", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        port = process.stdout.readline().split()[1]
        ran = ctl("--runtime", f"127.0.0.1:{port}", "drain", status=1)
        assert "FAILED_PRECONDITION" in ran.stderr
    finally:
        process.terminate()
        assert process.wait(20) == 0


def test_both_programs_together(tiny_model: Path, tmp_path: Path) -> None:
    """A completion, a reader's certificate in a front end's place, and sessions that end when their front end dies."""
    certificates = make_certificates(tmp_path / "certs")
    arguments = ("--model", str(tiny_model), "--name", "tiny", "--lease-timeout", "1", "--channels", "2")
    with secure_runtime(certificates, tmp_path, *arguments) as runtime:
        with secured_front_end(runtime, tmp_path / "wrong", role=READER) as (_, log):
            eventually(lambda: "PERMISSION_DENIED: OpenSession is not for the role reader" in log.read_text())
        with secured_front_end(runtime, tmp_path / "right", "--name", "dpu-a") as (process, log):
            (url,) = ready_line(process, log)
            body = {"model": "tiny", "prompt": "hello", "max_tokens": 4}
            assert httpx.post(f"{url}/v1/completions", json=body, timeout=30).status_code == 200
            (session,) = json.loads(runtime.ctl("--output", "json", "sessions", role=READER).stdout)
            assert (session["front_end"], session["transport"]) == ("dpu-a/0", "shm")
            assert [channel["live"] for channel in session["channels"]] == [True]
            assert "1 of 1" in runtime.ctl("sessions").stdout
            assert "1 of 2" in runtime.ctl("status").stdout
            for child in [psutil.Process(process.pid), *psutil.Process(process.pid).children()]:
                child.kill()
            process.wait()
            eventually(lambda: "2 of 2" in runtime.ctl("status").stdout)
            assert json.loads(runtime.ctl("--output", "json", "sessions").stdout) == []
        with secured_front_end(runtime, tmp_path / "again", "--name", "dpu-b", "--workers", "2") as (process, log):
            (url,) = ready_line(process, log)
            assert httpx.post(f"{url}/v1/completions", json=body, timeout=30).status_code == 200


def open_session(runtime: SecureRuntime) -> control_pb2.OpenSessionResponse:
    request = control_pb2.OpenSessionRequest(
        front_end="planted", channels=1, transport="shm", layout_hash=arena.LAYOUT_HASH
    )
    return runtime.stub(FRONT_END).OpenSession(request, timeout=10)


def test_what_is_secret_shows_nowhere(tiny_model: Path, tmp_path: Path) -> None:
    """Nonce, names of the arena's memory, keys, and an offer: not in logs, audit, errors, metrics or blinkctl's
    answers, and every process that holds them leaves no core file.
    """
    certificates = make_certificates(tmp_path / "certs")
    audit, offer = tmp_path / "audit.log", b"planted-offer-7391"
    arguments = ("--model", str(tiny_model), "--name", "tiny", "--audit-log", str(audit))
    said: list[str] = []
    with secure_runtime(certificates, tmp_path, *arguments) as runtime:
        opened = open_session(runtime)
        names = json.loads(opened.transport_blob)
        keys = [path.read_text().splitlines()[1] for path in certificates.glob("*-key.pem")]
        secrets = [*keys, offer.decode(), *(re.sub(r"^/|-(in|out)$", "", name) for name in names.values())]
        secrets += [str(opened.nonce), f"{opened.nonce:x}"]
        with secured_front_end(runtime, tmp_path / "front") as (process, log):
            (url,) = ready_line(process, log)
            body = {"model": "tiny", "prompt": "hello", "max_tokens": 4}
            assert httpx.post(f"{url}/v1/completions", json=body, timeout=30).status_code == 200
            for changes in ({"transport": "pigeon"}, {"channels": 99}, {"layout_hash": 1}, {"front_end": ""}, {}):
                fields = {"front_end": "x", "channels": 1, "transport": "shm", "layout_hash": arena.LAYOUT_HASH}
                request = control_pb2.OpenSessionRequest(**fields | changes, offer=offer)
                with pytest.raises(grpc.RpcError) as refused:
                    runtime.stub(FRONT_END).OpenSession(request, timeout=10)
                said += [refused.value.details() or "", *traceback.format_exception(refused.value), repr(request)]
            for command in ("status", "list", "sessions"):
                said += [runtime.ctl("-o", form, command).stdout for form in ("json", "table")]
            said.append(httpx.get(f"{url}/metrics").text)
            processes = [psutil.Process(pid) for pid in (runtime.process.pid, process.pid)]
            processes += [child for one in processes for child in one.children()]
            assert len(processes) == 4  # control process, chain, supervisor, worker
            for one in processes:
                limits = Path(f"/proc/{one.pid}/limits").read_text()
                assert re.search(r"Max core file size +0 +0 ", limits), one.cmdline()
                said.append(" ".join(one.cmdline()))
                with contextlib.suppress(psutil.AccessDenied):  # as it is for other users than root
                    said.append(json.dumps(one.environ()))
            processes[1].children()[0].kill()  # the worker: its death is told
            eventually(lambda: "a worker died" in log.read_text())
            said.append(log.read_text())
        runtime.process.send_signal(signal.SIGTERM)
        assert runtime.process.wait(20) == 0
        said += [runtime.log.read_text(), audit.read_text()]
    assert "planted" in audit.read_text()  # its front_end: the file does tell of that call
    everything = "\n".join(said)
    assert [secret for secret in secrets if secret in everything] == []


def test_reflection_is_off_and_metadata_is_bounded(tmp_path: Path) -> None:
    certificates = make_certificates(tmp_path / "certs")
    with secure_runtime(certificates, tmp_path) as runtime, runtime.channel(READER) as channel:
        call = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")  # type: ignore[call-arg]
        with pytest.raises(grpc.RpcError) as refused:
            next(call(iter([b""]), timeout=10))
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        check = channel.unary_unary("/grpc.health.v1.Health/Check")  # type: ignore[call-arg]
        assert check(b"", timeout=10)
        with pytest.raises(grpc.RpcError) as refused:
            check(b"", timeout=10, metadata=[("x-large", "y" * 100_000)])
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        with pytest.raises(grpc.RpcError) as refused:
            check(b"\n\x80\x80\x80\x01" + b"x" * (2 << 20), timeout=10)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_garbage_on_the_port_harms_nobody(tmp_path: Path) -> None:
    certificates = make_certificates(tmp_path / "certs")
    with secure_runtime(certificates, tmp_path) as runtime:
        for sent in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff" + b"a" * 1000, b""):
            with socket.create_connection(("127.0.0.1", runtime.port)) as raw:
                raw.sendall(sent)
        runtime.ctl("status")
