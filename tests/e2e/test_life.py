"""Full rings, ends of all kinds, broken front ends: with a tiny model, each test on a server of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import ssl
import subprocess
import time
from pathlib import Path

import grpc
import httpx
import numpy as np
import psutil

from blink_proto import arena, control_pb2
from blink_proto.control_pb2_grpc import ControlStub
from tests.e2e.serving import Serving, serving


def body(tokens: int, prompt: str = "hello", **more) -> dict:
    return {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}


def test_more_requests_than_the_rings_hold(tiny_server: Serving) -> None:
    """Every request is answered, with its tokens or with 503 and Retry-After at once; afterwards all is free."""

    async def one(client: httpx.AsyncClient, index: int) -> tuple[int, float]:
        begin = time.monotonic()
        answer = await client.post(f"{tiny_server.http}/v1/completions", json=body(20 + index % 30))
        if answer.status_code == 503:
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["message"]
        else:
            assert answer.json()["usage"]["completion_tokens"] == 20 + index % 30
        return answer.status_code, time.monotonic() - begin

    async def run() -> list[tuple[int, float]]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=200, limits=limits) as client:
            return await asyncio.gather(*(one(client, index) for index in range(700)))

    answers = asyncio.run(run())
    codes = [code for code, _ in answers]
    assert set(codes) == {200, 503}
    assert codes.count(200) >= 256
    tiny_server.wait_metric("blink_device_sequences_running", 0)
    assert httpx.post(f"{tiny_server.http}/v1/completions", json=body(5)).status_code == 200


def test_sigterm_at_load(tiny_server: Serving) -> None:
    """What runs finishes, and both programs end with status 0."""

    async def run() -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=60) as client:
            url = f"{tiny_server.http}/v1/completions"
            tasks = [asyncio.create_task(client.post(url, json=body(300, f"say {i}"))) for i in range(16)]
            while await asyncio.to_thread(tiny_server.metric, "blink_device_sequences_running") < 16:
                await asyncio.sleep(0.02)
            tiny_server.process.send_signal(signal.SIGTERM)
            return await asyncio.gather(*tasks)

    answers = asyncio.run(run())
    assert [answer.status_code for answer in answers] == [200] * 16
    assert {answer.json()["usage"]["completion_tokens"] for answer in answers} == {300}
    assert tiny_server.process.wait(30) == 0


def test_a_chain_that_dies(tiny_server: Serving) -> None:
    """Open streams end with an error event, readiness fails, and the runtime says so by its exit status."""
    chain = tiny_server.child("gpu_runtime.chain.soft")
    events = []
    url = f"{tiny_server.http}/v1/completions"
    with httpx.stream("POST", url, json=body(480, stream=True), timeout=30) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                events.append(line.removeprefix("data: "))
                if len(events) == 2:
                    chain.kill()
    assert events[-1] == "[DONE]"
    assert "error" in json.loads(events[-2])
    assert tiny_server.process.wait(40) == 1
    assert "the chain ended" in tiny_server.log.read_text()


def test_a_stopped_front_end_loses_its_lease(tiny_model: Path, tmp_path: Path) -> None:
    """The device ends the sequences of a worker that no longer beats; the worker, resumed, serves again."""
    with serving(tmp_path, str(tiny_model), "tiny") as server:
        worker = server.child("dpu_service.worker")
        page = telemetry_of(server)
        client = httpx.Client(timeout=60)
        with client.stream("POST", f"{server.http}/v1/completions", json=body(480, stream=True)) as answer:
            next(answer.iter_lines())
            worker.suspend()
            deadline = time.monotonic() + 40
            while int(page["running"]) + int(page["waiting"]) > 0:
                assert time.monotonic() < deadline
                time.sleep(0.1)
            worker.resume()
        deadline = time.monotonic() + 20
        while httpx.post(f"{server.http}/v1/completions", json=body(5), timeout=20).status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.2)


def test_two_workers_with_your_own_certificate(tiny_model: Path, tmp_path: Path) -> None:
    """Each worker owns a channel, both serve, and HTTPS shows the certificate that was brought along."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "2",
    ]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True)
    own = ("--tls-cert", str(cert), "--tls-key", str(key), "--workers", "2")
    with serving(tmp_path, str(tiny_model), "tiny", own) as server:
        context = ssl.create_default_context(cafile=str(cert))
        for _ in range(40):  # a connection each: the kernel spreads them over the workers
            assert httpx.post(f"{server.https}/v1/completions", json=body(3), verify=context).status_code == 200
        session = open_session(server, "observer")
        outbound, (_, layout) = mapped(session, "outbound"), layouts(session)
        starts = [layout.channel_offset(channel) for channel in range(2)]
        words = [outbound[at : at + arena.ChannelOut.itemsize].view(arena.ChannelOut)[0] for at in starts]
        assert [int(word["live"]) for word in words] == [1, 1]
        assert all(int(word["submit_read"]) > 0 for word in words)
        assert sum(int(word["submit_read"]) for word in words) == 40


