"""What both programs refuse before they begin anything with RDMA: with status 2, and without having listened."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.serving import free_port
from tests.transport.doca.build import SHIM_ADDRESS, shim_folder

PROGRAMS = ("dpu_service.main", "gpu_runtime.main")
REORDERING = "MLX5_RELAXED_PACKET_ORDERING_ON"
DOCA_FOLDER = Path("/opt/mellanox/doca")

both = pytest.mark.parametrize("program", PROGRAMS)
needs_stand_in = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build the stand-in with")


def place(program: str, port: int) -> list[str]:
    """Options for what each program listens on."""
    if program == "gpu_runtime.main":
        return ["--listen", f"127.0.0.1:{port}"]
    return ["--http", f"127.0.0.1:{port}", "--https", "off"]


def refused(program: str, *arguments: str, **environment: str) -> str:
    """The reason, however wide the terminal is. Its port is taken, so a program that listens before it refuses says
    something else."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port()))
        taken.listen()
        ended = subprocess.run(
            [sys.executable, "-m", program, *place(program, taken.getsockname()[1]), *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **environment},
        )
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    if ended.stderr.startswith(("RDMA cannot", "DOCA cannot")):  # not of the options, but of the machine
        assert ended.stderr.count("\n") == 1
    return " ".join(ended.stderr.replace("│", " ").split())


@pytest.mark.parametrize(("program", "transport"), [(PROGRAMS[0], "verbs"), (PROGRAMS[1], "doca")])
def test_an_interface_that_is_not_declared_private(program: str, transport: str) -> None:
    said = refused(program, "--transport", transport)
    assert "RDMA needs --rdma-address: naming it declares that interface's network private" in said


@both
@pytest.mark.parametrize(
    ("address", "words"),
    [("banana", "'banana' is no IP address"), ("8.8.8.8", "is a public address, which cannot be declared private")],
)
def test_an_address_that_declares_no_network_private(program: str, address: str, words: str) -> None:
    assert words in refused(program, "--transport", "verbs", "--rdma-address", address)


@both
def test_a_transport_that_there_is_not(program: str) -> None:
    assert "--transport knows no 'pigeon'; there are: shm, verbs, doca" in refused(program, "--transport", "pigeon")


@both
def test_a_package_that_nobody_knows(program: str) -> None:
    said = refused(program, "--transport", "verbs", "--rdma-address", "10.9.0.1", "--verbs-binding", "pydoca")
    assert "--verbs-binding must be one of: auto, pyverbs, ibverbs" in said


@both
def test_relaxed_ordering_that_the_process_asks_for(program: str) -> None:
    said = refused(program, "--transport", "verbs", "--rdma-address", "10.9.0.1", **{REORDERING: "1"})
    assert said.startswith(f"RDMA cannot be used: {REORDERING} is set")


@both
def test_an_address_that_no_device_has(program: str) -> None:
    """Of the documentation's network, which is nobody's; the reason is one line."""
    said = refused(program, "--transport", "verbs", "--rdma-address", "192.0.2.77")
    assert said.startswith("RDMA cannot be used: ")


@both
@pytest.mark.skipif(DOCA_FOLDER.exists(), reason="DOCA is installed")
def test_doca_that_is_not_installed(program: str) -> None:
    said = refused(program, "--transport", "doca", "--rdma-address", "10.9.0.1")
    assert said.startswith("DOCA cannot be used: DOCA is not installed: libdoca_common.so.2 and libdoca_rdma.so.2")


@pytest.mark.parametrize(
    ("program", "address", "fault", "words"),
    [
        (PROGRAMS[0], "10.9.0.1", "", "DOCA has no device with the RoCE v2 address 10.9.0.1; it has: mlx5_0"),
        (PROGRAMS[1], SHIM_ADDRESS, "doca_dev_open=17", "doca_dev_open: DOCA_ERROR_IO_FAILED"),
    ],
)
@needs_stand_in
def test_a_device_that_doca_does_not_have_or_cannot_open(program: str, address: str, fault: str, words: str) -> None:
    environment = {"LD_LIBRARY_PATH": str(shim_folder()), "DOCA_SHIM_FAIL": fault}
    said = refused(program, "--transport", "doca", "--rdma-address", address, **environment)
    assert said.startswith(f"DOCA cannot be used: {words}")


@both
@needs_stand_in
def test_the_device_is_closed_again_before_anything_listens(program: str, tmp_path: Path) -> None:
    """What the program did with the device until it found its port taken."""
    trace = tmp_path / "trace"
    arguments = ["--transport", "doca", "--rdma-address", SHIM_ADDRESS]
    environment = {"LD_LIBRARY_PATH": str(shim_folder()), "DOCA_SHIM_TRACE": str(trace)}
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port()))
        taken.listen()
        command = [sys.executable, "-m", program, *place(program, taken.getsockname()[1]), *arguments]
        ended = subprocess.run(command, capture_output=True, timeout=60, env={**os.environ, **environment})
    assert ended.returncode != 0
    calls = [line.split()[0] for line in trace.read_text().splitlines()]
    assert calls == ["doca_devinfo_create_list", "doca_dev_open", "doca_devinfo_destroy_list", "doca_dev_close"]


@pytest.mark.parametrize(
    ("ordering", "transport", "status", "said"),
    [
        (0, "shm,verbs", 2, "--device cuda with RDMA: this CUDA device promises no order of RDMA writes"),
        (99, "doca", 2, "(its write ordering is 99, 100 is needed): a commit word could be seen before its payload"),
        (100, "shm,verbs", 2, "RDMA cannot be used:"),
        (0, "shm", 1, "'/nowhere' is neither a folder"),
    ],
    ids=["verbs", "doca", "strong", "shm"],
)
def test_a_device_whose_write_ordering_is_too_weak(ordering: int, transport: str, status: int, said: str) -> None:
    """Refused before anything listens; one that is strong enough gets as far as the adapter, which is not there."""
    pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed (extra cuda)")
    command = [sys.executable, "-m", "tests.standin.device_program", str(ordering), "--device", "cuda"]
    command += ["--transport", transport, "--listen", "127.0.0.1:0", "--model", "/nowhere"]
    if transport != "shm":
        command += ["--rdma-address", "10.9.0.1"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert ended.returncode == status, ended.stderr
    assert said in ended.stderr
    assert ("control plane on port" in ended.stderr) == (transport == "shm")
