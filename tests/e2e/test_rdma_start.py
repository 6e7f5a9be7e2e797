"""What both programs refuse before they begin anything with RDMA."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAMS = ("dpu_service.main", "gpu_runtime.main")


def refused(program: str, *arguments: str) -> str:
    """Exit status 2 and the reason, on one line however wide the terminal is."""
    ended = subprocess.run(
        [sys.executable, "-m", program, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    assert ended.returncode == 2, ended.stderr
    return " ".join(ended.stderr.replace("│", " ").split())


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("transport", ["verbs", "doca"])
def test_an_interface_that_is_not_declared_private(program: str, transport: str) -> None:
    said = refused(program, "--transport", transport)
    assert "RDMA needs --rdma-address: naming it declares that interface's network private" in said


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_package_that_nobody_knows(program: str) -> None:
    said = refused(program, "--transport", "verbs", "--rdma-address", "10.9.0.1", "--verbs-binding", "pydoca")
    assert "--verbs-binding must be one of: auto, pyverbs, ibverbs" in said
