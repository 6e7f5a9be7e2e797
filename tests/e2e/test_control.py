"""The control plane: gRPC calls and `blinkctl`, against a real runtime."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from blink_proto import arena, control_pb2
from blink_proto.control_pb2_grpc import ControlStub
from tests.e2e.serving import free_port

CLI = [sys.executable, "-m", "blink_deploy.ctl"]


@contextmanager
def runtime(*arguments: str) -> Iterator[tuple[str, subprocess.Popen]]:
    """A GPU runtime without a front end."""
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "gpu_runtime.main", "--listen", address, "--grace", "5", *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        grpc.channel_ready_future(grpc.insecure_channel(address)).result(timeout=60)
        yield address, process
    finally:
        process.kill()
        process.communicate()


def ctl(address: str, *arguments: str, status: int = 0) -> subprocess.CompletedProcess:
    ran = subprocess.run([*CLI, "--runtime", address, *arguments], capture_output=True, text=True, timeout=120)
    assert ran.returncode == status, ran.stderr
    return ran


def code_of(call, request) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as refused:
        list(answer) if hasattr(answer := call(request, timeout=60), "__next__") else answer
    return refused.value.code()


def test_a_model_comes_and_goes(tiny_model: Path) -> None:
    """Load with progress, load again at once, refuse another, open a session, unload, load under a new epoch."""
    with runtime() as (address, process):
        stub = ControlStub(grpc.insecure_channel(address))
        opening = control_pb2.OpenSessionRequest(
            front_end="test", channels=1, transport="shm", layout_hash=arena.LAYOUT_HASH
        )
        assert code_of(stub.OpenSession, opening) == grpc.StatusCode.FAILED_PRECONDITION
        assert json.loads(ctl(address, "--output", "json", "list").stdout) == []

        request = control_pb2.LoadModelRequest(source=str(tiny_model), name="tiny")
        steps = list(stub.LoadModel(request, timeout=60))
        assert steps[-1].done
        assert not any(step.done for step in steps[:-1])
        assert (steps[-1].model.name, steps[-1].model.vocab_size) == ("tiny", 300)
        begin = time.monotonic()
        assert list(stub.LoadModel(request, timeout=60))[-1].done
        assert time.monotonic() - begin < 2
        other = control_pb2.LoadModelRequest(source=str(tiny_model), name="other")
        assert code_of(stub.LoadModel, other) == grpc.StatusCode.FAILED_PRECONDITION

        session = stub.OpenSession(opening, timeout=10)
        assert session.epoch == 1
        assert list(session.channels) == [0]
        assert session.layout.layout_hash == arena.LAYOUT_HASH
        assert list(stub.OpenSession(opening, timeout=10).channels) == [0]

        ctl(address, "unload", "tiny", "--grace", "1")
        assert code_of(stub.OpenSession, opening) == grpc.StatusCode.FAILED_PRECONDITION
        assert "loaded tiny" in ctl(address, "load", str(tiny_model), "--name", "tiny").stdout
        assert stub.OpenSession(opening, timeout=10).epoch == 2
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_refusals(tiny_model: Path, tmp_path: Path) -> None:
    """Each wrong call gets the status that the contract names, and the runtime goes on."""
    with runtime("--model", str(tiny_model), "--name", "tiny", "--channels", "2") as (address, _):
        stub = ControlStub(grpc.insecure_channel(address))
        wait_serving(stub)

        def opening(**changes) -> control_pb2.OpenSessionRequest:
            fields = {"front_end": "a", "channels": 1, "transport": "shm", "layout_hash": arena.LAYOUT_HASH}
            return control_pb2.OpenSessionRequest(**fields | changes)

        status = grpc.StatusCode
        assert code_of(stub.OpenSession, opening(layout_hash=1)) == status.FAILED_PRECONDITION
        assert code_of(stub.OpenSession, opening(transport="pigeon")) == status.INVALID_ARGUMENT
        assert code_of(stub.OpenSession, opening(front_end="")) == status.INVALID_ARGUMENT
        assert code_of(stub.OpenSession, opening(channels=0)) == status.INVALID_ARGUMENT
        assert code_of(stub.OpenSession, opening(channels=3)) == status.RESOURCE_EXHAUSTED
        assert code_of(stub.UnloadModel, control_pb2.UnloadModelRequest(name="x")) == status.NOT_FOUND
        assert code_of(stub.FetchTokenizer, control_pb2.FetchTokenizerRequest(model="x")) == status.NOT_FOUND
        for source in ("", "/nowhere", str(tmp_path)):
            request = control_pb2.LoadModelRequest(source=source, name="n")
            assert code_of(stub.LoadModel, request) == status.INVALID_ARGUMENT
        assert stub.GetServerInfo(control_pb2.GetServerInfoRequest()).state.phase == control_pb2.PHASE_SERVING


def wait_serving(stub: ControlStub) -> None:
    for state in stub.WatchState(control_pb2.WatchStateRequest(), timeout=60):
        if state.phase == control_pb2.PHASE_SERVING:
            return


def test_too_little_memory(tiny_model: Path) -> None:
    with runtime("--kv-tokens", "2000000000") as (address, _):
        stub = ControlStub(grpc.insecure_channel(address))
        request = control_pb2.LoadModelRequest(source=str(tiny_model))
        assert code_of(stub.LoadModel, request) == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_tokenizer_arrives_whole(tiny_model: Path) -> None:
    with runtime("--model", str(tiny_model), "--name", "tiny") as (address, _):
        stub = ControlStub(grpc.insecure_channel(address))
        wait_serving(stub)
        chunks = stub.FetchTokenizer(control_pb2.FetchTokenizerRequest(model="tiny"), timeout=20)
        content = b"".join(chunk.content for chunk in chunks if chunk.file == "tokenizer.json")
        assert content == (tiny_model / "tokenizer.json").read_bytes()


def test_health_reflection_and_states(tiny_model: Path) -> None:
    """The standard services are there; a chain that is killed shows in WatchState, health and exit status."""
    import psutil

    with runtime("--model", str(tiny_model), "--name", "tiny") as (address, process):
        channel = grpc.insecure_channel(address)
        stub, health = ControlStub(channel), health_pb2_grpc.HealthStub(channel)
        wait_serving(stub)
        serving = health_pb2.HealthCheckResponse.SERVING
        for service in ("", "blink.control.v1.Control", "tiny"):
            assert health.Check(health_pb2.HealthCheckRequest(service=service), timeout=5).status == serving
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        answer = next(
            reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([request]), timeout=5)
        )
        names = [service.name for service in answer.list_services_response.service]
        assert {"blink.control.v1.Control", "grpc.health.v1.Health"} <= set(names)

        states = stub.WatchState(control_pb2.WatchStateRequest(), timeout=60)
        assert next(states).phase == control_pb2.PHASE_SERVING
        (chain,) = psutil.Process(process.pid).children()
        chain.kill()
        state = next(states)
        assert state.phase == control_pb2.PHASE_FAILED
        assert "status -9" in state.detail
        assert process.wait(30) == 1


def test_drain_and_resume(tiny_model: Path) -> None:
    with runtime("--model", str(tiny_model), "--name", "tiny") as (address, _):
        wait_serving(ControlStub(grpc.insecure_channel(address)))
        assert "drained" in ctl(address, "drain", "--grace", "5").stdout
        assert json.loads(ctl(address, "--output", "json", "status").stdout)["state"]["phase"] == "PHASE_DRAINING"
        ctl(address, "resume")
        assert "serving" in ctl(address, "status").stdout


def test_blinkctl_without_a_runtime() -> None:
    ran = ctl(f"127.0.0.1:{free_port()}", "status", status=3)
    assert "UNAVAILABLE" in ran.stderr


def test_an_address_that_is_taken() -> None:
    with runtime() as (address, _):
        ran = subprocess.run(
            [sys.executable, "-m", "gpu_runtime.main", "--listen", address],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert ran.returncode == 1
        assert "cannot listen" in ran.stderr


def test_the_arena_goes_with_the_runtime(tiny_model: Path) -> None:
    """Nothing stays in /dev/shm after an orderly end; what a killed runtime left is removed by the next one."""
    folder = Path("/dev/shm")

    def arenas() -> set[str]:
        return {path.name for path in folder.glob("blink-arena-*")}

    before = arenas()
    with runtime("--model", str(tiny_model)) as (address, process):
        wait_serving(ControlStub(grpc.insecure_channel(address)))
        left = arenas() - before
        assert len(left) == 2
        process.kill()
        process.wait()
    with runtime("--model", str(tiny_model)) as (address, process):
        wait_serving(ControlStub(grpc.insecure_channel(address)))
        assert not left & arenas()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert not arenas() - before
