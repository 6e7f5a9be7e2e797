"""Registering a CUDA device's memory: which calls are made with which numbers. The driver and the verbs are stand-ins:
Soft-RoCE refuses dma-bufs (errno 95), so that this path has real ends only where there is an RDMA adapter beside a GPU.
"""

from __future__ import annotations

import enum
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from blink_proto import arena
from blink_proto.rdma.binding import Access, RdmaError
from gpu_runtime.registration.base import RegistrationError
from gpu_runtime.registration.gpu_memory import (
    PAGE,
    DmabufMemory,
    PeermemMemory,
    RegionAddress,
    check_device,
    has_dmabuf,
)
from gpu_runtime.registration.memory import Part
from gpu_runtime.registration.verbs import inbound_parts, outbound_parts

INBOUND = RegionAddress(0x7F00_0020_0000, 1 << 20)
OUTBOUND = RegionAddress(0x7F00_0040_1000, 1 << 20)


class Status(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_NOT_SUPPORTED = 801


class Driver:
    """Of `cuda.bindings.driver` what is used; exports are pipes that a test can look at."""

    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED="supported",
        CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING="ordering",
        CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED="dmabuf",
    )
    CUmemRangeHandleType = SimpleNamespace(CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD=1)

    def __init__(self, **attributes: int) -> None:
        self.attributes = {"supported": 1, "ordering": 100, "dmabuf": 1, **attributes}
        self.exports: list[tuple[int, int, int]] = []
        self.status = Status.CUDA_SUCCESS

    def cuDeviceGetAttribute(self, name: str, device: int) -> tuple[Status, int]:
        return self.status, self.attributes[name]

    def cuMemGetHandleForAddressRange(self, address: int, size: int, kind: int, flags: int) -> tuple[Status, int]:
        if self.status:
            return self.status, -1
        assert (kind, flags) == (1, 0)
        reading, writing = os.pipe()
        os.close(writing)
        self.exports.append((address, size, reading))
        return self.status, reading


class Domain:
    """Remembers registrations."""

    def __init__(self) -> None:
        self.made: list[tuple[Any, ...]] = []

    def register_dmabuf(self, descriptor: int, offset: int, size: int, base: int, access: Access) -> str:
        os.fstat(descriptor)
        self.made.append((descriptor, offset, size, base, access))
        return "region"

    def register(self, address: int, size: int, access: Access) -> str:
        self.made.append((address, size, access))
        return "region"


def test_a_device_that_orders_writes_is_taken() -> None:
    check_device(Driver(), 0)
    assert has_dmabuf(Driver(), 0)
    assert not has_dmabuf(Driver(dmabuf=0), 0)


@pytest.mark.parametrize(("attributes", "words"), [({"ordering": 0}, "commit word"), ({"supported": 0}, "GPUDirect")])
def test_a_device_that_cannot_be_trusted_is_refused(attributes: dict[str, int], words: str) -> None:
    with pytest.raises(RegistrationError, match=words):
        check_device(Driver(**attributes), 0)


def test_a_driver_that_does_not_answer_is_no_consent() -> None:
    driver = Driver()
    driver.status = Status.CUDA_ERROR_NOT_SUPPORTED
    with pytest.raises(RegistrationError, match="NOT_SUPPORTED"):
        check_device(driver, 0)


@pytest.mark.parametrize("part", [Part(True, 4096, 8192), Part(False, 0, 4096), Part(False, 60 << 10, 12 << 10)])
def test_pages_are_exported_and_no_more_than_the_part_is_registered(part: Part) -> None:
    driver, domain = Driver(), Domain()
    DmabufMemory(driver, INBOUND, OUTBOUND).register(domain, part, Access.REMOTE_READ)  # type: ignore[arg-type]
    ((first, length, exported),) = driver.exports
    ((descriptor, offset, size, base, access),) = domain.made
    start = (INBOUND if part.inbound else OUTBOUND).address + part.offset
    assert first % PAGE == length % PAGE == 0
    assert first <= start < first + PAGE
    assert start + part.size <= first + length < start + part.size + PAGE
    assert (descriptor, first + offset, size, base) == (exported, start, part.size, start)
    assert access == Access.REMOTE_READ
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(exported)


def test_what_the_driver_does_not_export_is_refused() -> None:
    driver = Driver()
    driver.status = Status.CUDA_ERROR_NOT_SUPPORTED
    with pytest.raises(RdmaError, match="NOT_SUPPORTED"):
        DmabufMemory(driver, INBOUND, OUTBOUND).register(Domain(), Part(True, 0, 64), Access.REMOTE_READ)  # type: ignore[arg-type]


@pytest.mark.parametrize("part", [Part(True, -4096, 8192), Part(True, 1 << 20, 8)])
def test_nothing_beside_the_arena_is_registered(part: Part) -> None:
    with pytest.raises(RdmaError):
        DmabufMemory(Driver(), INBOUND, OUTBOUND).register(Domain(), part, Access.REMOTE_READ)  # type: ignore[arg-type]


def test_the_older_way_needs_its_module(tmp_path: Path) -> None:
    with pytest.raises(RegistrationError, match="nvidia-peermem"):
        PeermemMemory(INBOUND, OUTBOUND, tmp_path / "absent")
    domain = Domain()
    PeermemMemory(INBOUND, OUTBOUND, tmp_path).register(domain, Part(True, 4096, 64), Access.REMOTE_WRITE)  # type: ignore[arg-type]
    assert domain.made == [(INBOUND.address + 4096, 64, Access.REMOTE_WRITE)]


def test_a_front_end_is_given_its_channels_and_the_first_page_only() -> None:
    sizes = arena.Sizes(channels=4, submit_slots=4, cancel_slots=4, log_slots=8, heap_tokens=1 << 12)
    inbound, outbound = arena.InboundLayout(sizes), arena.OutboundLayout(sizes)
    assert inbound_parts(sizes, (2,)) == [Part(True, inbound.channel_offset(2), inbound.channel_bytes)]
    first, channel = outbound_parts(sizes, (2,))
    assert first == Part(False, 0, outbound.channel_offset(0))
    assert channel == Part(False, outbound.channel_offset(2), outbound.channel_bytes)
    assert inbound.channel_offset(0) > inbound.bell_offset, "the bell is nobody's over RDMA"


def test_a_real_gpu_beside_a_real_adapter() -> None:
    pytest.skip("needs a CUDA device and an RDMA adapter in one machine; Soft-RoCE refuses dma-bufs")
