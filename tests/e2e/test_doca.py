"""Both programs with `--transport doca`, over a stand-in for DOCA's libraries: answers are those over shared memory."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.serving import Serving, serving
from tests.front_end import eventually
from tests.transport.doca.build import SHIM_ADDRESS, shim_folder

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build the stand-in with")

PROMPTS = ["one", "two two", "a longer prompt than the others, to be cut into several pieces"]


@pytest.fixture(scope="module")
def doca_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """Two workers before two runtimes, each with a session of its own with each."""
    options = f"--transport doca --rdma-address {SHIM_ADDRESS}"
    arguments = ("--gpus", "2", "--gpu-args", options, "--dpu-args", f"{options} --workers 2")
    before = os.environ.get("LD_LIBRARY_PATH")
    os.environ["LD_LIBRARY_PATH"] = str(shim_folder())
    try:
        with serving(tmp_path_factory.mktemp("doca"), str(tiny_model), "tiny", arguments) as started:
            ready = f"{started.http}/ready"
            eventually(lambda: httpx.get(ready).json() == {"status": "ready"}, timeout=30)
            yield started
    finally:
        if before is None:
            del os.environ["LD_LIBRARY_PATH"]
        else:
            os.environ["LD_LIBRARY_PATH"] = before


def ask(server: Serving, seconds: float = 60, **fields: object) -> str:
    body = {"model": "tiny", "max_tokens": 24, "temperature": 0, "ignore_eos": True, **fields}
    answer = httpx.post(f"{server.http}/v1/completions", json=body, timeout=seconds)
    answer.raise_for_status()
    return answer.json()["choices"][0]["text"]


def test_answers_are_those_over_shared_memory(doca_server: Serving, tiny_server: Serving):
    for prompt in PROMPTS:
        answer = ask(tiny_server, prompt=prompt)
        assert [ask(doca_server, prompt=prompt) for _ in range(2)] == [answer] * 2
    said = httpx.get(f"{doca_server.http}/metrics").text
    assert all(re.search(rf'blink_runtime_requests_total\{{chosen="\w+",runtime="{k}"\}} [1-9]', said) for k in (0, 1))


def test_a_stream_goes_on_while_the_runtime_is_stopped(doca_server: Serving):
    control = doca_server.child("gpu_runtime.main")
    alone = ask(doca_server, prompt=PROMPTS[0], max_tokens=200)
    control.suspend()
    try:
        assert ask(doca_server, prompt=PROMPTS[0], max_tokens=200) == alone
    finally:
        control.resume()


def test_no_process_may_leave_a_core_file(doca_server: Serving):
    """Nor be looked into: see `tests/rdma` for what comes of a signal that would leave one."""
    modules = ("dpu_service.main", "dpu_service.worker", "gpu_runtime.main", "gpu_runtime.chain.soft")
    for module in modules:
        limits = Path(f"/proc/{doca_server.child(module).pid}/limits").read_text()
        (line,) = [one for one in limits.splitlines() if one.startswith("Max core file size")]
        assert line.split()[-3:-1] == ["0", "0"], module


def test_workers_that_die_get_new_sessions(doca_server: Serving):
    before = ask(doca_server, prompt=PROMPTS[1])
    workers = [
        process
        for process in psutil.Process(doca_server.process.pid).children(recursive=True)
        if "dpu_service.worker" in process.cmdline()
    ]
    assert len(workers) == 2
    for worker in workers:
        worker.kill()
    deadline = time.monotonic() + 30
    while True:
        try:
            assert ask(doca_server, prompt=PROMPTS[1]) == before
            return
        except httpx.HTTPError:
            assert time.monotonic() < deadline, "no worker came back"
            time.sleep(0.2)


def test_nothing_secret_is_in_logs_and_metrics(doca_server: Serving):
    """Exports of the stand-in begin with marks and its pages' names; here they are in every form on their way."""
    said = doca_server.log.read_text()
    assert "session opened" in said
    assert "Traceback" not in said
    for path in ("/metrics", "/health", "/ready", "/version", "/v1/models"):
        said += httpx.get(f"{doca_server.http}{path}").text
    command = [sys.executable, "-m", "blink_deploy.ctl", "--runtime", doca_server.control]
    for what in (["status"], ["sessions"], ["-o", "json", "sessions"], ["-o", "json", "status"]):
        said += subprocess.run([*command, *what], capture_output=True, text=True, check=True).stdout
    assert "doca" in said
    for secret in (b"SHIMMEM\0/doca-shim-", b"SHIMCON\0/doca-shim-"):
        encoded = (secret.decode(), b64encode(secret)[:20].decode(), secret.hex(), repr(secret)[2:-1])
        assert not [form for form in encoded if form in said]
    assert "doca-shim" not in said
