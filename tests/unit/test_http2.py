"""HTTP/2: ordinary clients over TLS, and frames that no ordinary client sends."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import ConnectionTerminated, DataReceived, StreamEnded, StreamReset
from h2.settings import SettingCodes, Settings
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from blink_proto.arena import Finish
from tests import tiny_text
from tests.front_end import FrontEnd, eventually, front_end
from tests.raw_http import Http2Client, body, dial, send_until_cut
from tests.replay import Script

FOREVER = tiny_text.byte_ids(b"x" * 200)
LIMITS = ("--body-timeout", "2", "--header-timeout", "1", "--keep-alive", "2", "--write-timeout", "1")
STREAMS = 20


@pytest.fixture(scope="module")
def shared() -> Iterator[FrontEnd]:
    with front_end("--workers", "1", "--http2-streams", str(STREAMS), *LIMITS) as running:
        yield running


@pytest.fixture
def front(shared: FrontEnd) -> Iterator[FrontEnd]:
    shared.device.script = lambda s: Script(FOREVER, Finish.NONE, every=0.05)
    yield shared
    eventually(lambda: shared.device.playing == 0)
    assert httpx.get(shared.http + "/ready").status_code == 200


def finish_at_once(front: FrontEnd) -> None:
    front.device.script = lambda s: Script([*tiny_text.ids("ok"), tiny_text.special(tiny_text.END)])


def secure(front: FrontEnd) -> httpx.Client:
    return httpx.Client(
        base_url=front.https, http2=True, verify=ssl.create_default_context(cafile=front.certificate), timeout=20
    )


def terminated(client: Http2Client, seconds: float = 10) -> ErrorCodes | int | None:
    """The code with which the server ends the connection."""
    return next((e.error_code for e in client.events(seconds) if isinstance(e, ConnectionTerminated)), None)


def test_negotiated_over_tls(front: FrontEnd) -> None:
    finish_at_once(front)
    with secure(front) as client:
        answer = client.post("/v1/completions", content=body())
        assert answer.http_version == "HTTP/2"
        assert answer.json()["choices"][0]["text"] == "ok"
        assert "connection" not in answer.headers
        with client.stream("POST", "/v1/completions", content=body(stream=True)) as stream:
            assert stream.http_version == "HTTP/2"
            assert list(stream.iter_lines())[-2] == "data: [DONE]"
        assert client.get("/v1/nothing").json()["error"]["code"] == "unknown_url"
        assert client.head("/health").content == b""
    plain = httpx.get(front.https + "/health", verify=ssl.create_default_context(cafile=front.certificate))
    assert plain.http_version == "HTTP/1.1"


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
@pytest.mark.parametrize("how", ["--http2", "--http2-prior-knowledge", "--http1.1"])
def test_curl(front: FrontEnd, how: str) -> None:
    if b"HTTP2" not in subprocess.run(["curl", "-V"], capture_output=True, check=True).stdout:
        pytest.skip("this curl has no HTTP/2")
    finish_at_once(front)
    url = front.http if how == "--http2-prior-knowledge" else front.https
    command = ["curl", "-sS", how, "--cacert", front.certificate, "-w", "%{http_version}", "-d", body().decode()]
    ran = subprocess.run([*command, url + "/v1/completions"], capture_output=True, check=True, timeout=20)
    assert b'"text":"ok"' in ran.stdout
    assert ran.stdout.endswith(b"1.1" if how == "--http1.1" else b"}2")


def test_many_streams_of_one_connection(front: FrontEnd) -> None:
    def script(asked: Any) -> Script:
        word = " ".join([str(asked.prompt[-1])] * 4)
        return Script([*tiny_text.ids(word), tiny_text.special(tiny_text.END)], every=0.002)

    front.device.script = script
    client = Http2Client(front.http)
    numbers = {client.request("POST", "/v1/completions", body(prompt=[100 + k])): k for k in range(STREAMS)}
    received = dict.fromkeys(numbers, b"")
    open_streams = set(numbers)
    for event in client.events():
        if isinstance(event, DataReceived):
            received[event.stream_id or 0] += event.data or b""
        elif isinstance(event, StreamEnded):
            open_streams.discard(event.stream_id or 0)
        if not open_streams:
            break
    for number, k in numbers.items():
        assert json.loads(received[number])["choices"][0]["text"] == " ".join([str(100 + k)] * 4)


@pytest.mark.parametrize("stream", [True, False])
def test_a_reset_stream_frees_its_sequences_and_no_others(front: FrontEnd, stream: bool) -> None:
    client = Http2Client(front.http)
    first, _second = (client.request("POST", "/v1/completions", body(stream=stream, n=2)) for _ in range(2))
    eventually(lambda: front.device.playing == 4)
    client.h2.reset_stream(first, ErrorCodes.CANCEL)
    client.flush()
    eventually(lambda: front.device.playing == 2, timeout=2)
    time.sleep(0.2)
    assert front.device.playing == 2
    client.raw.close()
    eventually(lambda: front.device.playing == 0, timeout=2)


@pytest.mark.parametrize("size", [1, 9, 23])
def test_packets_end_anywhere(front: FrontEnd, size: int) -> None:
    finish_at_once(front)
    client = H2Connection()
    client.initiate_connection()
    for number in (1, 3):
        pseudo = [(":method", "POST"), (":path", "/v1/completions"), (":scheme", "http"), (":authority", "x")]
        client.send_headers(number, pseudo)
        client.send_data(number, body(), end_stream=True)
    sent = client.data_to_send()
    raw = dial(front.http)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for start in range(0, len(sent), size):
        raw.sendall(sent[start : start + size])
    ended: set[int | None] = set()
    texts: list[str] = []
    while len(ended) < 2:
        for event in client.receive_data(raw.recv(65536)):
            if isinstance(event, DataReceived) and event.data:
                texts.append(json.loads(event.data)["choices"][0]["text"])
            ended |= {event.stream_id} if isinstance(event, StreamEnded) else set()
    assert texts == ["ok", "ok"]


def test_bodies_over_the_window(front: FrontEnd) -> None:
    with secure(front) as client:
        answer = client.post("/v1/completions", content=body(prompt="." * 3_000_000))
        assert answer.json()["error"]["code"] == "context_length_exceeded", "read whole, through the flow control"
        assert client.post("/v1/completions", content=b" " * (9 << 20)).status_code == 413
        assert client.get("/health").status_code == 200


def test_a_small_window_of_the_client_is_respected(front: FrontEnd) -> None:
    finish_at_once(front)
    client = Http2Client(front.http)
    client.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 10})
    client.flush()
    number = client.request("POST", "/v1/completions", body())
    sizes = []
    for event in client.events(acknowledge=False):
        if isinstance(event, DataReceived):
            sizes.append(len(event.data or b""))
            if event.stream_ended is None:
                client.h2.increment_flow_control_window(10, event.stream_id)
                client.flush()
        if isinstance(event, StreamEnded):
            break
    assert number
    assert sum(sizes) > 100
    assert max(sizes) <= 20, "10 by the settings, and 10 more for each piece"


def test_a_client_that_gives_no_window_is_cut_off(front: FrontEnd) -> None:
    client = Http2Client(front.http)
    client.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 0})
    client.flush()
    client.request("POST", "/v1/completions", body(stream=True))
    reset = next(event for event in client.events(5) if isinstance(event, StreamReset))
    assert reset.error_code == ErrorCodes.CANCEL
    eventually(lambda: front.device.playing == 0, timeout=2)
    finish_at_once(front)


def test_a_client_that_never_reads_is_cut_off(front: FrontEnd) -> None:
    front.device.script = lambda s: Script(FOREVER, Finish.NONE, every=0.02)
    worker = psutil.Process(front.workers()[0])
    before = worker.memory_info().rss
    client = Http2Client(front.http, receive_buffer=2048)
    client.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 1 << 24})
    client.h2.increment_flow_control_window(1 << 24)
    client.flush()
    cancelled = front.device.finished[Finish.CANCELLED]
    for _ in range(2):
        client.request("POST", "/v1/completions", body(stream=True, n=2, logprobs=20, max_tokens=240))
    eventually(lambda: front.device.playing == 4)
    eventually(lambda: front.device.playing == 0, timeout=15)
    assert front.device.finished[Finish.CANCELLED] == cancelled + 4
    assert worker.memory_info().rss - before < 64 << 20


def test_a_request_without_its_body_has_its_time(front: FrontEnd) -> None:
    client = Http2Client(front.http)
    number = client.request("POST", "/v1/completions", None)
    status, answer = client.answer(number)
    assert status == 408
    assert json.loads(answer)["error"]["code"] == "timeout"


def test_an_idle_connection_ends_with_a_farewell(front: FrontEnd) -> None:
    client = Http2Client(front.http)
    began = time.monotonic()
    assert terminated(client) == ErrorCodes.NO_ERROR
    assert time.monotonic() - began < 2, "no request came in the time for one"
    client = Http2Client(front.http)
    assert client.answer(client.request("GET", "/health", b""))[0] == 200
    began = time.monotonic()
    assert terminated(client) == ErrorCodes.NO_ERROR
    assert time.monotonic() - began > 1.5


def open_streams(client: Http2Client, count: int) -> None:
    """Completions, as a client without regard for the limit asks for them."""
    client.h2.remote_settings = Settings(client=False, initial_values={SettingCodes.MAX_CONCURRENT_STREAMS: 1 << 20})
    pseudo = [(":method", "POST"), (":path", "/v1/completions"), (":scheme", "http"), (":authority", "x")]
    for number in range(1, 2 * count, 2):
        client.h2.send_headers(number, pseudo)
        client.h2.send_data(number, body(stream=True), end_stream=True)
    client.flush()


@pytest.mark.parametrize("surplus", [1, 100])
def test_streams_over_the_limit_are_refused_and_the_others_go_on(front: FrontEnd, surplus: int) -> None:
    front.device.script = lambda s: Script(tiny_text.byte_ids(b"x" * 30), every=0.01)
    client = Http2Client(front.http)
    next(client.events())
    assert client.h2.remote_settings.max_concurrent_streams == STREAMS
    open_streams(client, STREAMS + surplus)
    refused, ended, text = [], set(), dict.fromkeys(range(1, 2 * STREAMS, 2), b"")
    for event in client.events():
        assert not isinstance(event, ConnectionTerminated)
        if isinstance(event, StreamReset):
            assert event.error_code == ErrorCodes.REFUSED_STREAM
            refused.append(event.stream_id)
        elif isinstance(event, DataReceived):
            text[event.stream_id] += event.data
        elif isinstance(event, StreamEnded):
            ended.add(event.stream_id)
        if len(refused) == surplus and len(ended) == STREAMS:
            break
    assert refused == list(range(2 * STREAMS + 1, 2 * (STREAMS + surplus), 2))
    assert ended == set(text)
    assert all(said.count(b"data: [DONE]") == 1 for said in text.values())


def test_streams_over_the_limit_without_end_are_cut(front: FrontEnd) -> None:
    client = Http2Client(front.http)
    next(client.events())
    open_streams(client, STREAMS + 900)
    began = time.monotonic()
    assert sum(isinstance(event, StreamReset) for event in client.events(20)) < 900
    assert time.monotonic() - began < 10, "the server has closed"


def flood(frame: Frame) -> Iterator[bytes]:
    packed = frame.serialize() * 100
    for _ in range(5000):
        yield packed
        time.sleep(0.0005)


@pytest.mark.parametrize(
    "frame",
    [
        PingFrame(0, b"12345678"),
        SettingsFrame(0, {SettingsFrame.INITIAL_WINDOW_SIZE: 65535}),
        PriorityFrame(1, depends_on=0, stream_weight=3),
    ],
    ids=["ping", "settings", "priority"],
)
def test_floods_of_control_frames_are_cut(front: FrontEnd, frame: Frame) -> None:
    worker = psutil.Process(front.workers()[0])
    before = worker.memory_info().rss
    send_until_cut(Http2Client(front.http).raw, flood(frame))
    assert worker.memory_info().rss - before < 32 << 20


def test_a_flood_of_empty_data_is_cut(front: FrontEnd) -> None:
    client = Http2Client(front.http)
    number = client.request("POST", "/v1/completions", None)
    send_until_cut(client.raw, flood(DataFrame(number)))


def test_a_flood_of_continuations_is_cut(front: FrontEnd) -> None:
    client = Http2Client(front.http)
    client.raw.sendall(HeadersFrame(1, b"").serialize())
    send_until_cut(client.raw, flood(ContinuationFrame(1, b"")))


def test_rapid_reset_is_cut(front: FrontEnd) -> None:
    client = Http2Client(front.http)

    def frames() -> Iterator[bytes]:
        for number in range(1, 100_000, 2):
            headers = client.h2.encoder.encode(
                [(":method", "POST"), (":path", "/v1/completions"), (":scheme", "http"), (":authority", "x")]
            )
            yield HeadersFrame(number, headers, flags=["END_HEADERS"]).serialize() + RstStreamFrame(number).serialize()

    send_until_cut(client.raw, frames())
    eventually(lambda: front.device.playing == 0)


def test_resets_by_broken_frames_count_too(front: FrontEnd) -> None:
    """CVE-2025-8671: a client that makes the server reset its own streams."""
    client = Http2Client(front.http)

    def frames() -> Iterator[bytes]:
        for number in range(1, 100_000, 2):
            headers = client.h2.encoder.encode(
                [(":method", "POST"), (":path", "/v1/completions"), (":scheme", "http"), (":authority", "x")]
            )
            broken = WindowUpdateFrame(number, 2**31 - 1).serialize()
            yield HeadersFrame(number, headers, flags=["END_HEADERS"]).serialize() + broken

    send_until_cut(client.raw, frames())


def test_huge_headers_are_refused(front: FrontEnd) -> None:
    client = Http2Client(front.http)
    pseudo = [(":method", "GET"), (":path", "/"), (":scheme", "http"), (":authority", "x")]
    block = client.h2.encoder.encode([*pseudo, ("a", "b" * 100_000)], huffman=False)
    client.raw.sendall(HeadersFrame(1, block[:16384]).serialize())
    for start in range(16384, len(block), 16384):
        flags = ["END_HEADERS"] if start + 16384 >= len(block) else []
        client.raw.sendall(ContinuationFrame(1, block[start : start + 16384], flags=flags).serialize())
    assert terminated(client) == ErrorCodes.ENHANCE_YOUR_CALM
    client = Http2Client(front.http)
    number = client.request("GET", "/health", b"", *[(f"h{k}", "v") for k in range(300)])
    reset = next(event for event in client.events(5) if isinstance(event, StreamReset))
    assert reset.stream_id == number


def test_other_clients_are_served_throughout_a_flood(front: FrontEnd) -> None:
    finish_at_once(front)
    client = Http2Client(front.http)
    client.raw.sendall(PingFrame(0, b"12345678").serialize() * 5000)
    began = time.monotonic()
    assert httpx.post(front.http + "/v1/completions", content=body()).status_code == 200
    assert time.monotonic() - began < 1


def test_the_end_is_announced() -> None:
    with front_end("--workers", "1", "--grace", "10") as front:
        front.device.script = lambda s: Script(FOREVER[:30], Finish.STOP, every=0.05)
        client = Http2Client(front.http)
        number = client.request("POST", "/v1/completions", body(stream=True))
        eventually(lambda: front.device.playing == 1)
        front.process.terminate()
        received, last = b"", None
        for event in client.events():
            if isinstance(event, ConnectionTerminated):
                last = event.last_stream_id
                break
            received += (event.data or b"") if isinstance(event, DataReceived) else b""
        assert last == 2**31 - 1, "nothing that was sent is lost"
        # the state machine of h2 ends with the announcement, so what follows is read as bytes
        rest = client.raw.recv(1 << 20)
        while part := client.raw.recv(1 << 20):
            rest += part
        assert b'"finish_reason":"stop"' in rest
        assert b"data: [DONE]" in rest
        assert number
        assert front.process.wait(10) == 0
