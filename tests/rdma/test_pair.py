"""Both programs on machines of their own, joined by Soft-RoCE: `blink-dpu` on one, `blink-gpu` with the soft GPU on the
other. A client outside of both gets the same completion as from one machine with shared memory.
"""

from __future__ import annotations

import shutil
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.serving import free_port, serving
from tests.rdma.guest import Guest, Machine, amd64, arm64, cable, door
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
$PYTHON -m dpu_service.main --runtime 10.9.0.2:50051 --workers 1 --http off --https 10.0.2.15:8443 \
  --runtime-ca {certs}/ca.pem --runtime-cert {certs}/front-end.pem --runtime-key {certs}/front-end-key.pem \
  --transport verbs --rdma-address 10.9.0.1 --device-timeout 60 --data-dir /tmp/front &
kill_workers() {{
  for p in /proc/[0-9]*; do
    case $(tr '\\0' ' ' <$p/cmdline) in *dpu_service.worker*) kill -9 ${{p#/proc/}}; echo "killed a worker";; esac
  done 2>/dev/null
}}
while sleep 0.2; do
  if rm /mnt/out/kill 2>/dev/null; then kill_workers; fi
  if rm /mnt/out/cut 2>/dev/null; then ip link set eth0 down; sleep 4; ip link set eth0 up; echo "cut the link"; fi
done
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


@pytest.fixture(scope="module", params=["amd64", "arm64"])
def front_machine(request: pytest.FixtureRequest, certificates: Path) -> tuple[Machine, Path]:
    """The front end's machine, and where it finds the certificates: like the runtime's, or like a DPU."""
    if request.param == "amd64":
        return amd64(768), certificates
    if shutil.which("qemu-system-aarch64") is None:
        pytest.skip("qemu-system-aarch64 is not installed")
    return arm64(768, certs=certificates), Path("/mnt/certs")


@dataclass
class Pair:
    """Both machines, and where the front end is reached from outside."""

    front: Guest
    runtime: Guest
    url: str

    def completes(self) -> bool:
        """Whether a request is answered now."""
        try:
            return "text" in complete(self.url)
        except (AssertionError, httpx.HTTPError):
            return False

    def recovers(self, seconds: float) -> bool:
        """Whether requests are answered again within a time."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.completes():
                return True
            time.sleep(0.5)
        return False


@pytest.fixture(scope="module")
def pair(
    folder: Path, model: Path, certificates: Path, front_machine: tuple[Machine, Path], over_shared_memory: object
) -> Iterator[Pair]:
    machine, seen = front_machine
    port, wire = free_port(), folder / f"cable-{machine.console}"
    runtime = Guest(amd64(2048), RUNTIME.format(model=model, certs=certificates), cable(wire, server=True, number=2))
    front: Guest | None = None
    try:
        while not wire.exists():
            assert runtime.running, runtime.said()
            time.sleep(0.05)
        devices = [*cable(wire, server=False, number=1), *door(port, 8443)]
        front = Guest(machine, FRONT_END.format(certs=seen), devices)
        runtime.wait_for("serving tiny", BOOT_SECONDS)
        front.wait_for("ready https://", BOOT_SECONDS)
        yield Pair(front, runtime, f"https://127.0.0.1:{port}")
    finally:
        for guest in (front, runtime):
            if guest is not None:
                print(guest.said()[-3000:])
                guest.stop()


@pytest.mark.timeout(2 * BOOT_SECONDS)
def test_a_completion_through_two_machines_is_that_of_one(pair: Pair, over_shared_memory: dict[str, Any]) -> None:
    choice = complete(pair.url)
    assert choice["text"] == over_shared_memory["text"]
    assert choice["logprobs"]["tokens"] == over_shared_memory["logprobs"]["tokens"]
    ours, theirs = (one["logprobs"]["token_logprobs"] for one in (choice, over_shared_memory))
    assert ours == pytest.approx(theirs, abs=1e-3)


def test_a_worker_that_dies_is_replaced_by_one_with_a_new_connection(pair: Pair) -> None:
    (pair.front.out / "kill").touch()
    pair.front.wait_for("killed a worker", ANSWER_SECONDS)
    assert pair.recovers(ANSWER_SECONDS)
    assert pair.front.said().count("session opened") == 2


def test_a_link_that_was_cut_is_taken_up_again(pair: Pair) -> None:
    (pair.front.out / "cut").touch()
    pair.front.wait_for("cut the link", ANSWER_SECONDS)
    assert pair.recovers(ANSWER_SECONDS)
    assert "lost the connection to the arena" in pair.front.said()
