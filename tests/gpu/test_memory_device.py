"""Device memory of our own, and host memory that the device maps."""

from __future__ import annotations

import mmap
import subprocess
import sys

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device", allow_module_level=True)
pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")

from gpu_runtime.cuda.errors import CudaError
from gpu_runtime.cuda.memory import REGISTRATION_ALIGNMENT, DeviceMemory, MappedMemory
from gpu_runtime.cuda.occupancy import free_bytes

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def context() -> None:
    torch.cuda.init()
    torch.zeros(1, device="cuda")


@pytest.mark.parametrize("size", [1, 4096, (2 << 20) + 8])
def test_it_is_aligned_for_registration_and_zero(size: int) -> None:
    memory = DeviceMemory(size)
    assert memory.address % REGISTRATION_ALIGNMENT == 0
    assert memory.size % REGISTRATION_ALIGNMENT == 0
    assert memory.size >= size
    assert not memory.read(0, np.uint8, memory.size).any()
    memory.free()


def test_torch_does_not_know_of_it() -> None:
    before = torch.cuda.memory_reserved()
    free = torch.cuda.mem_get_info()[0]
    memory = DeviceMemory(256 << 20)
    assert torch.cuda.memory_reserved() == before
    assert free - torch.cuda.mem_get_info()[0] >= 256 << 20
    memory.free()


def test_what_is_free_is_told_without_a_context_of_ours() -> None:
    """To torch, which asks within its context, and in a process that has none; ours can take a little meanwhile."""
    free = torch.cuda.mem_get_info()[0]
    command = [sys.executable, "-c", "from gpu_runtime.cuda.occupancy import free_bytes; print(free_bytes())"]
    before = int(subprocess.check_output(command))
    assert abs(before - free) < 64 << 20
    memory = DeviceMemory(256 << 20)
    assert 0 <= before - free_bytes() - memory.size < 64 << 20
    memory.free()


def test_what_is_written_is_read_and_seen_by_torch() -> None:
    memory = DeviceMemory(1 << 20)
    numbers = np.random.default_rng(1).integers(0, 1 << 31, 1000).astype(np.int32)
    memory.write(64, numbers)
    assert (memory.read(64, np.int32, 1000) == numbers).all()
    view = memory.tensor(memory.address + 64, (10, 100))
    assert (view.cpu().numpy() == numbers.reshape(10, 100)).all()
    view += 1
    torch.cuda.synchronize()
    assert (memory.read(64, np.int32, 1000) == numbers + 1).all()
    memory.free()


def test_nothing_lies_outside() -> None:
    memory = DeviceMemory(1)
    for offset, count in ((-1, 1), (memory.size, 1), (memory.size - 7, 8)):
        with pytest.raises(CudaError, match="do not lie within"):
            memory.read(offset, np.uint8, count)
        with pytest.raises(CudaError, match="do not lie within"):
            memory.write(offset, np.zeros(count, np.uint8))
    with pytest.raises(CudaError, match="do not lie within"):
        memory.tensor(memory.address + memory.size - 4, (2,))
    memory.free()


def test_more_than_there_is_is_refused() -> None:
    with pytest.raises(CudaError, match="cannot be had"):
        DeviceMemory(1 << 43)


def test_the_device_maps_host_memory() -> None:
    region = np.frombuffer(mmap.mmap(-1, 1 << 20), np.uint8)
    mapped = MappedMemory(region)
    words = np.arange(1000, dtype=np.int32)
    region[:4000].view(np.int32)[:] = words
    memory = DeviceMemory(4096)
    # The device's own copy out of the mapped memory, by its device address.
    from cuda.bindings import runtime

    kind = runtime.cudaMemcpyKind.cudaMemcpyDefault
    assert int(runtime.cudaMemcpy(memory.address, mapped.address, 4000, kind)[0]) == 0
    assert (memory.read(0, np.int32, 1000) == words).all()
    memory.free()
    mapped.close()
