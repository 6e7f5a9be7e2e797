"""`blink-gpu` on a machine with a CUDA device that is not there: `python -m tests.standin.device_program ORDERING …`.

ORDERING is the order of RDMA writes that the device reports (0: none, 100: for its owner); the program's own arguments
follow. All that is asked of the device is answered here; the program and its checks are the real ones.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from cuda.bindings import driver

from gpu_runtime import main
from gpu_runtime.control import device_check
from gpu_runtime.cuda.device import Device


def stand_in(ordering: int) -> None:
    names = driver.CUdevice_attribute
    weak, success = names.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING, driver.CUresult.CUDA_SUCCESS

    def attribute(name: Any, device: int) -> tuple[Any, int]:
        return success, ordering if name == weak else 1

    driver.cuDeviceGet = lambda number: (success, number)
    driver.cuDeviceGetAttribute = attribute
    patched: Any = device_check
    patched._PACKAGES = {}
    patched.metadata.version = lambda name: "2.9.1+cu130"
    patched.header_folder = patched.device_runtime_library = lambda: Path()
    patched.first_device = lambda: Device("Example 100", 1 << 36, (9, 0))


if __name__ == "__main__":
    stand_in(int(sys.argv.pop(1)))
    main.main()
