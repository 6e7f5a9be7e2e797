"""A CUDA device's memory on its way to RDMA devices: what is refused, what is exported, handed over and registered.

The driver and the verbs are stand-ins: Soft-RoCE refuses dma-bufs (errno 95), so that this path has real ends only
where there is an RDMA adapter beside a GPU. Files in memory stand in for dma-bufs.
"""

from __future__ import annotations

import enum
import gc
import mmap
import os
import socket
import struct
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from blink_proto import arena
from blink_proto.rdma.binding import Access, RdmaError
from gpu_runtime.registration.base import RegistrationError
from gpu_runtime.registration.gpu_memory import check_device, hand_over
from gpu_runtime.registration.handover import PAGE, Exported, RegionAddress, send_regions
from gpu_runtime.registration.memory import LentMemory
from gpu_runtime.registration.parts import Part
from gpu_runtime.registration.verbs import inbound_parts, outbound_parts
from gpu_runtime.registration.ways import Wish

SIZES = arena.Sizes(channels=4, submit_slots=4, cancel_slots=4, log_slots=8, heap_tokens=1 << 12)
INBOUND = RegionAddress(0x7F00_0020_0000, 2 * PAGE)
OUTBOUND = RegionAddress(0x7F00_0040_0000, PAGE)


class Status(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_NOT_SUPPORTED = 801


class Driver:
    """Of `cuda.bindings.driver` what is used; every export is a file of that size."""

    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED="supported",
        CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING="ordering",
        CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED="dmabuf",
    )
    CUpointer_attribute = SimpleNamespace(CU_POINTER_ATTRIBUTE_SYNC_MEMOPS="sync")
    CUmemRangeHandleType = SimpleNamespace(CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD=1)

    def __init__(self, **attributes: int) -> None:
        self.attributes = {"supported": 1, "ordering": 100, "dmabuf": 1, **attributes}
        self.exports: dict[int, tuple[int, int]] = {}
        self.refuses_at: int | None = None
        self.pointers: dict[tuple[str, int], int] = {}

    def cuDeviceGetAttribute(self, name: str, device: int) -> tuple[Status, int]:
        return Status.CUDA_SUCCESS, self.attributes[name]

    def cuMemGetAddressRange(self, address: int) -> tuple[Status, int, int]:
        """Allocations begin a page before what lies in them."""
        return Status.CUDA_SUCCESS, address - PAGE, 1 << 22

    def cuPointerSetAttribute(self, value: int, name: str, pointer: int) -> tuple[Status]:
        self.pointers[name, pointer] = value
        return (Status.CUDA_SUCCESS,)

    def cuMemGetHandleForAddressRange(self, address: int, size: int, kind: int, flags: int) -> tuple[Status, int]:
        assert (kind, flags) == (1, 0)
        if address == self.refuses_at:
            return Status.CUDA_ERROR_NOT_SUPPORTED, -1
        made = memory_file(size)
        self.exports[address] = (made, os.dup(made))
        return Status.CUDA_SUCCESS, made


class Domain:
    """Remembers registrations, and maps what it is given as a device would."""

    def __init__(self) -> None:
        self.made: list[tuple[int, int, int, Access]] = []
        self.mapped: list[mmap.mmap] = []

    def register_dmabuf(self, descriptor: int, offset: int, size: int, base: int, access: Access) -> str:
        self.made.append((offset, size, base, access))
        self.mapped.append(mmap.mmap(descriptor, 0))
        return "region"

    def register(self, address: int, size: int, access: Access) -> str:
        raise AssertionError("device memory is never registered by its address")


def memory_file(size: int) -> int:
    descriptor = os.memfd_create("device")
    os.ftruncate(descriptor, size)
    return descriptor


@pytest.fixture
def memory() -> Iterator[LentMemory]:
    made = LentMemory(SIZES)
    yield made
    made.close()
    gc.collect()  # mappings, which have descriptors of their own


@pytest.fixture
def driver() -> Iterator[Driver]:
    made = Driver()
    yield made
    for _, kept in made.exports.values():
        os.close(kept)


def test_a_device_that_orders_writes_is_taken() -> None:
    check_device(Driver(), 0, Wish())
    check_device(Driver(ordering=200), 0, Wish())


@pytest.mark.parametrize(
    ("attributes", "words"),
    [({"ordering": 0}, "commit word"), ({"supported": 0}, "GPUDirect"), ({"dmabuf": 0}, "open kernel modules")],
)
def test_a_device_that_cannot_be_trusted_is_refused(attributes: dict[str, int], words: str, memory: LentMemory) -> None:
    driver = Driver(**attributes)
    with pytest.raises(RegistrationError, match=words):
        check_device(driver, 0, Wish())
    with pytest.raises(RegistrationError, match=words):
        hand_over(driver, 0, Wish(), INBOUND, OUTBOUND, memory.chain_end)
    assert driver.exports == {}


