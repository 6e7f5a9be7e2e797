"""How the driver's libraries, the clock and tools are asked: against stand-ins in C, and this machine."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from blink_deploy.doctor.clock import read_clock
from blink_deploy.doctor.cuda import Gpu, Gpus, read_gpus
from blink_deploy.doctor.errors import UnknownError
from blink_deploy.doctor.nvml import Board, read_boards
from blink_deploy.doctor.probe import Files, Probe, limit, run_tool
from tests.deploy.doctor.driver.build import build_driver


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_driver(tmp_path_factory.mktemp("driver"), 2)


def test_the_driver_is_asked(libraries: Path) -> None:
    common = {"capability_major": 9, "capability_minor": 0, "direct_rdma": 1, "write_ordering": 100}
    first = Gpu("NVIDIA Stand-in 0", "0000:1a:00.0", {**common, "dma_buf": 1})
    second = Gpu("NVIDIA Stand-in 1", "0000:1b:00.0", {**common, "dma_buf": 0})
    assert read_gpus(str(libraries / "libcuda.so.1")) == Gpus((13, 1), [first, second])


def test_the_boards_are_asked(libraries: Path) -> None:
    (board,) = read_boards(str(libraries / "libnvidia-ml.so.1"))
    assert board == Board("NVIDIA Stand-in", 512 << 20, True, 1200, 1980, 8)
    assert board.reasons == ["hardware slowdown"]


def test_libraries_that_are_not_there() -> None:
    with pytest.raises(UnknownError, match=r"no CUDA driver: libabsent\.so"):
        read_gpus("libabsent.so")
    with pytest.raises(UnknownError, match=r"libabsent\.so cannot be loaded"):
        read_boards("libabsent.so")


def test_the_clock_is_what_timedatectl_would_say() -> None:
    """The program adjtimex of busybox or util-linux is rarely there; the flag is checked by the call's own result."""
    import ctypes

    buffer = (ctypes.c_byte * 512)()
    clock_is_bad = 5  # TIME_ERROR of adjtimex(2)
    state = ctypes.CDLL(None).adjtimex(ctypes.byref(buffer))
    found = read_clock()
    assert found.synchronised is (state != clock_is_bad)
    assert 0 <= found.error <= 16 + 500  # seconds; the kernel's largest, with its growth between updates


def test_limits_are_those_of_the_shell() -> None:
    script = "ulimit -l; ulimit -n"
    locked, files = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.split()
    for text, unit, what in ((locked, 1024, resource.RLIMIT_MEMLOCK), (files, 1, resource.RLIMIT_NOFILE)):
        assert limit(what) == (None if text == "unlimited" else int(text) * unit)


def test_tools(tmp_path: Path) -> None:
    assert run_tool([sys.executable, "-c", "print('said')"]) == "said\n"
    with pytest.raises(UnknownError, match="absent-tool is not installed"):
        run_tool(["absent-tool"])
    with pytest.raises(UnknownError, match="failed"):
        run_tool([sys.executable, "-c", "raise SystemExit(3)"])


def test_files_stay_below_their_root(tmp_path: Path) -> None:
    (tmp_path / "sys").mkdir()
    (tmp_path / "sys" / "number").write_text("0x10\n")
    (tmp_path / "sys" / "text").write_text(" some\n")
    files = Files(tmp_path)
    assert files.names("/sys") == ["number", "text"]
    assert (files.number("/sys/number"), files.number("/sys/text"), files.number("/sys/absent")) == (16, None, None)
    assert (files.text("/sys/text"), files.text("/sys/absent"), files.data("/sys/absent")) == ("some", None, b"")


def test_this_machine_is_looked_at() -> None:
    probe = Probe()
    assert "127.0.0.1" in {address for found in probe.addresses().values() for address in found}
    size, free = probe.space("/dev/shm")
    assert 0 < free <= size
    assert probe.files.text("/proc/sys/kernel/osrelease") == os.uname().release
    assert probe.page_bytes == os.sysconf("SC_PAGE_SIZE")
