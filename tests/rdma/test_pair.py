"""Both programs on machines of their own, joined by Soft-RoCE: `blink-dpu` on one, `blink-gpu` with the soft GPU on the
other. A client outside of both gets the same completion as from one machine with shared memory; streams that are open
when something breaks end with an error event, and what comes after is right again.

The tests go on from each other: each leaves both programs serving, but for the last one.
"""

from __future__ import annotations

import json
import re
import shutil
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
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
TRY_SECONDS = 30.0
"""Clocks of two machines on too few cores drift apart by minutes, and with them all that has a time limit."""
pytestmark = pytest.mark.timeout(2 * BOOT_SECONDS)
LONG = 480
REQUEST = {"model": "tiny", "prompt": "RDMA ", "max_tokens": 24, "temperature": 0, "ignore_eos": True, "logprobs": 2}

RUNTIME = """\
ip addr add 10.9.0.2/24 dev eth0 && ip link set eth0 up && rdma link add rxe0 type rxe netdev eth0 || exit 90
start() {{
  $PYTHON -m gpu_runtime.main --model {model} --name tiny --listen 10.9.0.2:50051 --lease-timeout 60 \
    --tls-cert {certs}/server.pem --tls-key {certs}/server-key.pem --client-ca {certs}/ca.pem \
    --transport verbs --rdma-address 10.9.0.2 &
}}
start
while sleep 0.2; do
  if rm /mnt/out/start 2>/dev/null; then start; fi
  if [ -e /mnt/out/kill ]; then end_processes; fi
  if rm /mnt/out/look 2>/dev/null; then
    $PYTHON -m blink_deploy.ctl --runtime 10.9.0.2:50051 --certs {certs} --timeout 60 -o json sessions
    show_secrets
  fi
done
"""
COMMON = """\
mkdir /tmp/cores; outside=/proc/1/root
printf '#!/bin/busybox sh\\n/bin/busybox cat >/new/tmp/cores/$1\\n' >$outside/keep
chmod +x $outside/keep; echo '|/keep %p' >/proc/sys/kernel/core_pattern
end_processes() {
  read signal program </mnt/out/kill; rm /mnt/out/kill; rm -f /tmp/cores/*
  found=()
  for p in /proc/[0-9]*; do
    case $(tr '\\0' ' ' <$p/cmdline) in *"-m $program"*) found+=(${p#/proc/});; esac
  done 2>/dev/null
  kill -$signal ${found[@]}; echo "SIG$signal for ${#found[@]} of $program"
  sleep 100 & kill -ABRT $!; wait $!; sleep 1; echo "$(ls /tmp/cores | wc -l) core files after SIG$signal"
}
show_secrets() {
  { rdma -dd resource show qp; rdma -dd resource show mr; } >/mnt/out/secrets; echo "secrets shown"
}
"""
"""What both machines' scripts can do. Cores are dumped, through a pipe, which regards no limit: of what is ended, only
of the one process that is not ours."""
FRONT_END = """\
ip addr add 10.9.0.1/24 dev eth0 && ip link set eth0 up && rdma link add rxe0 type rxe netdev eth0 || exit 90
ip addr add 10.0.2.15/24 dev eth1 && ip link set eth1 up || exit 91
$PYTHON -m dpu_service.main --runtime 10.9.0.2:50051 --workers 1 --http off --https 10.0.2.15:8443 \
  --runtime-ca {certs}/ca.pem --runtime-cert {certs}/front-end.pem --runtime-key {certs}/front-end-key.pem \
  --transport verbs --rdma-address 10.9.0.1 --verbs-binding {binding} --device-timeout 60 \
  --data-dir /tmp/front &
while sleep 0.2; do
  if [ -e /mnt/out/kill ]; then end_processes; fi
  if rm /mnt/out/look 2>/dev/null; then show_secrets; fi
  if rm /mnt/out/cut 2>/dev/null; then ip link set eth0 down; echo "cut the link"; fi
  if rm /mnt/out/mend 2>/dev/null; then ip link set eth0 up; echo "mended the link"; fi
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


def _no_check() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # made by the guest for itself
    return context


def complete(url: str, seconds: float = ANSWER_SECONDS) -> dict[str, Any]:
    """The completion's choice."""
    answer = httpx.post(f"{url}/v1/completions", json=REQUEST, verify=_no_check(), timeout=seconds)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