def test_a_driver_that_does_not_answer_is_no_consent(driver: Driver) -> None:
    driver.cuDeviceGetAttribute = lambda name, device: (Status.CUDA_ERROR_NOT_SUPPORTED, 100)  # type: ignore[method-assign]
    with pytest.raises(RegistrationError, match="NOT_SUPPORTED"):
        check_device(driver, 0, Wish())


@pytest.mark.parametrize("part", [Part(True, 4096, 8192), Part(False, 0, 4096), Part(False, 4096, 12 << 10)])
def test_no_more_than_the_part_is_registered(part: Part, memory: LentMemory, driver: Driver) -> None:
    domain = Domain()
    hand_over(driver, 0, Wish(), INBOUND, OUTBOUND, memory.chain_end)
    memory.receive(lambda: False)
    memory.register(domain, part, Access.REMOTE_READ)
    region = INBOUND if part.inbound else OUTBOUND
    assert domain.made == [(part.offset, part.size, region.address + part.offset, Access.REMOTE_READ)]
    domain.mapped[0][part.offset : part.offset + 5] = b"hello"  # the device's memory, whoever maps it
    assert os.pread(driver.exports[region.address][1], 5, part.offset) == b"hello"


def test_both_regions_are_exported_whole_and_only_the_control_process_keeps_them(
    memory: LentMemory, driver: Driver
) -> None:
    before = len(device_files())
    hand_over(driver, 0, Wish(), INBOUND, OUTBOUND, memory.chain_end)
    kept = [kept for _, kept in driver.exports.values()]
    assert [os.fstat(each).st_size for each in kept] == [INBOUND.size, OUTBOUND.size]
    assert len(device_files()) == before + 2, "the exporter has closed its own"
    memory.receive(lambda: False)
    assert len(device_files()) == before + 4
    assert not any(os.get_inheritable(each) for each in device_files() if each not in kept)
    memory.close()
    assert len(device_files()) == before + 2
    with pytest.raises(RdmaError, match="not there"):
        memory.register(Domain(), Part(True, 0, 64), Access.REMOTE_READ)


def device_files() -> list[int]:
    """Descriptors of this process for what stands in for device memory."""
    found = []
    for each in os.listdir("/proc/self/fd"):
        try:
            if "memfd:device" in os.readlink(f"/proc/self/fd/{each}"):
                found.append(int(each))
        except OSError:
            continue  # the listing's own
    return found


def test_what_the_driver_does_not_export_is_refused(memory: LentMemory, driver: Driver) -> None:
    driver.refuses_at = OUTBOUND.address
    before = len(device_files())
    with pytest.raises(RegistrationError, match="NOT_SUPPORTED"):
        hand_over(driver, 0, Wish(), INBOUND, OUTBOUND, memory.chain_end)
    assert len(device_files()) == before + 1, "the driver's own"
    with pytest.raises(RegistrationError, match="two regions"):
        memory.receive(lambda: False)


@pytest.mark.parametrize("region", [RegionAddress(INBOUND.address + 4096, PAGE), RegionAddress(INBOUND.address, 4096)])
def test_memory_that_is_not_on_pages_is_not_exported(region: RegionAddress, memory: LentMemory) -> None:
    with pytest.raises(RegistrationError, match="on pages"):
        hand_over(Driver(), 0, Wish(), region, OUTBOUND, memory.chain_end)


@pytest.mark.parametrize("part", [Part(True, -4096, 8192), Part(True, 1 << 20, 8), Part(False, 0, 0)])
def test_nothing_beside_the_arena_is_registered(part: Part, memory: LentMemory, driver: Driver) -> None:
    hand_over(driver, 0, Wish(), INBOUND, OUTBOUND, memory.chain_end)
    memory.receive(lambda: False)
    with pytest.raises(RdmaError, match="within the arena"):
        memory.register(Domain(), part, Access.REMOTE_READ)


def message(**changes: int) -> bytes:
    """As `send_regions` would make it, by hand."""
    fields = {
        "version": 2,
        "way": 1,
        "count": 2,
        "address": INBOUND.address,
        "size": INBOUND.size,
        "offset": 0,
        **changes,
    }
    head = struct.pack("<4sBBB", b"BNKM", fields["version"], fields["way"], fields["count"])
    first = struct.pack("<QQQ", fields["address"], fields["size"], fields["offset"])
    return head + first + struct.pack("<QQQ", OUTBOUND.address, OUTBOUND.size, 0)


