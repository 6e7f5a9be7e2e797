"""Builds stand-ins for NVIDIA's libraries with the system's compiler."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("stand_in.c")


def numbers() -> dict[str, int]:
    """Of CUDA's attributes, by NVIDIA's own package."""
    driver = pytest.importorskip("cuda.bindings.driver")
    prefix = "CU_DEVICE_ATTRIBUTE_"
    wanted = ("COMPUTE_CAPABILITY_MAJOR", "COMPUTE_CAPABILITY_MINOR", "GPU_DIRECT_RDMA_SUPPORTED",
              "GPU_DIRECT_RDMA_WRITES_ORDERING", "DMA_BUF_SUPPORTED")  # fmt: skip
    return {name: int(getattr(driver.CUdevice_attribute, prefix + name)) for name in wanted}


def build_driver(folder: Path, devices: int) -> Path:
    """Both libraries, with so many devices."""
    flags = [f"-D{name}={value}" for name, value in {**numbers(), "DEVICES": devices}.items()]
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        command = ["cc", "-O1", "-Wall", "-Wextra", "-shared", "-fPIC", *flags, str(SOURCE), "-o", str(folder / name)]
        subprocess.run(command, check=True)
    return folder