@pytest.fixture(scope="module")
def over_shared_memory(folder: Path, model: Path) -> dict[str, Any]:
    with serving(folder, str(model), "tiny") as server:
        return complete(server.https)


@dataclass(frozen=True)
class Front:
    """The front end's machine, where it finds the certificates, and the package that it calls verbs by."""

    machine: Machine
    certificates: Path
    binding: str = "ibverbs"


@pytest.fixture(scope="module", params=["amd64", "arm64"])
def front_machine(request: pytest.FixtureRequest, certificates: Path) -> Front:
    """Like the runtime's, or like a DPU."""
    if request.param == "amd64":
        return Front(amd64(768), certificates)
    if shutil.which("qemu-system-aarch64") is None:
        pytest.skip("qemu-system-aarch64 is not installed")
    return Front(arm64(768, certs=certificates), Path("/mnt/certs"), "pyverbs")


@dataclass
class Pair:
    """Both machines, and where the front end is reached from outside."""

    front: Guest
    runtime: Guest
    url: str

    def interrupted(self, interrupt: Callable[[], object]) -> list[str]:
        """Events of a stream amidst which something happens."""
        events: list[str] = []
        body = {**REQUEST, "max_tokens": LONG, "stream": True}
        with httpx.stream(
            "POST", f"{self.url}/v1/completions", json=body, verify=_no_check(), timeout=ANSWER_SECONDS
        ) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    events.append(line.removeprefix("data: "))
                    if len(events) == 3:
                        interrupt()
        return events

    def refuses(self) -> bool:
        """Whether a new request is told at once to come again."""
        answer = httpx.post(f"{self.url}/v1/completions", json=REQUEST, verify=_no_check(), timeout=ANSWER_SECONDS)
        return answer.status_code == 503 and "retry-after" in answer.headers

    def completes(self) -> bool:
        """Whether a request is answered now."""
        try:
            return "text" in complete(self.url, TRY_SECONDS)
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
    folder: Path, model: Path, certificates: Path, front_machine: Front, over_shared_memory: object
) -> Iterator[Pair]:
    machine, port = front_machine.machine, free_port()
    wire = folder / f"cable-{machine.console}"
    runtime = Guest(
        amd64(2048), COMMON + RUNTIME.format(model=model, certs=certificates), cable(wire, server=True, number=2)
    )
    front: Guest | None = None
    try:
        while not wire.exists():
            assert runtime.running, runtime.said()
            time.sleep(0.05)
        devices = [*cable(wire, server=False, number=1), *door(port, 8443)]
        front = Guest(
            machine, COMMON + FRONT_END.format(certs=front_machine.certificates, binding=front_machine.binding), devices
        )
        runtime.wait_for("serving tiny", BOOT_SECONDS)
        front.wait_for("ready https://", BOOT_SECONDS)
        yield Pair(front, runtime, f"https://127.0.0.1:{port}")
    finally:
        for guest in (front, runtime):
            if guest is not None:
                print(guest.said()[-3000:])
                guest.stop()


def test_a_completion_through_two_machines_is_that_of_one(pair: Pair, over_shared_memory: dict[str, Any]) -> None:
    choice = complete(pair.url)
    assert choice["text"] == over_shared_memory["text"]
    assert choice["logprobs"]["tokens"] == over_shared_memory["logprobs"]["tokens"]
    ours, theirs = (one["logprobs"]["token_logprobs"] for one in (choice, over_shared_memory))
    assert ours == pytest.approx(theirs, abs=1e-3)


