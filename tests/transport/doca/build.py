"""Builds the stand-in for DOCA's libraries with the system's compiler, and says how to use it."""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "shim"
LIBRARIES = {"libdoca_common.so.2": ("core.c", "memory.c"), "libdoca_rdma.so.2": ("rdma.c",)}
SHIM_ADDRESS = "127.0.0.2"
"""Of its first device that can do RDMA."""
_FLAGS = ["-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-pthread"]

_PLACE = "BLINK_TEST_DOCA_SHIM"
"""Where this process, or the one that started it, has built it."""


def shim_folder() -> Path:
    """The libraries as they should be, built once for this process and those that it starts."""
    if _PLACE not in os.environ:
        os.environ[_PLACE] = tempfile.mkdtemp(prefix="blink-doca-")
        atexit.register(shutil.rmtree, os.environ[_PLACE], ignore_errors=True)
        atexit.register(_sweep)
        build_shim(Path(os.environ[_PLACE]))
    return Path(os.environ[_PLACE])


def _sweep() -> None:
    """Removes the shared pages of processes that were killed: the living ones hold a lock on theirs."""
    for page in Path("/dev/shm").glob("doca-shim-*"):
        try:
            with page.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                page.unlink()
        except OSError:
            continue


def build_shim(folder: Path, *flags: str) -> Path:
    """Both libraries in `folder`. As with the real ones, the second takes symbols of the first; nothing says so but the
    order of loading.

    Args:
        flags: more of them for the compiler: `-Ddoca_dev_open=gone` leaves a function out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, sources in LIBRARIES.items():
        paths = [str(SOURCES / source) for source in sources]
        command = ["cc", *_FLAGS, f"-Wl,-soname,{name}", *flags, *paths, "-o", str(folder / name)]
        subprocess.run(command, check=True)
    return folder
