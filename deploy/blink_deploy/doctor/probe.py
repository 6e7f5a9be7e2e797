"""How checks look at a machine. Tests give them another one: a folder in place of `/`, and facts of their own."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blink_deploy.doctor.clock import Clock, read_clock
from blink_deploy.doctor.cuda import Gpus, read_gpus
from blink_deploy.doctor.errors import UnknownError
from blink_deploy.doctor.nvml import Board, read_boards

TOOL_SECONDS = 10


@dataclass(frozen=True)
class Files:
    """The kernel's files below a root."""

    root: Path = Path("/")

    def path(self, name: str) -> Path:
        """Of an absolute name."""
        return self.root / name.lstrip("/")

    def text(self, name: str) -> str | None:
        """A file's text without the space around it; None when it cannot be read."""
        try:
            return self.path(name).read_text(errors="replace").strip()
        except OSError:
            return None

    def number(self, name: str) -> int | None:
        """A file that holds a decimal or hexadecimal number."""
        try:
            return int(self.text(name) or "", 0)
        except ValueError:
            return None

    def data(self, name: str) -> bytes:
        """A file's bytes, as many as may be read; none when it cannot be."""
        try:
            return self.path(name).read_bytes()
        except OSError:
            return b""

    def names(self, name: str) -> list[str]:
        """What is in a folder; nothing when there is none."""
        try:
            return sorted(entry.name for entry in self.path(name).iterdir())
        except OSError:
            return []

    def exists(self, name: str) -> bool:
        """Whether there is such a file or folder."""
        return self.path(name).exists()

    def usable(self, name: str) -> bool:
        """Whether this process may read and write it."""
        return os.access(self.path(name), os.R_OK | os.W_OK)

    def target(self, name: str) -> list[str]:
        """The parts of the path that a link leads to, from the root on."""
        return list(self.path(name).resolve().relative_to(self.root.resolve()).parts)


def run_tool(command: Sequence[str]) -> str:
    """What a program prints.

    Raises:
        UnknownError: it is not installed, fails or hangs.
    """
    if shutil.which(command[0]) is None:
        raise UnknownError(f"{command[0]} is not installed")
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise UnknownError(f"{command[0]} failed: {error}") from error
    return ran.stdout


def limit(what: int) -> int | None:
    """A limit of this process, None for no limit."""
    soft, _ = resource.getrlimit(what)
    return None if soft == resource.RLIM_INFINITY else soft


def free_bytes(name: str) -> tuple[int, int]:
    """Size and free bytes of a file system.

    Raises:
        UnknownError: it is not there.
    """
    try:
        found = os.statvfs(name)
    except OSError as error:
        raise UnknownError(f"{name}: {error.strerror}") from error
    return found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail


def addresses() -> dict[str, list[str]]:
    """IP addresses by interface."""
    import psutil

    kinds = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [one.address.partition("%")[0] for one in found if one.family in kinds]
        for name, found in psutil.net_if_addrs().items()
    }


def doca_version(folder: str | None) -> str:
    """Loads DOCA as the transport does; its version.

    Raises:
        UnknownError: it is not installed, or cannot be used.
    """
    from blink_proto.doca.errors import DocaUnavailableError
    from blink_proto.doca.library import load_doca

    try:
        return load_doca(folder).version
    except DocaUnavailableError as error:
        raise UnknownError(str(error)) from error


def verbs_devices(binding: str) -> list[str]:
    """The devices that a binding of the verbs transport sees.

    Raises:
        UnknownError: the package or the library is missing, or the kernel has no verbs.
    """
    from blink_proto.rdma.binding import RdmaError

    try:
        return [_name(device.name) for device in _listed(binding)]
    except RdmaError as error:
        raise UnknownError(str(error)) from error
    except Exception as error:  # pyverbs' own errors have no common base but this
        raise UnknownError(f"{binding} lists no devices ({error})") from error


def _listed(binding: str) -> list[Any]:
    if binding == "ibverbs":
        from blink_proto.rdma.with_ibverbs import ibverbs

        return list(ibverbs().get_device_list())
    from blink_proto.rdma.pyverbs_package import load_pyverbs

    return list(load_pyverbs().device.get_device_list())


def _name(name: str | bytes) -> str:
    return name.decode(errors="replace") if isinstance(name, bytes) else name


@dataclass(frozen=True)
class Probe:
    """A machine. Every function raises UnknownError for what it cannot tell."""

    files: Files = field(default_factory=Files)
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    machine: str = field(default_factory=platform.machine)
    page_bytes: int = field(default_factory=lambda: os.sysconf("SC_PAGESIZE"))
    run: Callable[[Sequence[str]], str] = run_tool
    limit: Callable[[int], int | None] = limit
    space: Callable[[str], tuple[int, int]] = free_bytes
    addresses: Callable[[], Mapping[str, Sequence[str]]] = addresses
    clock: Callable[[], Clock] = read_clock
    gpus: Callable[[], Gpus] = read_gpus
    boards: Callable[[], list[Board]] = read_boards
    doca: Callable[[str | None], str] = doca_version
    verbs: Callable[[str], list[str]] = verbs_devices
