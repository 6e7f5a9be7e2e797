"""Bodies and requests of clients that are careless, broken or hostile: each gets its answer, at little cost, and the
worker goes on. Slow clients and half-closed sockets are elsewhere."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import psutil
import pytest

from tests import tiny_text
from tests.front_end import MODEL, FrontEnd, front_end
from tests.replay import Script

GOOD = b'{"model":"tiny","prompt":"hi"}'
DEEP = 100_000
LONG = b"1" * 1_000_000


@pytest.fixture(scope="module")
def shared() -> Iterator[FrontEnd]:
    with front_end("--workers", "1", "--no-access-log", "--max-body-bytes", str(4 << 20)) as running:
        hello = [*tiny_text.ids("hello"), tiny_text.special(tiny_text.END)]
        running.device.script = lambda submission: Script(hello)
        yield running


@pytest.fixture
def front(shared: FrontEnd) -> Iterator[FrontEnd]:
    """Afterwards the same worker still serves."""
    (worker,) = shared.workers()
    yield shared
    assert shared.workers() == [worker]
    assert httpx.post(f"{shared.http}/v1/completions", content=GOOD).json()["choices"][0]["text"] == "hello"


@dataclass
class Answer:
    """As it came over the socket."""

    status: int
    headers: dict[str, str]
    body: bytes


def talk(front: FrontEnd, sent: bytes, methods: tuple[str, ...] = ("GET",)) -> list[Answer]:
    """All answers of a connection that the server closes; `methods` are those of the requests."""
    host, port = front.http.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as raw:
        raw.sendall(sent)
        received = b""
        while part := raw.recv(1 << 16):
            received += part
    answers = []
    while received:
        head, received = received.split(b"\r\n\r\n", 1)
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        interim = first.split()[1].startswith("1")
        size = 0 if interim or methods[len(answers) % len(methods)] == "HEAD" else int(headers["content-length"])
        answers.append(Answer(int(first.split()[1]), headers, received[:size]))
        received = received[size:]
    return answers


def request(line: str, *headers: str, body: bytes = b"") -> bytes:
    """A request after which the server closes the connection."""
    return "\r\n".join([line + " HTTP/1.1", "Host: x", "Connection: close", *headers, "", ""]).encode() + body


def posted(body: bytes, *headers: str) -> bytes:
    """A completion."""
    return request("POST /v1/completions", *(headers or (f"Content-Length: {len(body)}",)), body=body)


def code(answer: Answer) -> str:
    """Of the error object, which must be JSON of a bounded size."""
    assert answer.headers["content-type"] == "application/json"
    assert len(answer.body) < 2000, "an error must not grow with the request"
    error = json.loads(answer.body, parse_constant=pytest.fail)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    found: str = error["code"]
    return found


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b'{"model":"tiny","prompt":' + b"[" * DEEP, id="deep, cut off"),
        pytest.param(b'{"model":"tiny","prompt":' + b"[" * DEEP + b"]" * DEEP + b"}", id="deep prompt"),
        pytest.param(
            b'{"model":"tiny","prompt":"hi","x":' + b'{"a":' * DEEP + b"1" + b"}" * DEEP + b"}", id="deep ignored"
        ),
        pytest.param(b'{"model":"tiny","prompt":"hi","suffix":' + b"[" * DEEP + b"]" * DEEP + b"}", id="deep unbuilt"),
        pytest.param(b'{"model":"tiny","prompt":"hi","seed":' + b"9" * DEEP + b"}", id="many digits"),
        pytest.param(b'{"model":"tiny","prompt":[' + b"9" * DEEP + b"]}", id="a token of many digits"),
        pytest.param(b'{"model":"tiny","prompt":"hi","top_p":NaN}', id="NaN"),
        pytest.param(b'{"model":"tiny","prompt":"hi","x":NaN}', id="NaN, ignored"),
        pytest.param(b'{"model":"tiny","prompt":"hi","temperature":Infinity}', id="Infinity"),
        pytest.param(b'{"model":"tiny","prompt":"hi","logit_bias":{"1":-Infinity}}', id="-Infinity"),
        pytest.param(b'{"model":"tiny","prompt":"hi","top_p":1e400}', id="1e400"),
        pytest.param(b'{"model":"tiny","prompt":"\xff"}', id="invalid UTF-8"),
        pytest.param(b'{"model":"tiny","prompt":"hi","x":"\xed\xa0\x80"}', id="UTF-8 of a surrogate, ignored"),
        pytest.param(b'{"model":"tiny","prompt":"\\ud83d"}', id="half a surrogate pair"),
        pytest.param(b'{"model":"tiny","prompt":"\\ude00\\ud83d"}', id="a surrogate pair the wrong way round"),
        pytest.param(b'\xef\xbb\xbf{"model":"tiny","prompt":"hi"}', id="byte order mark"),
        pytest.param('{"model":"tiny","prompt":"hi"}'.encode("utf-16"), id="UTF-16"),
        pytest.param(b'{"model":"tiny","prompt":"a\nb"}', id="a raw line break in a string"),
        pytest.param(b'{"model":"tiny","prompt":"hi",}', id="a comma too many"),
        pytest.param(b"{'model':'tiny','prompt':'hi'}", id="single quotes"),
        pytest.param(b"model=tiny&prompt=hi", id="a form"),
        pytest.param(GOOD + b"\0", id="a zero byte behind it"),
        pytest.param(GOOD + GOOD, id="two objects"),
        pytest.param(b'{"model":"' + b"m" * 1_000_000 + b'","prompt":"hi"}', id="a model name of a million characters"),
        pytest.param(
            b'{"model":"tiny","prompt":"hi","stop":["' + b"s" * 1_000_000 + b'"]}', id="a stop string as long"
        ),
        pytest.param(
            b'{"model":"tiny","prompt":"hi","logit_bias":{"' + b"1" * 1_000_000 + b'":1}}', id="a token as long"
        ),
        pytest.param(b'{"model":"tiny","prompt":"hi","n":' + b'"' + b"n" * 1_000_000 + b'"}', id="a text for a number"),
    ],
)
def test_bodies_that_are_refused(front: FrontEnd, body: bytes) -> None:
    worker = psutil.Process(front.workers()[0])
    before = sum(worker.cpu_times()[:2])
    (answer,) = talk(front, posted(body))
    assert sum(worker.cpu_times()[:2]) - before < 1
    assert answer.status in (400, 404)
    assert code(answer) in ("invalid_json", "invalid_type", "invalid_value", "model_not_found", "unsupported_parameter")


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b'{"model":"other","model":"tiny","prompt":"hi"}', id="the last of two equal names counts"),
        pytest.param(b' \r\n\t{"model":"tiny","prompt":"hi"}\n ', id="white space around"),
        pytest.param(b'{"mod\\u0065l":"tiny","prompt":"\\u0000\\ud83d\\ude00"}', id="escapes"),
        pytest.param(b'{"model":"tiny","prompt":"hi","":{},"\\u0000":[]}', id="odd names"),
        pytest.param(b'{"model":"tiny","prompt":"hi",' + b'"x":1,' * 100_000 + b'"y":1}', id="100,000 ignored fields"),
        pytest.param(
            b'{"model":"tiny","prompt":"hi","temperature":1e-400,"top_p":1.0}', id="a number that rounds to 0"
        ),
        pytest.param(GOOD + b" " * 1_000_000, id="a million spaces"),
    ],
)
def test_bodies_that_are_served(front: FrontEnd, body: bytes) -> None:
    (answer,) = talk(front, posted(body))
    assert answer.status == 200, answer.body


@pytest.mark.parametrize(
    "kind",
    ["", "text/plain", "application/x-www-form-urlencoded", "application/json; charset=latin-1", "x", "a/" * 2000],
)
def test_the_content_type_does_not_matter(front: FrontEnd, kind: str) -> None:
    headers = [f"Content-Length: {len(GOOD)}", *([f"Content-Type: {kind}"] if kind else [])]
    assert talk(front, posted(GOOD, *headers))[0].status == 200


def test_a_compressed_body_is_no_json(front: FrontEnd) -> None:
    import gzip

    body = gzip.compress(GOOD)
    answer = talk(front, posted(body, f"Content-Length: {len(body)}", "Content-Encoding: gzip"))[0]
    assert (answer.status, code(answer)) == (400, "invalid_json")


def chunks(*parts: bytes) -> bytes:
    return b"".join(b"%X\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(chunks(*(bytes([byte]) for byte in GOOD)), id="single bytes"),
        pytest.param(chunks(GOOD[:7], GOOD[7:]), id="two"),
        pytest.param(b"%x;name=value\r\n%b\r\n0\r\n\r\n" % (len(GOOD), GOOD), id="an extension"),
        pytest.param(b"%x\r\n%b\r\n0\r\nX-Trailer: 1\r\n\r\n" % (len(GOOD), GOOD), id="a trailer"),
        pytest.param(b"000%x\r\n%b\r\n0000\r\n\r\n" % (len(GOOD), GOOD), id="leading zeros"),
    ],
)
def test_chunked_bodies(front: FrontEnd, body: bytes) -> None:
    assert talk(front, posted(body, "Transfer-Encoding: chunked"))[0].status == 200


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        pytest.param(b"zz\r\n", ["Transfer-Encoding: chunked"], id="no hexadecimal size"),
        pytest.param(b"-1\r\n", ["Transfer-Encoding: chunked"], id="a negative size"),
        pytest.param(b"fffffffffffffffff\r\n", ["Transfer-Encoding: chunked"], id="a size over 64 bits"),
        pytest.param(b"2\r\n{}xx0\r\n\r\n", ["Transfer-Encoding: chunked"], id="a chunk longer than its size"),
        pytest.param(chunks(GOOD), ["Content-Length: 4", "Transfer-Encoding: chunked"], id="both framings"),
        pytest.param(GOOD, ["Content-Length: 4", f"Content-Length: {len(GOOD)}"], id="two lengths"),
        pytest.param(GOOD, ["Content-Length: +30"], id="a length with a sign"),
        pytest.param(GOOD, ["Content-Length: 99999999999999999999999"], id="a length over 64 bits"),
        pytest.param(GOOD, ["Content-Length: 0x1e"], id="a hexadecimal length"),
        pytest.param(GOOD, ["Content-Length : 30"], id="a space before the colon"),
        pytest.param(GOOD, [f"Content-Length: {len(GOOD)}", "Bad\0Name: 1"], id="a zero byte in a name"),
    ],
)
def test_broken_framing_ends_the_connection(front: FrontEnd, body: bytes, headers: list[str]) -> None:
    answer = talk(front, posted(body, *headers))[0]
    assert answer.status in (400, 413)
    assert answer.headers["connection"] == "close"
    code(answer)


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/v1/models/tiny", "/version", "/openapi.json", "/metrics"])
def test_head_is_get_without_a_body(front: FrontEnd, path: str) -> None:
    got, asked = talk(front, request(f"GET {path}"))[0], talk(front, request(f"HEAD {path}"), ("HEAD",))[0]
    assert (asked.status, asked.headers["content-type"]) == (got.status, got.headers["content-type"])
    if path != "/metrics":
        assert asked.headers["content-length"] == got.headers["content-length"]


@pytest.mark.parametrize("method", ["OPTIONS", "TRACE", "PUT", "PATCH", "DELETE", "PROPFIND"])
@pytest.mark.parametrize(
    ("path", "allowed"), [("/health", "GET, HEAD"), ("/v1/completions", "POST"), ("/v1/models/tiny", "GET, HEAD")]
)
def test_other_methods(front: FrontEnd, method: str, path: str, allowed: str) -> None:
    answer = talk(front, request(f"{method} {path}"))[0]
    assert (answer.status, code(answer), answer.headers["allow"]) == (405, "method_not_allowed", allowed)
    assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("/health?x=1&x=2&%ff", 200),
        ("/health?" + "q" * 10_000, 200),
        ("/health#part", 200),
        ("/v1/models?limit=5", 200),
        ("/v1/models/t%69ny", 200),
        ("/%76%31/models", 200),
        ("http://elsewhere/health", 200),
        ("/v1/models/", 404),
        ("/v1/completions/", 404),
        ("/health/", 404),
        ("//health", 404),
        ("/v1/../health", 404),
        ("/v1/models/..%2f..%2fhealth", 404),
        ("/v1/models/" + "m" * 10_000, 404),
        ("/v1/models/%ff%00", 404),
        ("/HEALTH", 404),
        ("/", 404),
        ("*", 404),
    ],
)
def test_paths(front: FrontEnd, target: str, status: int) -> None:
    answer = talk(front, request(f"GET {target}"))[0]
    assert answer.status == status
    if status == 404:
        assert code(answer) in ("unknown_url", "model_not_found")


@pytest.mark.parametrize("line", ["GET", "get /health", "G\xe9T /health", "GET /h ealth"])
def test_request_lines_that_are_none(front: FrontEnd, line: str) -> None:
    answer = talk(front, f"{line} HTTP/1.1\r\nHost: x\r\n\r\n".encode("latin-1"))[0]
    assert (answer.status, code(answer)) == (400, "invalid_http")


def test_expect_100_continue(front: FrontEnd) -> None:
    host, port = front.http.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as raw:
        raw.sendall(posted(b"", f"Content-Length: {len(GOOD)}", "Expect: 100-continue"))
        assert raw.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        raw.sendall(GOOD)
        assert raw.recv(1000).startswith(b"HTTP/1.1 200 OK\r\n")
    refused = talk(front, posted(b"", "Content-Length: 99999999", "Expect: 100-continue"))
    assert [one.status for one in refused] == [413], "the client is spared its body"
    together = talk(front, posted(GOOD, f"Content-Length: {len(GOOD)}", "Expect: 100-continue"))
    assert together[-1].status == 200


def test_requests_in_one_packet_are_answered_in_order(front: FrontEnd) -> None:
    kept = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
    first, second, third = talk(front, kept + kept + request("GET /v1/models/none"))
    assert [first.status, second.status, third.status] == [200, 200, 404]


def test_no_key_of_another_kind_breaks_anything(front: FrontEnd) -> None:
    """Without keys on the server whatever comes as one is ignored."""
    for value in ("Bearer", "Bearer  x", "Basic \xff", "x" * 8000):
        sent = request("GET /v1/models", f"Authorization: {value}")
        assert talk(front, sent)[0].status == 200


def test_model_of_the_answer_is_the_served_one(front: FrontEnd) -> None:
    answer = talk(front, posted(GOOD))[0]
    assert json.loads(answer.body)["model"] == MODEL
