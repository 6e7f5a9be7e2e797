"""The load generator's client against a real server with known delays and known faults."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.bench.client import Ask, Client, first_model
from tests.bench.connection import Target
from tests.bench.record import Record
from tests.bench.scripted_server import CLOSE, DONE, HEAD, Piece, chunked, event, serving, token, usage, whole

FINE: list[Piece] = [(0.0, HEAD), (0.0, token("a")), (0.0, token("b", "stop") + usage(3, 2) + DONE)]


def ask_once(pieces: Sequence[Piece], **ask: Any) -> Record:
    async def run() -> Record:
        async with serving(lambda number, body: pieces) as server:
            client = Client(Target.from_url(server.url), Ask(model="m", **ask))
            record = await client.measure("hello", due=asyncio.get_running_loop().time())
            client.close()
            return record

    return asyncio.run(run())


def test_known_delays_are_measured():
    # First token after 100 ms, then four gaps of 40 ms: TTFT 100 ms, TPOT 40 ms.
    pieces: list[Piece] = [(0.0, HEAD), (0.1, token("a"))]
    pieces += [(0.04, token("b"))] * 3
    pieces += [(0.04, token("c", "length")), (0.0, usage(7, 5) + DONE)]
    record = ask_once(pieces)
    assert (record.error, record.status, record.finish_reason) == ("", 200, "length")
    assert (record.prompt_tokens, record.output_tokens, record.tokens_counted) == (7, 5, True)
    # A busy machine can only add to a delay, and client and server share one event loop.
    assert record.ttft is not None
    assert 0.099 <= record.ttft < 0.3
    assert record.tpot is not None
    assert 0.039 <= record.tpot < 0.1
    assert len(record.gaps) == 4


def test_usage_counts_tokens_that_share_a_chunk():
    record = ask_once([(0.0, HEAD), (0.0, token("a")), (0.12, token("bcd", "stop")), (0.0, usage(1, 4) + DONE)])
    assert (record.output_tokens, len(record.chunk_times)) == (4, 2)
    assert record.tpot is not None
    assert 0.039 <= record.tpot < 0.1


def test_without_usage_chunks_are_counted():
    record = ask_once([(0.0, HEAD), (0.0, token("a") + token("b")), (0.0, token("", "stop") + DONE)])
    assert (record.error, record.output_tokens, record.tokens_counted) == ("", 2, False)


def test_chat_roles_are_not_tokens():
    role = event({"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
    text = event({"choices": [{"delta": {"content": "hi"}, "finish_reason": None}]})
    end = event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    record = ask_once([(0.0, HEAD + role), (0.08, text), (0.0, end + usage(5, 1) + DONE)], api="chat")
    assert (record.error, len(record.chunk_times)) == ("", 1)
    assert record.ttft is not None
    assert record.ttft >= 0.079


def test_events_may_be_cut_anywhere():
    body = HEAD + token("ä€") + token("b", "stop") + usage(3, 2) + DONE
    record = ask_once([(0.0, body[i : i + 1]) for i in range(len(body))])
    assert (record.error, record.output_tokens, record.finish_reason) == ("", 2, "stop")


def test_a_whole_answer():
    answer = {
        "choices": [{"text": "abc", "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 4, "completion_tokens": 3},
    }
    record = ask_once([(0.05, whole("200 OK", answer))], stream=False)
    assert (record.error, record.prompt_tokens, record.output_tokens, record.ttft) == ("", 4, 3, None)
    assert 0.049 <= record.latency < 0.25


ERROR = event({"error": {"message": "the runtime ended", "code": "unavailable"}})

FAULTS: dict[str, tuple[str, list[Piece]]] = {
    "an error in the stream": ("error_event", [(0.0, HEAD + token("a")), (0.0, ERROR + DONE)]),
    "an error, then nothing": ("error_event", [(0.0, HEAD + token("a")), (0.0, ERROR), (0.0, CLOSE)]),
    "a cut stream": ("cut", [(0.0, HEAD + token("a")), (0.0, CLOSE)]),
    "a cut event": ("cut", [(0.0, HEAD + token("a")[:20]), (0.0, CLOSE)]),
    "cut before any byte": ("cut", [(0.0, CLOSE)]),
    "no [DONE]": ("no_done", [(0.0, HEAD + token("a", "stop") + chunked(b""))]),
    "no finish_reason": ("no_finish_reason", [(0.0, HEAD + token("a") + DONE)]),
    "not JSON": ("bad_answer", [(0.0, HEAD + event("{oops") + DONE)]),
    "wrong types": ("bad_answer", [(0.0, HEAD + event({"choices": 7}) + DONE)]),
    "not HTTP": ("cut", [(0.0, b"220 ready\r\n")]),
    "refused": ("http_429", [(0.0, whole("429 Too Many Requests", {"error": {"message": "later"}}))]),
    "broken": ("http_500", [(0.0, whole("500 Internal Server Error", "oops"))]),
    "too slow": ("timeout", [(0.0, HEAD + token("a")), (5.0, DONE)]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_a_failure_of_its_kind(fault: str):
    kind, pieces = FAULTS[fault]
    record = ask_once(pieces, timeout=0.3)
    assert not record.ok
    assert record.error == kind
    assert record.detail


def test_an_error_keeps_its_first_kind():
    # The error explains the failure; that the stream then ended without [DONE] does not.
    assert ask_once([(0.0, HEAD + ERROR + chunked(b""))]).error == "error_event"


def test_a_whole_answer_with_an_error_is_a_failure():
    record = ask_once([(0.0, whole("200 OK", {"error": {"message": "no"}}))], stream=False)
    assert record.error == "error_answer"


def test_nobody_listens():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        target = Target.from_url(f"http://127.0.0.1:{unused.getsockname()[1]}")
        record = asyncio.run(Client(target, Ask(model="m")).measure("x", due=0.0))
    assert record.error == "connect"


def test_bodies_and_connections():
    async def run() -> None:
        async with serving(lambda number, body: FINE) as server:
            client = Client(
                Target.from_url(server.url + "/v1"), Ask(model="m", max_tokens=9, extra={"ignore_eos": True})
            )
            for _ in range(3):
                assert (await client.measure("hello", due=0.0)).ok
            client.close()
        assert server.connections == 1
        assert server.bodies[0] == {
            "model": "m",
            "prompt": "hello",
            "max_tokens": 9,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }

    asyncio.run(run())


def test_an_idle_connection_that_the_server_closed_is_replaced():
    async def run() -> None:
        async with serving(
            lambda number, body: FINE if number == 0 else [(0.0, CLOSE)] if number == 1 else FINE
        ) as server:
            client = Client(Target.from_url(server.url), Ask(model="m"))
            assert (await client.measure("one", due=0.0)).ok
            assert (await client.measure("two", due=0.0)).ok
            client.close()
        assert [body["prompt"] for body in server.bodies] == ["one", "two", "two"]

    asyncio.run(run())


def test_first_model():
    async def run(answer: bytes) -> str:
        async with serving(lambda number, body: [(0.0, answer)]) as server:
            return await first_model(Target.from_url(server.url))

    assert asyncio.run(run(whole("200 OK", {"data": [{"id": "tiny"}, {"id": "other"}]}))) == "tiny"
    with pytest.raises(ValueError, match="no model"):
        asyncio.run(run(whole("200 OK", {"data": []})))


@pytest.mark.parametrize("url", ["ftp://host", "127.0.0.1:8443", "https://", "http:///v1"])
def test_a_url_must_be_http(url: str):
    with pytest.raises(ValueError, match="URL"):
        Target.from_url(url)


def self_signed(folder: Path) -> ssl.SSLContext:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = (
        builder.serial_number(1).not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
    )
    pem = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    pem += key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "both.pem").write_bytes(pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "both.pem")
    return context


def test_tls_is_checked_unless_insecure(tmp_path: Path):
    async def run(insecure: bool) -> Record:
        async with serving(lambda number, body: FINE, tls=self_signed(tmp_path)) as server:
            client = Client(Target.from_url(server.url, insecure), Ask(model="m"))
            record = await client.measure("x", due=0.0)
            client.close()
            return record

    assert asyncio.run(run(insecure=True)).ok
    assert asyncio.run(run(insecure=False)).error == "connect"
