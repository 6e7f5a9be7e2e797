"""Skips everything here unless `make test-rdma` asked for it and the machine can emulate another one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

TOOLS = ("qemu-system-x86_64", "apt-get", "dpkg-deb", "modinfo", "cpio", "zstd", "busybox", "rdma")


def reason_to_skip() -> str:
    """Empty where the tests can run."""
    if os.environ.get("BLINK_TEST_RDMA") != "1":
        return "takes emulated machines: make test-rdma"
    missing = [tool for tool in TOOLS if shutil.which(tool, path=os.environ["PATH"] + ":/usr/sbin:/sbin") is None]
    return f"this machine cannot emulate another one without {', '.join(missing)}" if missing else ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """By a mark, which counts before fixtures do: those of a module start machines."""
    reason = reason_to_skip()
    for item in items:
        if reason and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))
