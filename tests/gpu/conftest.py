"""What needs a CUDA device: skipped, with the reason, where there is none."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_runtime.scheduler import host
from tests.gpu.build import build_scheduler


def missing() -> str:
    """Why nothing can run on a GPU here, or an empty string."""
    if shutil.which("nvcc") is None:
        return "nvcc is not installed"
    listed = (
        subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True) if shutil.which("nvidia-smi") else None
    )
    if listed is None or listed.returncode or "GPU" not in listed.stdout:
        return "there is no CUDA device"
    return ""


@pytest.fixture(scope="session")
def device_scheduler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The scheduler built for this machine's GPU; every HostScheduler made meanwhile runs there."""
    if reason := missing():
        pytest.skip(reason)
    library = build_scheduler(tmp_path_factory.mktemp("device") / "device_scheduler.so")
    host.use_library(library)
    yield library
    host.use_library(None)
