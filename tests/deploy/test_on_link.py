"""A pod's program finds the address of its link."""

from __future__ import annotations

import subprocess
import sys


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "blink_deploy.on_link", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_address_takes_its_place() -> None:
    done = run("lo", "echo", "--rdma-address", "@link", "x@link", "2")
    assert (done.returncode, done.stdout) == (0, "--rdma-address 127.0.0.1 x@link 2\n")


def test_what_is_not_there_is_said() -> None:
    done = run("net7", "echo", "@link")
    assert done.returncode == 1
    assert "'net7' is not here" in done.stderr
    assert "lo" in done.stderr
    assert "usage" in run("lo").stderr