def ended_by_an_error(events: list[str]) -> bool:
    """Some of the answer came, then an error, then the end of the stream."""
    return len(events) < LONG and events[-1] == "[DONE]" and "error" in json.loads(events[-2])


@pytest.mark.parametrize("front_machine", ["amd64"], indirect=True)
def test_a_runtime_that_is_killed_ends_streams_and_its_successor_is_found(pair: Pair, over_shared_memory: Any) -> None:
    assert ended_by_an_error(pair.interrupted(lambda: tell(pair.runtime, "kill", "KILL gpu_runtime.")))
    pair.runtime.wait_for("SIGKILL for 2 of gpu_runtime.", ANSWER_SECONDS)
    assert pair.refuses()
    tell(pair.runtime, "start")
    assert pair.recovers(BOOT_SECONDS)
    assert complete(pair.url)["text"] == over_shared_memory["text"]
    assert pair.front.said().count("session opened") == 2


def test_a_worker_that_dies_is_replaced_by_one_with_a_new_connection(pair: Pair) -> None:
    before = pair.front.said().count("session opened")
    tell(pair.front, "kill", "KILL dpu_service.worker")
    pair.front.wait_for("SIGKILL for 1 of dpu_service.worker", ANSWER_SECONDS)
    assert pair.recovers(BOOT_SECONDS)
    assert pair.front.said().count("session opened") == before + 1


def test_a_link_that_was_cut_ends_streams_and_is_taken_up_again(pair: Pair, over_shared_memory: Any) -> None:
    assert ended_by_an_error(pair.interrupted(lambda: tell(pair.front, "cut")))
    assert pair.refuses()
    tell(pair.front, "mend")
    assert pair.recovers(BOOT_SECONDS)
    assert complete(pair.url)["text"] == over_shared_memory["text"]
    assert "lost the connection to the arena" in pair.front.said()


def numbers_of(told: str) -> set[int]:
    """Queue pairs' and packets' numbers, keys and addresses, as the kernel tells them; but for small ones, which are
    found anywhere."""
    found = re.findall(r"(?:lqpn|rqpn|rq-psn|sq-psn|rkey|lkey|iova) (0x[0-9a-f]+|\d+)", told)
    return {number for number in (int(one, 0) for one in found) if number > 99_999}


@pytest.mark.parametrize("front_machine", ["amd64"], indirect=True)
def test_nothing_secret_is_said(pair: Pair) -> None:
    numbers: set[int] = set()
    for guest in (pair.front, pair.runtime):
        tell(guest, "look")
        guest.wait_for("secrets shown", ANSWER_SECONDS)
        numbers |= numbers_of((guest.out / "secrets").read_text())
    assert len(numbers) >= 2, "of the one queue pair's packets, either way"
    assert "opened_unix_seconds" in pair.runtime.said(), "blinkctl has shown a session"
    said = pair.front.said() + pair.runtime.said()
    for path in ("/metrics", "/health", "/ready", "/v1/models", "/version", "/v1/nothing"):
        said += httpx.get(f"{pair.url}{path}", verify=_no_check()).text
    shown = [number for number in numbers if re.search(rf"(?i)\b(?:{number}|(?:0x)?0*{number:x})\b", said)]
    assert shown == []


@pytest.mark.parametrize("program", ["dpu_service.", "gpu_runtime."])
def test_no_core_is_dumped_of_what_aborts(pair: Pair, program: str) -> None:
    guest = pair.front if program == "dpu_service." else pair.runtime
    tell(guest, "kill", f"ABRT {program}")
    guest.wait_for("core files after SIGABRT", ANSWER_SECONDS)
    assert f"SIGABRT for 2 of {program}" in guest.said(), "control process and chain, or supervisor and worker"
    assert "1 core files after SIGABRT" in guest.said(), "that of a process that is not ours, and no other"


def tell(guest: Guest, what: str, more: str = "") -> None:
    """A word to a guest's script."""
    (guest.out / f"{what}.part").write_text(f"{more}\n")
    (guest.out / f"{what}.part").rename(guest.out / what)