def test_nothing_outlives_a_killed_starter(tiny_server: Serving) -> None:
    """`blink up` killed hard: the programs that it started end by themselves."""
    children = psutil.Process(tiny_server.process.pid).children(recursive=True)
    assert len(children) >= 4  # runtime, chain, supervisor, worker
    tiny_server.process.kill()
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive


def test_an_idle_server_takes_little_cpu(tiny_server: Serving) -> None:
    """All processes together, over three idle seconds: under a tenth of a core (2 to 4 % is usual)."""
    processes = [psutil.Process(tiny_server.process.pid)]
    processes += processes[0].children(recursive=True)
    time.sleep(1.5)

    def spent() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    before = spent()
    time.sleep(3)
    assert (spent() - before) / 3 < 0.10


def open_session(server: Serving, name: str) -> control_pb2.OpenSessionResponse:
    with grpc.insecure_channel(server.control) as channel:
        return ControlStub(channel).OpenSession(
            control_pb2.OpenSessionRequest(front_end=name, channels=1, transport="shm", layout_hash=arena.LAYOUT_HASH),
            timeout=10,
        )


def mapped(session: control_pb2.OpenSessionResponse, region: str) -> np.ndarray:
    name = json.loads(session.transport_blob)[region].removeprefix("/")
    return np.memmap(f"/dev/shm/{name}", mode="r+")


def layouts(session: control_pb2.OpenSessionResponse) -> tuple[arena.InboundLayout, arena.OutboundLayout]:
    names = ("channels", "submit_slots", "cancel_slots", "log_slots", "heap_tokens")
    sizes = arena.Sizes(**{name: getattr(session.layout, name) for name in names})
    return arena.InboundLayout(sizes), arena.OutboundLayout(sizes)


def telemetry_of(server: Serving) -> np.ndarray:
    session = open_session(server, "observer")
    start = layouts(session)[1].telemetry_offset
    return mapped(session, "outbound")[start : start + arena.Telemetry.itemsize].view(arena.Telemetry)[0]


def test_random_bytes_of_a_broken_front_end(tiny_server: Serving) -> None:
    """Garbage with a valid commit word costs an error record in its own channel; others are not disturbed."""
    session = open_session(tiny_server, "broken")
    channel, (inbound_layout, outbound_layout) = session.channels[0], layouts(session)
    inbound, outbound = mapped(session, "inbound"), mapped(session, "outbound")
    base, theirs = inbound_layout.channel_offset(channel), outbound_layout.channel_offset(channel)
    out = outbound[theirs : theirs + arena.ChannelOut.itemsize].view(arena.ChannelOut)[0]
    control = inbound[base : base + arena.ChannelIn.itemsize].view(arena.ChannelIn)[0]
    reference = httpx.post(f"{tiny_server.http}/v1/completions", json=body(40)).json()["choices"][0]["text"]
    control["lease"] = int(out["lease"]) + 1
    while not out["live"]:
        time.sleep(0.01)
    count = 50
    for position in range(count):
        start = base + inbound_layout.channel_submit_offset + position * arena.SubmitRecord.itemsize
        record = inbound[start : start + arena.SubmitRecord.itemsize]
        record[:] = np.frombuffer(os.urandom(128), np.uint8)
        record.view(arena.SubmitRecord)[0]["commit"] = arena.pack_commit_word(1, int(control["lease"]))
    answer = httpx.post(f"{tiny_server.http}/v1/completions", json=body(40)).json()
    assert answer["choices"][0]["text"] == reference
    deadline = time.monotonic() + 10
    while int(out["submit_read"]) < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert int(out["rejected"]) == count
    log = theirs + outbound_layout.channel_log_offset
    records = outbound[log : log + count * arena.TokenRecord.itemsize].view(arena.TokenRecord)
    _, kinds, finishes, positions = arena.unpack_token_head(records["head"])
    assert set(kinds.tolist()) == {arena.RecordKind.REJECT}
    assert set(finishes.tolist()) == {arena.Finish.ERROR}
    assert positions.tolist() == list(range(count))
    assert tiny_server.process.poll() is None
