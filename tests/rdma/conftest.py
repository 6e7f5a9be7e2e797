"""Skips everything here unless `make test-rdma` asked for it and the machine can emulate another one."""

from __future__ import annotations

import os
import shutil

import pytest

TOOLS = ("qemu-system-x86_64", "apt-get", "dpkg-deb", "modinfo", "cpio", "zstd", "busybox", "rdma")


@pytest.fixture(autouse=True)
def _can_emulate() -> None:
    if os.environ.get("BLINK_TEST_RDMA") != "1":
        pytest.skip("takes emulated machines: make test-rdma")
    missing = [tool for tool in TOOLS if shutil.which(tool, path=os.environ["PATH"] + ":/usr/sbin:/sbin") is None]
    if missing:
        pytest.skip(f"this machine cannot emulate another one without {', '.join(missing)}")
