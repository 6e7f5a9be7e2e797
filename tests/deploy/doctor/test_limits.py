"""Checks of limits, clock, processors and kernel against made-up machines."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from blink_deploy.doctor import limits, machine
from blink_deploy.doctor.clock import Clock
from blink_deploy.doctor.report import Result
from blink_deploy.doctor.site import Part, Transport
from tests.deploy.doctor.machines import gpu_host, healthy, site, write

OK, WARN, FAIL, SKIPPED = Result.OK, Result.WARN, Result.FAIL, Result.SKIPPED


@pytest.mark.parametrize(
    ("bound", "capabilities", "transport", "result"),
    [
        (None, "0000000000000000", Transport.VERBS, OK),
        (256 << 20, "0000000000000000", Transport.DOCA, OK),
        (8 << 20, "0000000000000000", Transport.VERBS, FAIL),
        (8 << 20, "0000000000004000", Transport.VERBS, OK),  # CAP_IPC_LOCK
        (8 << 20, "0000000000003000", Transport.VERBS, FAIL),
        (8 << 20, "0000000000000000", Transport.SHM, SKIPPED),
    ],
)
def test_locked_memory(
    tmp_path: Path, bound: int | None, capabilities: str, transport: Transport, result: Result
) -> None:
    write(tmp_path, {"/proc/self/status": f"Name:\tpython\nCapEff:\t{capabilities}\n"})

    def limit(what: int) -> int | None:
        assert what == resource.RLIMIT_MEMLOCK
        return bound

    assert limits.locked_memory(healthy(tmp_path, limit=limit), site(transport=transport)).result is result


def test_open_files(tmp_path: Path) -> None:
    def look(bound: int | None, part: Part) -> Result:
        return limits.open_files(healthy(tmp_path, limit=lambda what: bound), site(part)).result

    assert [look(1024, part) for part in Part] == [SKIPPED, WARN, WARN]
    assert look(16384, Part.DPU) is OK
    assert look(None, Part.SINGLE) is OK


@pytest.mark.parametrize(("free", "result"), [(80, OK), (79, WARN), (2, WARN), (1, FAIL)])
def test_shared_memory(tmp_path: Path, free: int, result: Result) -> None:
    probe = healthy(tmp_path, space=lambda name: (256 << 20, free << 20))
    assert limits.shared_memory(probe, site()).result is result


def test_the_room_for_the_arena_is_what_it_takes() -> None:
    from blink_proto import arena
    from gpu_runtime.config import make_config

    sizes = make_config("cpu", channels=64).arena_sizes()
    needed = arena.InboundLayout(sizes).total_bytes + arena.OutboundLayout(sizes).total_bytes
    assert needed <= limits.SHARED_BYTES <= 1.1 * needed
    assert 3 * needed <= limits.LOCKED_BYTES  # the front end's mirrors too


def test_huge_pages(tmp_path: Path) -> None:
    assert limits.huge_pages(healthy(gpu_host(tmp_path)), site()).result is OK
    write(tmp_path, {"/proc/meminfo": "MemTotal: 1048576 kB\nHugePages_Total:  300\nHugepagesize:  2048 kB\n"})
    found = limits.huge_pages(healthy(tmp_path), site())
    assert found.result is WARN
    assert "300 reserved, 600 of 1,024 MiB" in found.seen


def test_clock(tmp_path: Path) -> None:
    assert machine.clock(healthy(tmp_path), site()).seen == "synchronised, within 0.5 ms"
    assert machine.clock(healthy(tmp_path, clock=lambda: Clock(False, 16.0)), site()).result is WARN


BLUEFIELD = "processor\t: 0\nFeatures\t: fp asimd aes pmull sha1 sha2\nCPU part\t: 0xd42\n\nprocessor\t: 1\n"


@pytest.mark.parametrize(
    ("text", "arch", "part", "result", "words"),
    [
        (BLUEFIELD, "aarch64", Part.DPU, OK, "2 × Cortex-A78AE (aarch64)"),
        (BLUEFIELD.replace("aes", ""), "aarch64", Part.DPU, WARN, "without aes"),
        (BLUEFIELD.replace("sha2", ""), "aarch64", Part.SINGLE, WARN, "without sha2"),
        (BLUEFIELD.replace("aes", ""), "aarch64", Part.GPU, OK, "Cortex"),
        ("processor\t: 0\nmodel name\t: EPYC\nflags\t\t: fpu aes\n", "x86_64", Part.DPU, WARN, "1 × EPYC (x86_64)"),
        ("processor\t: 0\nmodel name\t: EPYC\nflags\t\t: fpu aes\n", "x86_64", Part.SINGLE, OK, "EPYC"),
        ("", "x86_64", Part.SINGLE, SKIPPED, "/proc/cpuinfo"),
    ],
)
def test_processors(tmp_path: Path, text: str, arch: str, part: Part, result: Result, words: str) -> None:
    probe = healthy(write(tmp_path, {"/proc/cpuinfo": text}), machine=arch)
    found = machine.processors(probe, site(part))
    assert found.result is result
    assert words in found.seen


def test_page_size(tmp_path: Path) -> None:
    large = healthy(tmp_path, page_bytes=65536)
    assert machine.page_size(large, site(Part.DPU)).result is FAIL
    assert machine.page_size(large, site(Part.SINGLE, Transport.SHM)).result is OK
    assert machine.page_size(healthy(tmp_path), site()).result is OK


@pytest.mark.parametrize(
    ("release", "part", "result"),
    [("5.12.0", Part.GPU, OK), ("5.11.22", Part.GPU, FAIL), ("5.4.0", Part.DPU, OK), ("4.18.0", Part.GPU, FAIL)],
)
def test_kernel(tmp_path: Path, release: str, part: Part, result: Result) -> None:
    probe = healthy(write(tmp_path, {"/proc/sys/kernel/osrelease": release}))
    assert machine.kernel(probe, site(part)).result is result


@pytest.mark.parametrize(
    ("release", "transport", "result"),
    [
        ("5.4.0", Transport.VERBS, WARN),
        ("5.4.0", Transport.DOCA, FAIL),
        ("4.18.0", Transport.VERBS, FAIL),
        ("5.12.0", Transport.VERBS, OK),
    ],
)
def test_an_older_kernel_with_peermem(tmp_path: Path, release: str, transport: Transport, result: Result) -> None:
    files = {"/proc/sys/kernel/osrelease": release, "/sys/module/nvidia_peermem/refcnt": "0"}
    assert machine.kernel(healthy(write(tmp_path, files)), site(Part.GPU, transport)).result is result


def test_kernel_modules(tmp_path: Path) -> None:
    found = machine.modules(healthy(tmp_path), site())
    assert (found.result, found.todo) == (FAIL, "modprobe ib_core ib_uverbs mlx5_ib")
    write(tmp_path, {f"/sys/module/{name}/refcnt": "" for name in ("ib_core", "ib_uverbs", "rdma_rxe")})
    assert machine.modules(healthy(tmp_path), site()).result is WARN
    write(tmp_path, {"/sys/module/mlx5_ib/refcnt": ""})
    assert machine.modules(healthy(tmp_path), site()).result is OK
