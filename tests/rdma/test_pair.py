"""Both programs on machines of their own, joined by Soft-RoCE: `blink-dpu` on one, `blink-gpu` with the soft GPU on the
other. A client outside of both gets the same completion as from one machine with shared memory.
"""

from __future__ import annotations

import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.serving import free_port, serving
from tests.rdma.guest import Guest, Machine, cable, door
from tests.tiny import save_tiny

BOOT_SECONDS = 300.0
ANSWER_SECONDS = 120.0
REQUEST = {"model": "tiny", "prompt": "RDMA ", "max_tokens": 24, "temperature": 0, "ignore_eos": True, "logprobs": 2}

RUNTIME = """\
ip addr add 10.9.0.2/24 dev eth0 && ip link set eth0 up && rdma link add rxe0 type rxe netdev eth0 || exit 90
exec $PYTHON -m gpu_runtime.main --model {model} --name tiny --listen 10.9.0.2:50051 --lease-timeout 60 \
  --tls-cert {certs}/server.pem --tls-key {certs}/server-key.pem --client-ca {certs}/ca.pem \
  --transport verbs --rdma-address 10.9.0.2
"""
FRONT_END = """\
ip addr add 10.9.0.1/24 dev eth0 && ip link set eth0 up && rdma link add rxe0 type rxe netdev eth0 || exit 90
ip addr add 10.0.2.15/24 dev eth1 && ip link set eth1 up || exit 91
exec $PYTHON -m dpu_service.main --runtime 10.9.0.2:50051 --workers 1 --http off --https 10.0.2.15:8443 \
  --runtime-ca {certs}/ca.pem --runtime-cert {certs}/front-end.pem --runtime-key {certs}/front-end-key.pem \
  --transport verbs --rdma-address 10.9.0.1 --device-timeout 60 --data-dir /tmp/front
"""


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """With a short name: the cable is a socket in it."""
    with tempfile.TemporaryDirectory(prefix="blink-pair-") as made:
        yield Path(made)


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return save_tiny(folder / "model", "llama")


@pytest.fixture(scope="module")
def certificates(folder: Path) -> Path:
    made = folder / "certs"
    command = [sys.executable, "-m", "blink_deploy.ctl", "certs", "init", "--dir", str(made), "--host", "10.9.0.2"]
    subprocess.run(command, check=True, capture_output=True)
    return made


def complete(url: str) -> dict[str, Any]:
    """The completion's choice."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # made by the guest for itself
    answer = httpx.post(f"{url}/v1/completions", json=REQUEST, verify=context, timeout=ANSWER_SECONDS)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


@pytest.fixture(scope="module")
def over_shared_memory(folder: Path, model: Path) -> dict[str, Any]:
    with serving(folder, str(model), "tiny") as server:
        return complete(server.https)


@pytest.mark.timeout(BOOT_SECONDS + 2 * ANSWER_SECONDS)
def test_a_completion_goes_through_two_machines(
    folder: Path, model: Path, certificates: Path, over_shared_memory: dict[str, Any]
) -> None:
    port, words = free_port(), {"model": model, "certs": certificates}
    wire = folder / "cable"
    runtime = Guest(Machine(memory=2048), RUNTIME.format(**words), cable(wire, server=True, number=2))
    front: Guest | None = None
    try:
        while not wire.exists():
            assert runtime.running, runtime.said()
            time.sleep(0.05)
        devices = [*cable(wire, server=False, number=1), *door(port, 8443)]
        front = Guest(Machine(memory=768), FRONT_END.format(**words), devices)
        runtime.wait_for("serving tiny", BOOT_SECONDS)
        front.wait_for("ready https://", BOOT_SECONDS)
        choice = complete(f"https://127.0.0.1:{port}")
        assert choice["text"] == over_shared_memory["text"]
        assert choice["logprobs"]["tokens"] == over_shared_memory["logprobs"]["tokens"]
        ours, theirs = (one["logprobs"]["token_logprobs"] for one in (choice, over_shared_memory))
        assert ours == pytest.approx(theirs, abs=1e-3)
    finally:
        for guest in (front, runtime):
            if guest is not None:
                print(guest.said()[-3000:])
                guest.stop()