def send(memory: LentMemory, content: bytes, sizes: list[int]) -> None:
    files = [memory_file(size) for size in sizes]
    socket.send_fds(memory.chain_end, [content], files)
    for each in files:
        os.close(each)


WHOLE = [INBOUND.size, OUTBOUND.size]


def test_the_message_is_as_described(memory: LentMemory) -> None:
    send(memory, message(), WHOLE)
    memory.receive(lambda: False)
    domain = Domain()
    memory.register(domain, Part(True, 4096, 64), Access.REMOTE_WRITE)
    assert domain.made == [(4096, 64, INBOUND.address + 4096, Access.REMOTE_WRITE)]


def test_a_region_may_begin_within_its_dma_buf(memory: LentMemory) -> None:
    send(memory, message(size=INBOUND.size + PAGE, offset=PAGE), [INBOUND.size + PAGE, OUTBOUND.size])
    memory.receive(lambda: False)
    domain = Domain()
    memory.register(domain, Part(True, 4096, 64), Access.REMOTE_WRITE)
    assert domain.made == [(PAGE + 4096, 64, INBOUND.address + 4096, Access.REMOTE_WRITE)]


@pytest.mark.parametrize(
    ("content", "sizes", "words"),
    [
        (message(version=1), WHOLE, "another form"),
        (message(way=3), WHOLE, "another form"),
        (message(count=3), WHOLE, "another form"),
        (message(address=0), WHOLE, "impossible address"),
        (message(address=(1 << 64) - PAGE), WHOLE, "impossible address"),
        (message(address=INBOUND.address + 4096), WHOLE, "on pages"),
        (message(offset=8), WHOLE, "on pages"),
        (message(size=INBOUND.size - 1), WHOLE, "on pages"),
        (message(size=0), WHOLE, "are needed"),
        (message(offset=INBOUND.size), WHOLE, "are needed"),
        (message(offset=(1 << 64) - PAGE), WHOLE, "are needed"),
        (message(size=1 << 40), WHOLE, "spoke of"),
        (message(), [PAGE, PAGE], "spoke of"),
        (message(), WHOLE[:1], "two regions"),
        (message(), [*WHOLE, PAGE], "two regions"),
        (message(), [], "two regions"),
        (message()[:-1], WHOLE, "two regions"),
        (message() + b"\0", WHOLE, "two regions"),
        (b"BNKM", WHOLE, "two regions"),
    ],
    ids=range(19),
)
def test_what_cannot_be_is_refused_and_nothing_kept(
    content: bytes, sizes: list[int], words: str, memory: LentMemory
) -> None:
    before = len(device_files())
    send(memory, content, sizes)
    with pytest.raises(RegistrationError, match=words):
        memory.receive(lambda: False)
    assert len(device_files()) == before


def test_what_has_no_size_is_refused(memory: LentMemory) -> None:
    ours, theirs = os.pipe()
    regions = [Exported(end, region.address, region.size) for end, region in ((ours, INBOUND), (theirs, OUTBOUND))]
    send_regions(memory.chain_end, *regions)
    for each in regions:
        each.close()
    with pytest.raises(RegistrationError, match="no memory"):
        memory.receive(lambda: False)


def test_a_chain_that_sends_nothing_is_refused_at_once(memory: LentMemory) -> None:
    alive = memory.chain_end.dup()
    with pytest.raises(RegistrationError, match="no memory over"):
        memory.receive(lambda: False)
    alive.close()
    with pytest.raises(RegistrationError, match="two regions"):
        memory.receive(lambda: False)


def test_addresses_and_descriptors_are_not_shown(memory: LentMemory) -> None:
    shown = repr([Exported(77, 0x7F77, PAGE), RegionAddress(0x7F77, PAGE)])
    assert "77" not in shown.replace(str(PAGE), "")


def test_a_front_end_is_given_its_channels_and_the_first_page_only() -> None:
    inbound, outbound = arena.InboundLayout(SIZES), arena.OutboundLayout(SIZES)
    assert inbound_parts(SIZES, (2,)) == [Part(True, inbound.channel_offset(2), inbound.channel_bytes)]
    first, channel = outbound_parts(SIZES, (2,))
    assert first == Part(False, 0, outbound.channel_offset(0))
    assert channel == Part(False, outbound.channel_offset(2), outbound.channel_bytes)
    assert inbound.channel_offset(0) > inbound.bell_offset, "the bell is nobody's over RDMA"


def test_a_real_gpu_beside_a_real_adapter() -> None:
    pytest.skip("needs a CUDA device and an RDMA adapter in one machine; Soft-RoCE refuses dma-bufs")
