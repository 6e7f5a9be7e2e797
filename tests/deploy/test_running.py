"""The charts' command lines, run for real on this machine."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.certificates import Authority
from tests.deploy.charts import Object, is_hook, pods, with_values
from tests.deploy.running import Running, mounts, start
from tests.e2e.serving import free_port
from tests.front_end import eventually
from tests.tiny import save_tiny

REQUEST = {"model": "tiny", "prompt": "hello", "max_tokens": 4, "temperature": 0}
MODEL = {"path": "/models/tiny", "name": "tiny", "volume": {"emptyDir": {}}}
OVER_SHM = ("--transport", "--rdma-address")
"""Left out: what joins two machines. The default joins two programs of one."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), "llama")


@contextmanager
def killed_at_the_end(*running: Running) -> Iterator[None]:
    try:
        yield
    finally:
        for each in running:
            each.kill()


def container_of(found: list[Object]) -> tuple[Object, int]:
    """The container and the pod's grace time."""
    (pod,) = pods(found)
    (container,) = pod["spec"]["containers"]
    return container, pod["spec"]["terminationGracePeriodSeconds"]


def test_the_single_pods_program_serves_and_ends(model: Path, tmp_path: Path) -> None:
    values = {"model": MODEL, "https": {"port": free_port()}, "gpuArgs": "--threads 1", "kvTokens": 2048}
    found = with_values("blink-single", tmp_path, values)
    container, grace = container_of(found)
    _volume(container, tmp_path, model)
    # A pod has its loopback for itself.
    served = start(container, tmp_path, more=["--grpc-port", str(free_port())])
    with killed_at_the_end(served):
        served.wait_ready()
        assert served.probe("livenessProbe")
        assert served.probe("startupProbe")
        url = f"https://127.0.0.1:{container['ports'][0]['containerPort']}/v1/completions"
        answer = httpx.post(url, json=REQUEST, verify=False, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] in range(1, 5)
        assert "'completion_tokens'" in helm_test(found, "https://" + url.split("/")[2])
        assert served.stop(grace) == 0
    # What it wrote lies in its volumes.
    assert (tmp_path / "cache" / "data" / "blink").is_dir()
    assert not re.search(r"Traceback|PRIVATE KEY", served.log)


def helm_test(found: list[Object], base: str) -> str:
    """Runs what `helm test` runs, at another address; what it prints."""
    (hook,) = [each for each in found if is_hook(each)]
    (container,) = hook["spec"]["containers"]
    script, _, mode = container["args"]
    command = [sys.executable, "-c", script, base, mode]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_both_charts_programs_work_together_by_their_secrets(model: Path, tmp_path: Path) -> None:
    """Mutual TLS on the control plane, certificates and API keys as the guide tells to make them."""
    certs, control = tmp_path / "blink-certs", free_port()
    _run("blink_deploy.ctl", "certs", "init", "--dir", str(certs), "--host", "localhost")
    gpu = _gpu(model, tmp_path, certs, control)
    dpu, key = _dpu(tmp_path, certs, control)
    with killed_at_the_end(gpu, dpu):
        gpu.wait_ready(pause=1.0)
        dpu.wait_ready()
        assert dpu.probe("livenessProbe")
        base = f"https://127.0.0.1:{dpu.container['ports'][0]['containerPort']}/v1/completions"
        with httpx.Client(verify=False, timeout=60) as client:
            assert client.post(base, json=REQUEST).status_code == 401
            answer = client.post(base, json=REQUEST, headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == 200, answer.text
        assert "Traceback" not in gpu.log
        assert gpu.stop(60) == 0
        eventually(lambda: not dpu.probe("readinessProbe"))  # it looks at the heartbeat every half second
        assert dpu.stop(60) == 0
    assert "Traceback" not in dpu.log
    for each in (gpu, dpu):
        assert key not in each.log
        assert not re.search(r"PRIVATE KEY|plain text", each.log)


def _gpu(model: Path, tmp_path: Path, certs: Path, control: int) -> Running:
    values = {
        "device": "cpu",
        "model": MODEL,
        "runtime": {"kvTokens": 2048, "memoryShare": 0.9, "extraArgs": ["--threads", "1"]},
        "controlPlane": {"address": "127.0.0.1", "port": control, "tls": {"readerSecretName": "reader"}},
    }
    container, _ = container_of(with_values("blink-gpu", tmp_path, values))
    root = tmp_path / "gpu"
    _volume(container, root, model)
    folders = mounts(container, root)
    _secret(folders["/etc/blink/control"], certs, "server", authority=True)
    _secret(folders["/etc/blink/reader"], certs, "reader")
    return start(container, root, without=OVER_SHM)


def _dpu(tmp_path: Path, certs: Path, control: int) -> tuple[Running, str]:
    values = {
        "runtime": {"addresses": [f"localhost:{control}"]},
        "https": {"port": free_port()},
        "service": {"workers": 1, "unready": 0},
    }
    container, _ = container_of(with_values("blink-dpu", tmp_path, values))
    root = tmp_path / "dpu"
    folders = mounts(container, root)
    _secret(folders["/etc/blink/control"], certs, "front-end", authority=True)
    pair = Authority(tmp_path).sign("api.example.com")
    for folder, files in (("/etc/blink/https", {"tls.crt": pair.certificate, "tls.key": pair.key}),):
        folders[folder].mkdir(parents=True)
        for name, source in files.items():
            (folders[folder] / name).write_bytes(source.read_bytes())
    said = _run("dpu_service.main", "keys", "new", "--tenant", "acme")
    key, entry = re.search(r"once: (\S+)\n.*?(\[tenants.*)", said, re.DOTALL).groups()
    folders["/etc/blink/keys"].mkdir(parents=True)
    (folders["/etc/blink/keys"] / "keys.toml").write_text(entry)
    return start(container, root, without=OVER_SHM), key


def _volume(container: Object, root: Path, model: Path) -> None:
    """The volume that holds the model."""
    folder = mounts(container, root)["/models"]
    folder.mkdir(parents=True)
    (folder / "tiny").symlink_to(model)


def _secret(folder: Path, certs: Path, name: str, *, authority: bool = False) -> None:
    """The files of a secret, from the folder that `blinkctl certs init` makes."""
    folder.mkdir(parents=True)
    (folder / "tls.crt").write_bytes((certs / f"{name}.pem").read_bytes())
    (folder / "tls.key").write_bytes((certs / f"{name}-key.pem").read_bytes())
    if authority:
        (folder / "ca.crt").write_bytes((certs / "ca.pem").read_bytes())


def _run(module: str, *arguments: str) -> str:
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
