"""Both programs with `--transport doca`, over a stand-in for DOCA's libraries: answers are those over shared memory."""

from __future__ import annotations

import os
import re
import shutil
import signal
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
from tests.peeping import open_to_others
from tests.transport.doca.build import SHIM_ADDRESS, shim_folder

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build the stand-in with")

LOST = "lost the connection to the arena"
DOWN = "down"
"""A file beside the log: while it is there, the stand-in's link is down."""
PROMPTS = ["one", "two two", "a longer prompt than the others, to be cut into several pieces"]


@pytest.fixture(scope="module")
def doca_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """Two workers before two runtimes, each with a session of its own with each."""
    options = f"--transport doca --rdma-address {SHIM_ADDRESS}"
    arguments = ("--gpus", "2", "--gpu-args", options, "--dpu-args", f"{options} --workers 2")
    folder = tmp_path_factory.mktemp("doca")
    environment = {"LD_LIBRARY_PATH": str(shim_folder()), "DOCA_SHIM_DOWN": str(folder / DOWN)}
    with serving(folder, str(tiny_model), "tiny", arguments, **environment) as started:
        eventually(lambda: is_ready(started), timeout=30)
        yield started


def is_ready(server: Serving) -> bool:
    """With both runtimes."""
    return httpx.get(f"{server.http}/ready").json() == {"status": "ready"}


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


def test_no_process_may_leave_a_core_file_or_be_looked_into(doca_server: Serving):
    """The limit is inherited; what counts where the core pattern is a pipe is not, so each process has to ask for it.
    `tests/rdma` shows what comes of a signal that would leave a core file."""
    modules = {"dpu_service.main": 1, "dpu_service.worker": 2, "gpu_runtime.main": 2, "gpu_runtime.chain.soft": 2}
    ours = psutil.Process(doca_server.process.pid).children(recursive=True)
    commands = {process.pid: process.cmdline() for process in ours}
    assert {name: sum(name in command for command in commands.values()) for name in modules} == modules
    for pid, command in commands.items():
        limits = Path(f"/proc/{pid}/limits").read_text()
        (line,) = [one for one in limits.splitlines() if one.startswith("Max core file size")]
        assert line.split()[-3:-1] == ["0", "0"], command
    starter = doca_server.process.pid  # knows no secret, and shows that others can be looked into
    assert open_to_others([starter, *commands]) == {starter}, commands


def test_connections_that_fail_give_way_to_new_sessions(doca_server: Serving):
    """By a completion with an error; and of what was there before, only the sessions are new."""
    log, down = doca_server.log, doca_server.log.with_name(DOWN)
    before, ends = ask(doca_server, prompt=PROMPTS[0]), 4  # of two workers with two runtimes
    workers = pids_of(doca_server, "dpu_service.worker")
    opened, lost = (log.read_text().count(words) for words in ("session opened", LOST))
    down.touch()
    eventually(lambda: log.read_text().count(LOST) >= lost + ends, timeout=30)
    assert not is_ready(doca_server)
    down.unlink()
    eventually(lambda: is_ready(doca_server), timeout=30)
    assert [ask(doca_server, prompt=PROMPTS[0]) for _ in range(4)] == [before] * 4
    assert log.read_text().count("session opened") >= opened + ends
    assert pids_of(doca_server, "dpu_service.worker") == workers


def pids_of(server: Serving, module: str) -> set[int]:
    """Of the processes that run a module."""
    below = psutil.Process(server.process.pid).children(recursive=True)
    return {process.pid for process in below if module in process.cmdline()}


def test_workers_that_die_get_new_sessions(doca_server: Serving):
    before = ask(doca_server, prompt=PROMPTS[1])
    workers = pids_of(doca_server, "dpu_service.worker")
    assert len(workers) == 2
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
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
