"""The front end's life: start, clients that go, a device that stalls or dies, workers that die, and the end."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import ssl
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography import x509

from blink_proto.arena import DeviceState, Finish
from dpu_service.config import WorkerConfig
from dpu_service.main import default_workers, split_address
from tests import tiny_text
from tests.front_end import MODEL, FrontEnd, eventually, front_end, launch, make_device, ready_line
from tests.replay import ReplayControl, Script

FOREVER = tiny_text.byte_ids(b"x" * 200)


@pytest.fixture(scope="module")
def shared() -> Iterator[FrontEnd]:
    with front_end("--workers", "1", "--device-timeout", "1") as running:
        yield running


@pytest.fixture
def front(shared: FrontEnd) -> Iterator[FrontEnd]:
    shared.device.script = lambda s: Script(FOREVER, Finish.NONE, every=0.05)
    yield shared
    shared.device.frozen, shared.device.taking, shared.device.state = False, True, DeviceState.RUNNING
    eventually(lambda: shared.device.playing == 0)
    eventually(lambda: httpx.get(shared.http + "/ready").status_code == 200)
    assert shared.device.channels[0].protocol_errors == 0


def body(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "prompt": "hi", "max_tokens": 150, **fields}).encode()


def connect(front: FrontEnd, sent: bytes) -> socket.socket:
    """A raw connection that has posted a completion."""
    host, port = front.http.removeprefix("http://").split(":")
    raw = socket.create_connection((host, int(port)), timeout=10)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(sent)}\r\n\r\n"
    raw.sendall(head.encode() + sent)
    return raw


def read_until(raw: socket.socket, end: bytes) -> bytes:
    received = b""
    while end not in received:
        part = raw.recv(65536)
        if not part:
            break
        received += part
    return received


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_frees_its_sequences(front: FrontEnd, stream: bool) -> None:
    raw = connect(front, body(stream=stream, n=3))
    if stream:
        read_until(raw, b"data: ")
    eventually(lambda: front.device.playing == 3)
    raw.close()
    eventually(lambda: front.device.playing == 0, timeout=2)


def test_a_client_that_goes_while_it_waits(front: FrontEnd) -> None:
    front.device.taking = False
    raw = connect(front, body(n=2))
    time.sleep(0.2)
    raw.close()
    time.sleep(0.2)
    front.device.taking = True
    eventually(lambda: front.device.playing == 0, timeout=2)


def test_many_concurrent_streams_each_get_their_own_tokens(front: FrontEnd) -> None:
    def script(asked: Any) -> Script:
        word = " ".join([str(asked.prompt[-1])] * 8)
        return Script([*tiny_text.ids(word), tiny_text.special(tiny_text.END)], every=0.002)

    front.device.script = script
    got: dict[int, str] = {}

    def ask(token: int) -> None:
        with httpx.stream("POST", front.http + "/v1/completions", content=body(prompt=[token], stream=True)) as answer:
            events = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: {")]
        got[token] = "".join(json.loads(event)["choices"][0]["text"] for event in events)

    clients = [threading.Thread(target=ask, args=(100 + i,)) for i in range(32)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    assert got == {100 + i: " ".join([str(100 + i)] * 8) for i in range(32)}


def test_more_requests_than_the_ring_holds_are_all_served(front: FrontEnd) -> None:
    front.device.script = lambda s: Script([*tiny_text.ids("ok"), tiny_text.special(tiny_text.END)])
    front.device.taking = False
    answers: list[httpx.Response] = []
    clients = [
        threading.Thread(target=lambda: answers.append(httpx.post(front.http + "/v1/completions", content=body(n=16))))
        for _ in range(8)
    ]
    for client in clients:
        client.start()
    time.sleep(0.3)
    assert httpx.get(front.http + "/health").status_code == 200
    front.device.taking = True
    for client in clients:
        client.join()
    assert len(answers) == 8
    assert all(choice["text"] == "ok" for answer in answers for choice in answer.json()["choices"])


def test_a_silent_device_fails_readiness_and_open_requests(front: FrontEnd) -> None:
    raw = connect(front, body(stream=True))
    read_until(raw, b"data: ")
    whole: list[httpx.Response] = []
    client = threading.Thread(target=lambda: whole.append(httpx.post(front.http + "/v1/completions", content=body())))
    client.start()
    eventually(lambda: front.device.playing == 2)
    front.device.frozen = True
    eventually(lambda: httpx.get(front.http + "/ready").status_code == 503, timeout=3)
    rest = read_until(raw, b"0\r\n\r\n")
    assert b'data: {"error":{' in rest
    assert rest.count(b"data: [DONE]\n\n") == 1
    client.join()
    assert whole[0].status_code == 503
    assert httpx.post(front.http + "/v1/completions", content=body()).status_code == 503
    assert httpx.get(front.http + "/health").status_code == 200
    front.device.frozen = False
    eventually(lambda: httpx.get(front.http + "/ready").status_code == 200)
    eventually(lambda: front.device.playing == 0, timeout=2)


@pytest.mark.parametrize("state", [DeviceState.FAILED, DeviceState.STOPPED])
def test_a_device_that_says_it_has_ended_counts_at_once(front: FrontEnd, state: DeviceState) -> None:
    raw = connect(front, body(stream=True))
    read_until(raw, b"data: ")
    front.device.state = state
    assert b'data: {"error":{' in read_until(raw, b"0\r\n\r\n")
    assert httpx.get(front.http + "/ready").status_code == 503


def test_a_draining_device_finishes_and_takes_nothing_new(front: FrontEnd) -> None:
    front.device.script = lambda s: Script(FOREVER[:30], Finish.STOP, every=0.05)
    raw = connect(front, body(stream=True))
    read_until(raw, b"data: ")
    front.device.state = DeviceState.DRAINING
    eventually(lambda: httpx.get(front.http + "/ready").status_code == 503)
    assert httpx.post(front.http + "/v1/completions", content=body()).status_code == 503
    rest = read_until(raw, b"0\r\n\r\n")
    assert b'"finish_reason":"stop"' in rest
    assert b"error" not in rest


def test_probes_version_and_log(front: FrontEnd) -> None:
    assert httpx.get(front.http + "/health").json() == {"status": "ok"}
    assert httpx.get(front.http + "/ready").json() == {"status": "ready"}
    assert re.fullmatch(r"\d+\.\d+\.\d+", httpx.get(front.http + "/version").json()["version"])
    assert httpx.head(front.http + "/health").status_code == 200
    front.device.script = lambda s: Script([tiny_text.special(tiny_text.END)])
    httpx.post(front.http + "/v1/completions", content=body(prompt="a secret of mine"))

    def logged() -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in front.log.read_text().splitlines()]
        return [line for line in lines if line.get("prompt_tokens", 0) > 8]

    eventually(lambda: bool(logged()))  # the line comes after the answer
    line = logged()[-1]
    assert line["event"] == "request"
    assert line["status"] == 200
    assert "secret" not in front.log.read_text()


def test_workers_share_sockets_and_metrics_and_are_replaced() -> None:
    with front_end("--workers", "2") as front:
        front.device.script = lambda s: Script([*tiny_text.ids("ok"), tiny_text.special(tiny_text.END)], every=0.01)
        for _ in range(20):
            assert httpx.post(front.http + "/v1/completions", content=body()).status_code == 200
        total = r'^blink_http_requests_total\{route="/v1/completions",status="200"\} 20\.0$'
        assert re.search(total, httpx.get(front.http + "/metrics").text, re.MULTILINE)
        front.control.stop()  # nothing below needs the control plane
        first = front.workers()
        assert len(first) == 2
        for pid in first:
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: len(set(front.workers()) - set(first)) == 2, timeout=10)

        def serves() -> bool:
            try:
                return httpx.post(front.http + "/v1/completions", content=body()).status_code == 200
            except httpx.HTTPError:
                return False

        eventually(serves, timeout=10)
        eventually(lambda: [c.lease for c in front.device.channels[:2]] == [2, 2], timeout=10)
        assert front.stop() == 0
        assert not any(channel.live for channel in front.device.channels)
        front.control.start()


def test_a_new_epoch_is_taken_up_without_a_restart() -> None:
    with front_end("--workers", "1") as front:
        front.device.script = lambda s: Script(FOREVER, Finish.NONE, every=0.05)
        raw = connect(front, body(stream=True))
        read_until(raw, b"data: ")
        second = make_device(epoch=2)
        try:
            second.script = lambda s: Script([*tiny_text.ids("new"), tiny_text.special(tiny_text.END)])
            front.control.put(second)
            assert b'data: {"error":{' in read_until(raw, b"0\r\n\r\n")
            eventually(lambda: httpx.get(front.http + "/ready").status_code == 200)
            answer = httpx.post(front.http + "/v1/completions", content=body())
            assert answer.json()["choices"][0]["text"] == "new"
            assert {request.front_end for request in front.control.opened} == {front.control.opened[0].front_end}
        finally:
            second.close()


def test_start_before_the_runtime_and_before_its_model(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process, log = launch(port, tmp_path, "--workers", "1", "--http", "127.0.0.1:0", "--https", "off")
    control, device = ReplayControl(MODEL, tiny_text.files(), None), make_device()
    try:
        eventually(lambda: b"no answer from the GPU runtime" in log.read_bytes(), timeout=10)
        control.start(port)
        eventually(lambda: b"serves no model yet" in log.read_bytes(), timeout=10)
        control.put(device)
        (url,) = ready_line(process, log)
        assert url.startswith("http://")
        assert httpx.get(url + "/ready").status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    finally:
        process.kill()
        control.stop()
        device.close()


def test_sigterm_finishes_what_runs_and_refuses_what_comes() -> None:
    with front_end("--workers", "1", "--grace", "10") as front:
        front.device.script = lambda s: Script(FOREVER[:40], Finish.STOP, every=0.05)
        streams = [connect(front, body(stream=True)) for _ in range(4)]
        for raw in streams:
            read_until(raw, b"data: ")
        idle = httpx.Client(base_url=front.http)
        assert idle.get("/ready").status_code == 200
        front.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        late = idle.post("/v1/completions", content=body())
        assert late.status_code == 503
        assert late.headers["connection"] == "close"
        with pytest.raises(httpx.ConnectError):
            httpx.get(front.http + "/health")
        for raw in streams:
            rest = read_until(raw, b"0\r\n\r\n")
            assert b'"finish_reason":"stop"' in rest
            assert rest.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert front.process.wait(10) == 0
        assert not front.device.channels[0].live


def test_the_grace_time_ends() -> None:
    with front_end("--workers", "1", "--grace", "0.3") as front:
        front.device.script = lambda s: Script(FOREVER, Finish.NONE, every=0.05)
        raw = connect(front, body(stream=True))
        read_until(raw, b"data: ")
        front.process.send_signal(signal.SIGTERM)
        rest = read_until(raw, b"0\r\n\r\n")
        assert b'"code":"shutting_down"' in rest
        assert b"data: [DONE]" in rest
        assert front.process.wait(5) == 0
        assert front.device.finished[Finish.CANCELLED] == 1


def test_workers_end_with_their_supervisor() -> None:
    with front_end("--workers", "1") as front:
        (worker,) = front.workers()
        front.process.kill()
        front.process.wait()

        def gone() -> bool:
            return not Path(f"/proc/{worker}").exists() or "zombie" in Path(f"/proc/{worker}/status").read_text()

        eventually(gone, timeout=10)
        eventually(lambda: not front.device.channels[0].live)


def test_the_self_signed_certificate(front: FrontEnd) -> None:
    made = x509.load_pem_x509_certificate(Path(front.certificate).read_bytes())
    names = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "localhost" in names.get_values_for_type(x509.DNSName)
    assert [str(a) for a in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1", "::1"]
    assert stat.S_IMODE(Path(front.certificate).with_name("tls-key.pem").stat().st_mode) == 0o600
    trust = ssl.create_default_context(cafile=front.certificate)
    port = front.https.rsplit(":", 1)[1]
    assert httpx.get(f"https://localhost:{port}/health", verify=trust).status_code == 200


@pytest.mark.parametrize(
    "flags",
    [
        ("--https", "off", "--http", "off"),
        ("--https", "nonsense"),
        ("--tls-cert", "/nowhere"),
        ("--tls-cert", "/nowhere", "--tls-key", "/nowhere"),
        ("--log-level", "loud"),
    ],
)
def test_flags_that_cannot_work_say_so(flags: tuple[str, ...]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        process, log = launch(1, Path(folder), *flags)
        assert process.wait(20) == 2
        assert "Invalid value" in log.read_text()


def test_small_decisions() -> None:
    assert WorkerConfig().keep_alive >= 120, "longer than the idle time of proxies' pools"
    assert [default_workers(cores) for cores in (1, 2, 3, 4, 64)] == [1, 1, 3, 4, 4]
    assert split_address("[::1]:8443") == ("::1", 8443)
    assert split_address("localhost:0") == ("localhost", 0)
