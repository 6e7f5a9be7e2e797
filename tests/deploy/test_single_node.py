"""The single-node chart's command, run for real with its own environment, probes and grace time."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.deploy.charts import Object, one, pods, with_values
from tests.e2e.serving import free_port
from tests.tiny import save_tiny

START_SECONDS = 120


@pytest.fixture
def container(tmp_path: Path) -> Object:
    model = save_tiny(tmp_path / "model", "llama")
    values = {
        "model": {"path": str(model), "name": "tiny"},
        "https": {"port": free_port()},
        "kvTokens": 2048,
        "gpuArgs": "--threads 1",
    }
    found = with_values("blink-single", tmp_path, values)
    (made,) = pods(found)[0]["spec"]["containers"]
    made["grace"] = pods(found)[0]["spec"]["terminationGracePeriodSeconds"]
    made["service"] = one(found, "Service")
    return made


def start(container: Object, root: Path, log: Path) -> subprocess.Popen[bytes]:
    """The container's program, with its mounts as folders of the test."""
    mounts = {mount["mountPath"]: root / mount["name"] for mount in container["volumeMounts"]}
    for folder in mounts.values():
        folder.mkdir(parents=True, exist_ok=True)
    environment = {entry["name"]: _inside(entry["value"], mounts) for entry in container["env"]}
    environment |= {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ}
    assert container["command"] == ["blink", "up"]
    command = [sys.executable, "-m", "blink_deploy.main", "up", *container["args"]]
    command += ["--grpc-port", str(free_port())]  # a pod has its loopback for itself
    with log.open("wb") as output:
        return subprocess.Popen(command, env=environment, stdout=output, stderr=output, cwd=root)


def _inside(path: str, mounts: dict[str, Path]) -> str:
    (mount,) = [place for place in mounts if path == place or path.startswith(f"{place}/")]
    return str(mounts[mount]) + path.removeprefix(mount)


def probe(container: Object, name: str) -> int:
    """The status that the kubelet would see; 0 for no answer."""
    call = container[name]["httpGet"]
    port = {port["name"]: port["containerPort"] for port in container["ports"]}[call["port"]]
    try:
        return httpx.get(
            f"{call['scheme'].lower()}://127.0.0.1:{port}{call['path']}", verify=False, timeout=5
        ).status_code
    except httpx.HTTPError:
        return 0


def wait_ready(container: Object, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while probe(container, "readinessProbe") != 200:
        assert process.poll() is None, log.read_text(errors="replace")
        assert time.monotonic() < deadline, log.read_text(errors="replace")
        time.sleep(0.1)


def test_the_pods_program_serves_and_ends(container: Object, tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = start(container, tmp_path / "root", log)
    try:
        wait_ready(container, process, log)
        assert probe(container, "livenessProbe") == probe(container, "startupProbe") == 200
        port = container["ports"][0]["containerPort"]
        request = {"model": "tiny", "prompt": "hello", "max_tokens": 4, "temperature": 0}
        answer = httpx.post(f"https://127.0.0.1:{port}/v1/completions", json=request, verify=False, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] in range(1, 5)
        process.send_signal(signal.SIGTERM)
        assert process.wait(container["grace"]) == 0
    finally:
        if process.poll() is None:
            process.kill()
    # What it wrote lies in its volumes.
    assert (tmp_path / "root" / "cache" / "data" / "blink").is_dir()
    assert not re.search(r"Traceback|PRIVATE KEY", log.read_text(errors="replace"))
