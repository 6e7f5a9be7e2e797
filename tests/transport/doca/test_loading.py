"""Finding the DOCA libraries: the order of the search, and what is said when something is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from blink_proto.doca.signatures import COMMON, RDMA
from tests.transport.doca.build import build_shim

LOAD = """
import sys
from blink_proto.doca.errors import DocaUnavailableError
from blink_proto.doca.library import load_doca
try:
    print(load_doca(sys.argv[1] or None).version)
except DocaUnavailableError as error:
    print(error)
"""


def load(folder: Path | str = "", **environment: str) -> str:
    """What a process of its own says; libraries that were loaded once stay."""
    command = [sys.executable, "-c", LOAD, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **environment})
    return done.stdout.strip()


def exported(library: Path) -> set[str]:
    """Functions that a library defines."""
    listed = subprocess.run(["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True)
    return {line.split()[-1] for line in listed.stdout.splitlines() if " T doca_" in line}


def test_the_shim_has_exactly_what_is_called(doca_shim: Path):
    assert exported(doca_shim / "libdoca_common.so.2") == set(COMMON)
    assert exported(doca_shim / "libdoca_rdma.so.2") == set(RDMA)


def test_loads_from_a_folder(doca_shim: Path):
    assert load(doca_shim) == "3.3.0109"


def test_loads_from_the_systems_path(doca_shim: Path):
    assert load(LD_LIBRARY_PATH=str(doca_shim)) == "3.3.0109"


def test_a_folder_is_the_only_place(doca_shim: Path, tmp_path: Path):
    said = load(tmp_path, LD_LIBRARY_PATH=str(doca_shim))
    assert said == f"DOCA is not installed: libdoca_common.so.2 and libdoca_rdma.so.2 cannot be loaded from {tmp_path}"


def test_says_where_it_looked():
    assert "cannot be loaded from the system's library path and /opt/mellanox/doca/lib/" in load()


def test_names_everything_that_is_missing(tmp_path: Path):
    flags = ["-Ddoca_mmap_set_dmabuf_memrange=gone_1", "-Ddoca_rdma_connect=gone_2"]
    said = load(build_shim(tmp_path, *flags))
    assert said == (
        "the installed DOCA cannot be used: missing are doca_mmap_set_dmabuf_memrange (libdoca_common.so.2), "
        "doca_rdma_connect (libdoca_rdma.so.2)"
    )


@pytest.mark.parametrize("version", ["1.5.0", "2.8.0082", "4.0.0"])
def test_refuses_versions_that_are_not_known(version: str, tmp_path: Path):
    said = load(build_shim(tmp_path, f'-DSHIM_VERSION="{version}"'))
    assert (
        said == f"the installed DOCA cannot be used: its version is {version}, and 2.9 or newer, below 4.0, is needed"
    )


def installed(shim: Path, folder: Path, **releases: str) -> Path:
    """A folder with the stand-in's libraries, of releases that their files' names tell, with links as packages have."""
    folder.mkdir()
    for name, release in releases.items():
        soname = f"libdoca_{name}.so.2"
        real = folder / (f"{soname}.{release}" if release else soname)
        shutil.copyfile(shim / soname, real)
        if release:
            (folder / soname).symlink_to(real.name)
    return folder


def test_libraries_of_one_release_go_together(doca_shim: Path, tmp_path: Path):
    assert load(installed(doca_shim, tmp_path / "lib", common="9.0087", rdma="9.0087")) == "3.3.0109"


def test_a_library_of_another_release_is_refused(doca_shim: Path, tmp_path: Path):
    folder = installed(doca_shim, tmp_path / "lib", common="9.0087", rdma="10.0021")
    files = (f"{folder}/libdoca_common.so.2.9.0087", f"{folder}/libdoca_rdma.so.2.10.0021")
    assert load(folder) == f"the installed DOCA cannot be used: {' and '.join(files)} are not of one installation"


def test_a_library_of_another_installation_is_refused(doca_shim: Path, tmp_path: Path):
    one, other = (installed(doca_shim, tmp_path / name, **{name: ""}) for name in ("common", "rdma"))
    files = (f"{one}/libdoca_common.so.2", f"{other}/libdoca_rdma.so.2")
    said = load(LD_LIBRARY_PATH=f"{one}:{other}")
    assert said == f"the installed DOCA cannot be used: {' and '.join(files)} are not of one installation"


def test_a_version_that_cannot_be_asked_for_is_not_known(tmp_path: Path):
    said = load(build_shim(tmp_path, "-Ddoca_version_runtime=gone"))
    assert "its version is not told" in said
    assert "missing are doca_version_runtime" in said
