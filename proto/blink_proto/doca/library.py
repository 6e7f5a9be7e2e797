"""Finds and loads the DOCA libraries, and checks that everything that will be called is there."""

from __future__ import annotations

import ctypes
import os
import platform
import re
from collections.abc import Callable
from ctypes import byref, c_void_p
from pathlib import Path
from typing import Any

from blink_proto.doca.constants import Status
from blink_proto.doca.errors import DocaError, DocaUnavailableError, status_name
from blink_proto.doca.signatures import COMMON, RDMA, RESULTS

SONAMES = {"libdoca_common.so.2": COMMON, "libdoca_rdma.so.2": RDMA}
"""In the order of loading: the second one takes symbols of the first."""
OLDEST_VERSION, FIRST_UNKNOWN_VERSION = (2, 9), (4, 0)
BRIEF = frozenset(
    {
        "doca_buf_set_data",
        "doca_pe_clear_notification",
        "doca_pe_progress",
        "doca_pe_request_notification",
        "doca_rdma_task_read_set_dst_buf",
        "doca_rdma_task_read_set_src_buf",
        "doca_rdma_task_write_set_dst_buf",
        "doca_rdma_task_write_set_src_buf",
        "doca_task_get_status",
        "doca_task_submit",
    }
)
"""Functions that are called for every record and never wait: shorter than handing the interpreter lock over."""
INSTALL_FOLDER = Path("/opt/mellanox/doca/lib")


class DocaLibrary:
    """The loaded libraries. One per process is enough; it holds no state of its own."""

    def __init__(self, functions: dict[str, Callable[..., Any]], version: str) -> None:
        self._functions = functions
        self.version = version

    def function(self, name: str) -> Callable[..., Any]:
        """A C function as it is. All but the brief ones release the interpreter lock; callbacks take it again."""
        return self._functions[name]

    def call(self, name: str, *arguments: Any, also: Status = Status.SUCCESS) -> int:
        """Calls a function that returns a status; the status.

        Raises:
            DocaError: it is neither SUCCESS nor `also`.
        """
        status = int(self._functions[name](*arguments))
        if status not in (Status.SUCCESS, also):
            raise self.error(name, status)
        return status

    def make(self, name: str, *arguments: Any) -> int:
        """Calls a function whose last argument is where to put what it makes; the handle.

        Raises:
            DocaError: it made nothing.
        """
        made = c_void_p()
        self.call(name, *arguments, byref(made))
        if not made.value:
            raise self.error(name, Status.UNEXPECTED)
        return made.value

    def error(self, call: str, status: int) -> DocaError:
        """A failure in the library's own words."""
        text = self._functions["doca_error_get_descr"](status)
        return DocaError(call, status, self.status_name(status), (text or b"").decode(errors="replace"))

    def status_name(self, status: int) -> str:
        """Its name; the library's own for what is newer than this binding."""
        if status in Status._value2member_map_:
            return status_name(status)
        name = self._functions["doca_error_get_name"](status)
        return name.decode(errors="replace") if name else status_name(status)


def load_doca(folder: str | None = None) -> DocaLibrary:
    """Loads both libraries.

    Args:
        folder: where to look, and nowhere else. None: what the system's loader finds (`LD_LIBRARY_PATH`, `ldconfig`),
            then where NVIDIA's packages install them.

    The version is what libdoca_common says; libdoca_rdma has no function that tells its own. Whether both are of one
    release is told by their files: see `_mixture`.

    Raises:
        DocaUnavailableError: a library or a function is missing, the version is not one that is known, or the libraries
            do not belong together; it names everything that is wrong at once.
    """
    opened = {soname: handles for soname in SONAMES if (handles := _open(soname, folder))}
    absent = [soname for soname in SONAMES if soname not in opened]
    if absent:
        places = folder or f"the system's library path and {_install_folder()}"
        raise DocaUnavailableError(f"DOCA is not installed: {' and '.join(absent)} cannot be loaded from {places}")
    functions: dict[str, Callable[..., Any]] = {}
    missing: list[str] = []
    for soname, table in SONAMES.items():
        for name, arguments in table.items():
            function = getattr(opened[soname][name in BRIEF], name, None)
            if function is None:
                missing.append(f"{name} ({soname})")
                continue
            function.argtypes, function.restype = list(arguments), RESULTS.get(name, ctypes.c_int)
            functions[name] = function
    version = _version(functions)
    faults = [*([_wrong_version(version)] if not _is_known(version) else []), *_mixture(functions)]
    faults += [f"missing are {', '.join(missing)}"] if missing else []
    if faults:
        raise DocaUnavailableError(f"the installed DOCA cannot be used: {'; '.join(faults)}")
    return DocaLibrary(functions, version)


def _open(soname: str, folder: str | None) -> tuple[ctypes.CDLL, ctypes.PyDLL] | None:
    """The library for calls that release the interpreter lock, and for those that keep it."""
    names = [str(Path(folder) / soname)] if folder else [soname, str(_install_folder() / soname)]
    for name in names:
        try:
            mode = os.RTLD_NOW | os.RTLD_GLOBAL
            return ctypes.CDLL(name, mode=mode), ctypes.PyDLL(name, mode=mode)
        except OSError:
            continue
    return None


def _install_folder() -> Path:
    return INSTALL_FOLDER / f"{platform.machine()}-linux-gnu"


def _version(functions: dict[str, Callable[..., Any]]) -> str:
    runtime = functions.get("doca_version_runtime")
    return (runtime() or b"").decode(errors="replace") if runtime else ""


def _is_known(version: str) -> bool:
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and OLDEST_VERSION <= (int(found[1]), int(found[2])) < FIRST_UNKNOWN_VERSION


class _Place(ctypes.Structure):
    """`Dl_info` of dladdr(3)."""

    _fields_ = (("file", ctypes.c_char_p), ("base", c_void_p), ("symbol", ctypes.c_char_p), ("address", c_void_p))


def _file_of(function: Any) -> Path:
    """The library that has a function, as a file; links are followed."""
    place = _Place()
    if not ctypes.CDLL(None).dladdr(ctypes.cast(function, c_void_p), byref(place)):
        return Path()
    return Path(os.fsdecode(place.file or b"")).resolve()


def _mixture(functions: dict[str, Callable[..., Any]]) -> list[str]:
    """What shows that the libraries are not of one installation: their folders, or releases behind their names
    (`libdoca_rdma.so.2.9.0087`). Of one folder and without such names, another release cannot be told."""
    some = {soname: next((name for name in table if name in functions), "") for soname, table in SONAMES.items()}
    files = {soname: _file_of(functions[name]) for soname, name in some.items() if name}
    folders = {file.parent for file in files.values()}
    releases = {file.name.removeprefix(soname).strip(".") for soname, file in files.items()} - {""}
    if len(folders) < 2 and len(releases) < 2:
        return []
    return [f"{' and '.join(map(str, files.values()))} are not of one installation"]


def _wrong_version(version: str) -> str:
    oldest, unknown = (".".join(map(str, pair)) for pair in (OLDEST_VERSION, FIRST_UNKNOWN_VERSION))
    return f"its version is {version or 'not told'}, and {oldest} or newer, below {unknown}, is needed"
