"""HTTP/1.1 by raw sockets: clients that drip, stall, send ahead or close half, and what each leaves behind."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator

import httpx
import psutil
import pytest

from blink_proto.arena import Finish
from tests import tiny_text
from tests.front_end import FrontEnd, eventually, front_end
from tests.raw_http import body, dial, post, read_all, read_until, send_until_cut
from tests.replay import Script

FOREVER = tiny_text.byte_ids(b"x" * 200)
GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
LIMITS = ("--body-timeout", "1", "--header-timeout", "1", "--keep-alive", "2", "--write-timeout", "1")


@pytest.fixture(scope="module")
def shared() -> Iterator[FrontEnd]:
    with front_end("--workers", "1", "--max-connections", "40", *LIMITS) as running:
        yield running


@pytest.fixture
def front(shared: FrontEnd) -> Iterator[FrontEnd]:
    shared.device.script = lambda s: Script(FOREVER, Finish.NONE, every=0.05)
    yield shared
    eventually(lambda: shared.device.playing == 0)


def in_flight(front: FrontEnd) -> float:
    """As the front end itself counts."""
    text = httpx.get(front.http + "/metrics").text
    found = re.search(r"^blink_sequences_in_flight (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def finish_at_once(front: FrontEnd) -> None:
    front.device.script = lambda s: Script([*tiny_text.ids("ok"), tiny_text.special(tiny_text.END)])


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("how", ["close", "reset", "half"])
def test_a_client_that_goes_in_any_way_frees_its_sequences(front: FrontEnd, stream: bool, how: str) -> None:
    raw = dial(front.http)
    raw.sendall(post(body(stream=stream, n=3)))
    eventually(lambda: front.device.playing == 3)
    if how == "half":
        raw.shutdown(socket.SHUT_WR)
    elif how == "reset":
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        raw.close()
    else:
        raw.close()
    eventually(lambda: front.device.playing == 0, timeout=2)
    if how == "half":
        read_all(raw)  # the server has closed too


def test_a_storm_of_aborts_leaves_nothing_behind(front: FrontEnd) -> None:
    front.device.script = lambda s: Script(FOREVER, Finish.NONE, every=0.002)
    for turn in range(60):
        raw = dial(front.http)
        raw.sendall(post(body(stream=bool(turn % 2), n=2)))
        if turn % 3:
            time.sleep(0.004 * (turn % 3))
        raw.close()
    eventually(lambda: front.device.playing == 0)
    eventually(lambda: in_flight(front) == 0)
    finish_at_once(front)
    assert httpx.post(front.http + "/v1/completions", content=body()).status_code == 200
    assert front.device.channels[0].protocol_errors == 0


def test_a_client_that_sends_ahead_and_goes_is_noticed(front: FrontEnd) -> None:
    raw = dial(front.http)
    raw.sendall(post(body()) + post(body()))
    eventually(lambda: front.device.playing == 1)
    raw.close()
    eventually(lambda: front.device.playing == 0, timeout=2)
    time.sleep(0.1)
    assert front.device.playing == 0, "the request that waited behind it was not started either"


def test_requests_sent_ahead_are_answered_in_order(front: FrontEnd) -> None:
    front.device.script = lambda s: Script(
        [*tiny_text.ids(str(s.prompt[-1])), tiny_text.special(tiny_text.END)], delay=0.2 if s.prompt[-1] == 100 else 0
    )
    raw = dial(front.http)
    raw.sendall(b"".join([post(body(prompt=[100])), GET, post(body(prompt=[101])), GET]))
    received = b""
    while received.count(b"HTTP/1.1 200") < 4 or not received.endswith(b"}"):
        received += raw.recv(65536)
    texts = re.findall(rb'"text":"(\d+)"|("status":"ok")', received)
    assert texts == [(b"100", b""), (b"", b'"status":"ok"'), (b"101", b""), (b"", b'"status":"ok"')]
    raw.sendall(GET)
    assert read_until(raw, b"}").startswith(b"HTTP/1.1 200"), "the connection goes on"


@pytest.mark.parametrize("size", [1, 2, 7, 61, 100, 200, 230, 250, 300])
def test_packets_end_anywhere(front: FrontEnd, size: int) -> None:
    front.device.script = lambda s: Script([*tiny_text.ids("ok"), tiny_text.special(tiny_text.END)], delay=0.05)
    sent = b"\r\n" + post(body()) + GET + post(body(), "Connection: close") + b"\r\n"
    raw = dial(front.http)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for start in range(0, len(sent), size):
        raw.sendall(sent[start : start + size])
    received = read_all(raw)
    assert re.findall(rb"HTTP/1.1 (\d+)", received) == [b"200"] * 3
    assert re.findall(rb'"text":"ok"|"status":"ok"', received) == [b'"text":"ok"', b'"status":"ok"', b'"text":"ok"']


def test_a_pipeline_without_end_is_cut(front: FrontEnd) -> None:
    raw = dial(front.http)
    raw.sendall(post(body(stream=True)))
    eventually(lambda: front.device.playing == 1)
    send_until_cut(raw, [GET * 100] * 1000, every=0.001)
    eventually(lambda: front.device.playing == 0, timeout=2)


def test_many_requests_in_one_packet_are_not_all_kept(front: FrontEnd) -> None:
    raw = dial(front.http)
    raw.sendall(post(body(stream=True)) + GET * 500)
    read_all(raw)
    eventually(lambda: front.device.playing == 0, timeout=2)


def test_a_client_that_never_reads_is_cut_off(front: FrontEnd) -> None:
    front.device.script = lambda s: Script(FOREVER * 2, Finish.NONE, every=0.03)
    worker = psutil.Process(front.workers()[0])
    before = worker.memory_info().rss
    cancelled = front.device.finished[Finish.CANCELLED]
    clients = [dial(front.http, receive_buffer=2048) for _ in range(2)]
    for raw in clients:
        raw.sendall(post(body(stream=True, n=2, logprobs=20, max_tokens=240)))
    eventually(lambda: front.device.playing == 4)
    eventually(lambda: front.device.playing == 0, timeout=15)
    assert front.device.finished[Finish.CANCELLED] == cancelled + 4
    assert worker.memory_info().rss - before < 64 << 20
    for raw in clients:
        raw.close()


@pytest.mark.parametrize("sent", [GET[:20], b"\r\n\r\n" + GET[:20]])
def test_a_head_that_drips_has_its_time(front: FrontEnd, sent: bytes) -> None:
    raw = dial(front.http)
    assert 0.9 < send_until_cut(raw, [bytes([byte]) for byte in sent + b"a" * 100], every=0.05) < 3


def test_blank_lines_do_not_hold_an_idle_connection(front: FrontEnd) -> None:
    raw = dial(front.http)
    raw.sendall(GET)
    read_until(raw, b"}")
    assert send_until_cut(raw, [b"\r\n"] * 50, every=0.1) < 3


def test_a_body_that_drips_has_its_time(front: FrontEnd) -> None:
    raw = dial(front.http)
    raw.sendall(post(body())[:-20])
    for _ in range(5):
        raw.sendall(b" ")
        time.sleep(0.1)
    answer = read_all(raw)
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"connection: close" in answer


def test_a_body_that_drips_after_its_answer_has_its_time(front: FrontEnd) -> None:
    raw = dial(front.http)
    raw.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n")
    head = read_until(raw, b"}")
    assert head.startswith(b"HTTP/1.1 200")
    assert b"connection: close" in head
    assert send_until_cut(raw, [b" "] * 100, every=0.1) < 5


def test_bodies_have_room_together() -> None:
    """16 of the largest size; who comes too late may try again."""
    size = 64 << 10
    with front_end("--workers", "1", "--max-body-bytes", str(size), "--body-timeout", "30") as front:
        worker = psutil.Process(front.workers()[0])
        sent = post(b" " * size)[:-1]
        clients = [dial(front.http) for _ in range(20)]
        for raw in clients:
            raw.sendall(sent)
        time.sleep(0.3)
        late = dial(front.http)
        late.sendall(post(body()))
        answer = read_until(late, b"}}")
        assert answer.startswith(b"HTTP/1.1 503")
        assert b'"code":"bodies_full"' in answer
        assert b"retry-after: " in answer
        assert worker.memory_info().rss < 1 << 30
        for raw in clients:
            raw.close()
        finish_at_once(front)
        eventually(lambda: httpx.post(front.http + "/v1/completions", content=body()).status_code == 200)


def test_expect_100_continue(front: FrontEnd) -> None:
    finish_at_once(front)
    raw = dial(front.http)
    sent = body()
    raw.sendall(post(sent, "Expect: 100-continue")[: -len(sent)])
    assert read_until(raw, b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    raw.sendall(sent)
    assert read_until(raw, b"}]").startswith(b"HTTP/1.1 200")


def test_http_1_0_gets_no_chunks(front: FrontEnd) -> None:
    front.device.script = lambda s: Script(FOREVER[:5], Finish.STOP, every=0.01)
    raw = dial(front.http)
    raw.sendall(post(body(stream=True)).replace(b"HTTP/1.1", b"HTTP/1.0"))
    head, _, rest = read_all(raw).partition(b"\r\n\r\n")
    assert b"connection: close" in head
    assert b"chunked" not in head
    assert rest.startswith(b"data: ")
    assert rest.endswith(b"data: [DONE]\n\n")
    raw = dial(front.http)
    raw.sendall(GET.replace(b"1.1", b"1.0").replace(b"Host: x", b"Connection: keep-alive"))
    assert b"connection: keep-alive" in read_until(raw, b"}")
    raw.sendall(GET)
    assert read_until(raw, b"}").startswith(b"HTTP/1.1 200")


def test_an_upgrade_that_is_not_offered_is_passed_over(front: FrontEnd) -> None:
    raw = dial(front.http)
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n\r\n"
    raw.sendall(GET.replace(b"\r\n\r\n", b"\r\n") + upgrade)
    assert read_until(raw, b"}").startswith(b"HTTP/1.1 200")
    raw.sendall(GET)
    assert read_until(raw, b"}").startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "sent",
    [
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
        b"GET /health HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: xchunked\r\n\r\n",
        b"GET /health HTTP/1.1\nHost: x\n\n",
        b"CONNECT example.org:443 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET health HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nA : b\r\n\r\n",
        b"GET /he\x00alth HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01",
    ],
)
def test_what_is_no_sound_request_is_refused(front: FrontEnd, sent: bytes) -> None:
    raw = dial(front.http)
    raw.sendall(sent)
    answer = read_all(raw)
    assert answer.startswith(b"HTTP/1.1 400")
    assert json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]["code"] == "invalid_http"


def test_whole_targets_and_escapes(front: FrontEnd) -> None:
    for target in (b"http://elsewhere:80/health?x=1", b"/%68ealth"):
        raw = dial(front.http)
        raw.sendall(GET.replace(b"/health", target, 1))
        assert read_until(raw, b"}").startswith(b"HTTP/1.1 200")


def test_connections_have_a_bound(front: FrontEnd) -> None:
    idle = []
    for _ in range(40):
        raw = dial(front.http)
        raw.sendall(GET[:5])
        idle.append(raw)
    time.sleep(0.1)
    extra = dial(front.http)
    extra.sendall(GET)
    answer = read_all(extra)
    assert answer.startswith(b"HTTP/1.1 503")
    assert b"retry-after: " in answer
    for raw in idle:
        raw.close()
    eventually(lambda: httpx.get(front.http + "/health").status_code == 200)


def test_head_requests_have_no_body(front: FrontEnd) -> None:
    raw = dial(front.http)
    raw.sendall(GET.replace(b"GET", b"HEAD") + GET)
    received = read_until(raw, b"}")
    assert received.count(b"HTTP/1.1 200") == 2
    assert received.count(b"{") == 1
