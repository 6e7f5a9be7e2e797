"""What `blinkctl doctor` sees of a device, against NVIDIA's own tools."""

from __future__ import annotations

import subprocess

import pytest

from tests.gpu.conftest import missing_device

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(missing_device()), reason=missing_device() or "")]


def smi(*fields: str) -> list[list[str]]:
    """A row for each device."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [[cell.strip() for cell in line.split(",")] for line in said.splitlines()]


def test_the_driver_says_what_nvidias_tool_says() -> None:
    from blink_deploy.doctor.cuda import read_gpus

    found = {gpu.pci: gpu for gpu in read_gpus().devices}
    assert found
    for name, address, capability in smi("name", "pci.bus_id", "compute_cap"):
        gpu = found.get(address.lower().removeprefix("0000"))  # the tool writes eight digits for the domain
        if gpu is not None:
            got = (gpu.attributes["capability_major"], gpu.attributes["capability_minor"])
            assert (gpu.name, got) == (name, tuple(map(int, capability.split("."))))


def test_attributes_are_those_of_nvidias_package() -> None:
    driver = pytest.importorskip("cuda.bindings.driver")
    from blink_deploy.doctor.cuda import ATTRIBUTES, read_gpus

    driver.cuInit(0)
    for index, gpu in enumerate(read_gpus().devices):
        for name, number in ATTRIBUTES.items():
            _, device = driver.cuDeviceGet(index)
            _, value = driver.cuDeviceGetAttribute(driver.CUdevice_attribute(number), device)
            assert gpu.attributes[name] == int(value), name


def test_boards_say_what_nvidias_tool_says() -> None:
    from blink_deploy.doctor.nvml import read_boards

    boards = read_boards()
    rows = smi("name", "persistence_mode", "clocks.max.sm")
    assert [(board.name, board.persistent, board.most) for board in boards] == [
        (name, mode == "Enabled", int(most)) for name, mode, most in rows
    ]
    text = subprocess.run(["nvidia-smi", "-q", "-d", "MEMORY"], capture_output=True, text=True, check=True).stdout
    totals = [int(part.split("Total")[1].split()[1]) << 20 for part in text.split("BAR1 Memory Usage")[1:]]
    assert [board.bar1 for board in boards] == totals


def test_a_device_that_serves_has_nothing_wrong() -> None:
    pytest.importorskip("grpc")
    from blink_deploy.doctor import gpu
    from blink_deploy.doctor.probe import Probe
    from blink_deploy.doctor.report import Result
    from blink_deploy.doctor.site import Part, Site, Transport

    site = Site(Part.GPU, Transport.VERBS)
    for check in (gpu.driver, gpu.direct_rdma, gpu.dma_buf, gpu.write_order, gpu.bar1):
        found = check(Probe(), site)
        assert found.result is Result.OK, (check.__name__, found)
