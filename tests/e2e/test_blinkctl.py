"""`blinkctl` as people and scripts use it, against real runtimes, and the certificates that it makes."""

from __future__ import annotations

import datetime
import json
import os
import re
import signal
import ssl
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from grpc_health.v1 import health_pb2, health_pb2_grpc

from blink_proto import control_pb2
from blink_proto.control_pb2_grpc import ControlStub
from blink_proto.grpc_settings import CLIENT_OPTIONS
from tests.control import ADMINISTRATOR, READER, SecureRuntime, ctl, make_certificates, secure_runtime
from tests.e2e.serving import free_port
from tests.tiny import save_tiny


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureRuntime]:
    """Without a model."""
    folder = tmp_path_factory.mktemp("idle")
    with secure_runtime(make_certificates(folder / "certs"), folder) as running:
        yield running


def test_certificates(tmp_path: Path) -> None:
    """Modes, lives, purposes, names; a second `init` changes nothing, and `renew` keeps names and authority."""
    folder = tmp_path / "made"
    made = json.loads(
        ctl("-o", "json", "certs", "init", "--dir", str(folder), "--host", "gpu.example", "--days", "90").stdout
    )
    assert [one["name"] for one in made] == ["ca", "server", "front-end", "administrator", "reader"]
    assert {one["name"]: one["role"] for one in made if one["role"]} == {
        name: name for name in ("front-end", "administrator", "reader")
    }
    assert folder.stat().st_mode & 0o777 == 0o700
    for path in folder.iterdir():
        assert path.stat().st_mode & 0o777 == (0o600 if path.name.endswith("-key.pem") else 0o644), path
    now = datetime.datetime.now(datetime.UTC)
    for name, days, purpose in (
        ("ca", 3650, None),
        ("server", 90, x509.ExtendedKeyUsageOID.SERVER_AUTH),  # type: ignore[attr-defined]
        ("reader", 90, x509.ExtendedKeyUsageOID.CLIENT_AUTH),  # type: ignore[attr-defined]
    ):
        read = x509.load_pem_x509_certificate((folder / f"{name}.pem").read_bytes())
        left = read.not_valid_after_utc - now
        assert datetime.timedelta(days=days - 1) < left <= datetime.timedelta(days=days)
        assert read.extensions.get_extension_for_class(x509.BasicConstraints).value.ca is (purpose is None)
        if purpose:
            assert list(read.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == [purpose]
        key = read.public_key()
        assert isinstance(key, ec.EllipticCurvePublicKey)
        assert key.curve.name == "secp256r1"
        context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
        context.load_cert_chain(folder / f"{name}.pem", folder / f"{name}-key.pem")
    assert {"gpu.example", "localhost", "127.0.0.1", "::1"} <= set(made[1]["names"])
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert "already" in ctl("certs", "init", "--dir", str(folder), status=1).stderr
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before

    ctl("certs", "renew", "server", "reader", "--dir", str(folder))
    changed = {path.name for path in folder.iterdir() if path.read_bytes() != before[path.name]}
    assert changed == {"server.pem", "server-key.pem", "reader.pem", "reader-key.pem"}
    renewed = json.loads(ctl("-o", "json", "certs", "show", "--dir", str(folder)).stdout)
    assert renewed[1]["names"] == made[1]["names"]
    assert "gpu.example" not in json.dumps(
        ctl("-o", "json", "certs", "renew", "--host", "b.example", BLINK_CERTS=str(folder)).stdout
    )


def test_certificates_that_cannot_be_made(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    assert "neither a host name" in ctl("certs", "init", "--dir", str(folder), "--host", "a b", status=1).stderr
    assert "is not there" in ctl("certs", "show", "--dir", str(folder), status=1).stderr
    ctl("certs", "init", "--dir", str(folder))
    assert "no such certificate: x" in ctl("certs", "renew", "x", "--dir", str(folder), status=1).stderr
    (folder / "ca-key.pem").write_bytes((folder / "reader-key.pem").read_bytes())
    assert "is not the key" in ctl("certs", "renew", "--dir", str(folder), status=1).stderr
    (folder / "ca-key.pem").unlink()
    assert "needed to sign" in ctl("certs", "renew", "--dir", str(folder), status=1).stderr


def test_options_come_from_the_environment_too(idle: SecureRuntime) -> None:
    folder = idle.certificates
    files = {"BLINK_CA": "ca.pem", "BLINK_CERT": "reader.pem", "BLINK_KEY": "reader-key.pem"}
    environment = {name: str(folder / file) for name, file in files.items()}
    said = ctl("status", BLINK_RUNTIME=idle.address, BLINK_OUTPUT="json", **environment)
    assert json.loads(said.stdout)["state"]["phase"] == "PHASE_IDLE"
    short = {"BLINK_RUNTIME": f"localhost:{idle.port}", "BLINK_CERTS": str(folder)}
    assert json.loads(ctl("-o", "json", "list", **short).stdout) == []
    assert "reader" in ctl("drain", BLINK_ROLE=READER, status=4, **short).stderr


def test_statuses_and_messages(idle: SecureRuntime, tmp_path: Path) -> None:
    """One line for everything that can go wrong, and a status to tell it by."""
    told = ["--runtime", idle.address]
    assert "if it uses TLS" in ctl(*told, "status", status=3).stderr
    other = make_certificates(tmp_path / "other")
    assert "cannot reach" in ctl(*told, "--certs", str(other), "status", status=3).stderr
    assert "cannot reach" in ctl("--runtime", f"127.0.0.1:{free_port()}", "status", status=3).stderr
    assert "NOT_FOUND" in idle.ctl("unload", "absent", status=1).stderr
    assert "not for the role reader" in idle.ctl("unload", "absent", role=READER, status=4).stderr
    idle.ctl("load", status=2)
    wrong_name = ["--runtime", idle.address, "--certs", str(idle.certificates), "--server-name", "other.example"]
    assert "cannot reach" in ctl(*wrong_name, "status", status=3).stderr
    right_name = [*wrong_name[:-1], "localhost"]
    assert "idle" in ctl(*right_name, "status").stdout
    assert idle.ctl("sessions", "--help").stderr == ""


def test_a_runtime_that_does_not_answer(idle: SecureRuntime) -> None:
    idle.process.send_signal(signal.SIGSTOP)
    try:
        assert "in time" in idle.ctl("--timeout", "1", "status", status=3).stderr
    finally:
        idle.process.send_signal(signal.SIGCONT)
    assert "idle" in idle.ctl("status").stdout


def test_a_watcher_notices_a_runtime_that_hangs(idle: SecureRuntime) -> None:
    """By pings, with the real settings but for their times, which are a hundredth."""
    folder = idle.certificates
    names = ("ca.pem", "reader-key.pem", "reader.pem")
    credentials = grpc.ssl_channel_credentials(*((folder / name).read_bytes() for name in names))
    options = [
        (name, value // 100 if "keepalive" in name or "ping_timeout" in name else value)
        for name, value in CLIENT_OPTIONS
    ]
    with grpc.secure_channel(idle.address, credentials, options=options) as channel:
        states = ControlStub(channel).WatchState(control_pb2.WatchStateRequest(), timeout=30)
        assert next(states).phase == control_pb2.PHASE_IDLE
        idle.process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        try:
            with pytest.raises(grpc.RpcError) as lost:
                next(states)
        finally:
            idle.process.send_signal(signal.SIGCONT)
        assert lost.value.code() is grpc.StatusCode.UNAVAILABLE
        assert time.monotonic() - began < 10


def test_who_watches_is_told_that_the_runtime_ends(tmp_path: Path) -> None:
    """Every kind of stream ends with a status, and the runtime's log says nothing of cancelled calls."""
    with secure_runtime(make_certificates(tmp_path / "certs"), tmp_path) as runtime:
        channel = runtime.channel(READER)
        streams = [ControlStub(channel).WatchState(control_pb2.WatchStateRequest(), timeout=30) for _ in range(3)]
        streams.append(health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=30))
        for stream in streams:
            next(stream)
        runtime.process.send_signal(signal.SIGTERM)
        for stream in streams:
            with pytest.raises(grpc.RpcError) as end:
                list(stream)
            assert (end.value.code(), end.value.details()) == (
                grpc.StatusCode.UNAVAILABLE,
                "the runtime is ending",
            )
        assert runtime.process.wait(20) == 0
        channel.close()
    log = (tmp_path / "runtime.log").read_text()
    assert not re.search("Traceback|Cancelled", log), log


def test_version() -> None:
    """The package's."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert ctl("--version").stdout == f"blinkctl {project['version']}\n"


def test_completion() -> None:
    """What a shell asks for when somebody presses the tab key."""

    def offered(words: str) -> set[str]:
        code = "import sys; sys.argv[0] = 'blinkctl'; from blink_deploy.ctl import main; main()"
        environment = {
            **os.environ,
            "_BLINKCTL_COMPLETE": "complete_bash",
            "COMP_WORDS": f"blinkctl {words}",
            "COMP_CWORD": str(len(words.split(" "))),
        }
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
        return set(ran.stdout.split())

    assert offered("dr") == {"drain"}
    assert offered("") >= {
        "status",
        "list",
        "sessions",
        "load",
        "unload",
        "drain",
        "resume",
        "watch",
        "health",
        "certs",
        "doctor",
    }
    assert offered("certs ") == {"init", "issue", "renew", "show"}
    assert offered("sessions ") == {"end"}
    assert offered("certs issue ") == {"front-end", "administrator", "reader"}
    assert "--replace" in offered("load --re")


def refused(folder: Path) -> dict[str, tuple[Path, str, str]]:
    """Models that cannot be loaded: (folder, status, words that must be in the message)."""
    made: dict[str, tuple[Path, str, str]] = {}

    def model(name: str, code: str, words: str) -> Path:
        made[name] = save_tiny(folder / name, "llama"), code, words
        return folder / name

    config = model("other-architecture", "INVALID_ARGUMENT", "GPTNeoXForCausalLM") / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": ["GPTNeoXForCausalLM"]}))
    (model("no-weights", "INVALID_ARGUMENT", "model.safetensors") / "model.safetensors").unlink()
    (model("no-tokenizer", "INVALID_ARGUMENT", "tokenizer.json") / "tokenizer.json").unlink()
    (model("broken-tokenizer", "INVALID_ARGUMENT", "tokenizer.json") / "tokenizer.json").write_text("{}")
    (model("no-config", "INVALID_ARGUMENT", "config.json") / "config.json").unlink()
    made["absent"] = folder / "absent", "INVALID_ARGUMENT", "absent"
    return made


def test_loading(tmp_path: Path, tiny_model: Path) -> None:
    """What is refused and why; two equal loads at once are one; health and states follow."""
    certificates = make_certificates(tmp_path / "certs")
    with secure_runtime(certificates, tmp_path, "--audit-log", str(tmp_path / "audit")) as runtime:
        for source, code, words in refused(tmp_path / "models").values():
            message = runtime.ctl("load", str(source), "--name", "tiny", status=1).stderr
            assert code in message
            assert words in message
        assert "idle" in runtime.ctl("status").stdout

        stub, health = runtime.stub(ADMINISTRATOR), health_pb2_grpc.HealthStub(runtime.channel(READER))
        request = control_pb2.LoadModelRequest(source=str(tiny_model), name="tiny")
        first = stub.LoadModel(request, timeout=60)
        assert not next(first).done
        steps: list[control_pb2.LoadModelProgress] = []
        second = threading.Thread(target=lambda: steps.extend(stub.LoadModel(request, timeout=60)))
        second.start()
        with pytest.raises(grpc.RpcError) as other:
            list(stub.LoadModel(control_pb2.LoadModelRequest(source=str(tiny_model), name="b"), timeout=60))
        assert other.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        first.cancel()  # who asked first goes away
        second.join()
        assert steps[-1].done
        assert steps[-1].model.name == "tiny"
        loaded = json.loads(runtime.ctl("-o", "json", "load", str(tiny_model), "--name", "tiny").stdout)
        assert loaded == json.loads(runtime.ctl("-o", "json", "list").stdout)[0]
        assert loaded["loaded_unix_seconds"] == str(steps[-1].model.loaded_unix_seconds), "it was loaded once"

        seen = list(watch_health(health, "tiny", lambda: runtime.ctl("drain", "--grace", "5")))
        assert seen == [health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING]
        assert "not serving" in runtime.ctl("health", status=1).stdout
        assert "not serving" in runtime.ctl("health", "tiny", status=1).stdout
        runtime.ctl("health", "blink.control.v1.Control")
        runtime.ctl("resume")
        assert "serving" in runtime.ctl("health", "tiny", role=READER).stdout
        watched = runtime.ctl("-o", "json", "watch", "--seconds", "1").stdout.splitlines()
        assert [json.loads(line)["phase"] for line in watched] == ["PHASE_SERVING"]
        runtime.ctl("unload", "tiny", "--grace", "1")
        runtime.ctl("health", "tiny", status=1)
        runtime.ctl("health")
        assert "NOT_FOUND" in runtime.ctl("health", "never-loaded", status=1).stderr
    outcomes = [json.loads(line) for line in (tmp_path / "audit").read_text().splitlines()]
    assert [line["outcome"] for line in outcomes if line["method"] == "LoadModel"].count("CANCELLED") == 1


def watch_health(health: health_pb2_grpc.HealthStub, service: str, then: object) -> Iterator[int]:
    """The status now, and the one after `then`."""
    states = health.Watch(health_pb2.HealthCheckRequest(service=service), timeout=30)
    yield next(states).status
    then()  # type: ignore[operator]
    yield next(states).status
    states.cancel()
