"""Which way RDMA devices get at a CUDA device's memory, and how the chain's process lends it in each."""

from __future__ import annotations

import logging
import os
import socket
import struct
from collections.abc import Callable
from typing import Any

import pytest

from blink_proto import arena
from blink_proto.rdma.binding import RdmaError, Shared
from blink_proto.rdma.uverbs import UverbsFile
from gpu_runtime.config import ConfigError, make_config
from gpu_runtime.registration import gpu_memory, ways
from gpu_runtime.registration.base import RegistrationError
from gpu_runtime.registration.gpu_memory import check_device, hand_over
from gpu_runtime.registration.grants import WRITABLE
from gpu_runtime.registration.handover import PAGE, send_addresses
from gpu_runtime.registration.memory import LentMemory
from gpu_runtime.registration.parts import Part
from gpu_runtime.registration.peermem import Asker
from gpu_runtime.registration.peermem_owner import Owner
from gpu_runtime.registration.ways import AUTO, DMA_BUF, PEERMEM, Wish, choose_way
from tests.unit.test_registration_gpu import INBOUND, OUTBOUND, SIZES, Driver
from tests.unit.test_registration_peermem import DOMAIN, PART, Device


@pytest.mark.parametrize("doca", [False, True])
@pytest.mark.parametrize("peermem", [False, True])
@pytest.mark.parametrize("dma_buf", [False, True])
@pytest.mark.parametrize("way", [AUTO, DMA_BUF, PEERMEM])
def test_the_way(way: str, dma_buf: bool, peermem: bool, doca: bool) -> None:
    """The table, by hand: dma-bufs unless they are not there or not wished for; nothing else by doca."""
    taken = {
        (AUTO, True, False): DMA_BUF,
        (AUTO, True, True): DMA_BUF,
        (AUTO, False, True): "" if doca else PEERMEM,
        (DMA_BUF, True, False): DMA_BUF,
        (DMA_BUF, True, True): DMA_BUF,
        (PEERMEM, False, True): "" if doca else PEERMEM,
        (PEERMEM, True, True): "" if doca else PEERMEM,
    }.get((way, dma_buf, peermem), "")
    if taken:
        assert choose_way(Wish(way, doca), dma_buf=dma_buf, peermem=peermem) == taken
        return
    missing = {(PEERMEM, False): "nvidia-peermem is not loaded", (PEERMEM, True): "the doca transport"}.get(
        (way, peermem), "cannot be exported as dma-bufs"
    )
    with pytest.raises(RegistrationError, match=missing):
        choose_way(Wish(way, doca), dma_buf=dma_buf, peermem=peermem)


def test_what_both_ways_lack_is_said() -> None:
    with pytest.raises(RegistrationError, match=r"open kernel modules.*nvidia-peermem is not loaded"):
        choose_way(Wish(), dma_buf=False, peermem=False)
    with pytest.raises(RegistrationError, match=r"open kernel modules.*the doca transport reaches"):
        choose_way(Wish(doca=True), dma_buf=False, peermem=True)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_memory, "has_peermem", lambda: True)


def test_the_device_is_asked_for_the_order_of_writes_all_the_same(loaded: None) -> None:
    assert check_device(Driver(dmabuf=0), 0, Wish()) == PEERMEM
    for attributes in ({"ordering": 0}, {"supported": 0}):
        with pytest.raises(RegistrationError, match=r"commit word|GPUDirect"):
            check_device(Driver(dmabuf=0, **attributes), 0, Wish(PEERMEM))


@pytest.mark.parametrize("way", [DMA_BUF, PEERMEM])
def test_copies_to_the_arena_are_made_synchronous(way: str, loaded: None) -> None:
    """For the whole allocation, where that begins; before anything is handed over."""
    driver, memory = Driver(), LentMemory(SIZES)
    assert hand_over(driver, 0, Wish(way), INBOUND, OUTBOUND, memory.chain_end) == way
    assert driver.pointers == {("sync", INBOUND.address - PAGE): 1, ("sync", OUTBOUND.address - PAGE): 1}
    memory.receive(lambda: False)
    assert memory.way == way
    memory.close()
    for descriptors in driver.exports.values():
        os.close(descriptors[1])


def test_a_driver_that_does_not_do_that_hands_nothing_over(loaded: None) -> None:
    driver, memory = Driver(), LentMemory(SIZES)
    refused = driver.cuDeviceGetAttribute("dmabuf", 0)[0].__class__.CUDA_ERROR_NOT_SUPPORTED
    driver.cuPointerSetAttribute = lambda *_: (refused,)  # type: ignore[method-assign]
    with pytest.raises(RegistrationError, match=r"synchronous \(CUDA_ERROR_NOT_SUPPORTED\)"):
        hand_over(driver, 0, Wish(PEERMEM), INBOUND, OUTBOUND, memory.chain_end)
    with pytest.raises(RegistrationError, match="two regions"):
        memory.receive(lambda: False)
    memory.close()


class Domain:
    """Of a binding's domain, what is used."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared

    def adopt(self, register: Callable[[Shared], Any]) -> Any:
        return register(self._shared)


def test_the_control_process_registers_no_more_than_the_arena(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    memory, device = LentMemory(SIZES), Device()
    theirs = memory.chain_end.dup()
    send_addresses(memory.chain_end, INBOUND, OUTBOUND)
    memory.receive(lambda: False)
    assert (memory.way, "the GPU's memory by peermem" in caplog.text) == (PEERMEM, True)
    assert "nvidia-peermem" in memory.no_windows
    held: Any = memory._lent
    held._asker._open_file = lambda descriptor: device
    owner = Owner(theirs, {True: INBOUND, False: OUTBOUND}, lambda descriptor: device)
    owner.start()
    domain: Any = Domain(Shared(theirs.fileno(), DOMAIN))
    needed = arena.InboundLayout(SIZES).total_bytes
    for part in (Part(True, needed - 4096, 8192), Part(True, -4096, 4096), Part(True, 0, 0)):
        with pytest.raises(RdmaError, match="within the arena"):
            memory.register(domain, part, WRITABLE)
    region = memory.register(domain, Part(True, needed - 4096, 4096), WRITABLE)
    assert int(region.address) == INBOUND.address + needed - 4096
    region.close()
    memory.close()
    owner.wait_end(5)
    assert (memory.way, device.ever) == ("", 1)
    with pytest.raises(RdmaError, match="not there"):
        memory.register(domain, PART, WRITABLE)


@pytest.mark.parametrize(
    ("address", "size", "descriptors", "words"),
    [
        (0, INBOUND.size, 0, "impossible address"),
        (INBOUND.address + 4096, INBOUND.size, 0, "on pages"),
        (INBOUND.address, PAGE - 1, 0, "on pages"),
        (INBOUND.address, 0, 0, "are needed"),
        (INBOUND.address, INBOUND.size, 1, "two regions"),
        (INBOUND.address, INBOUND.size, 2, "two regions"),
    ],
)
def test_addresses_that_cannot_be_are_refused(address: int, size: int, descriptors: int, words: str) -> None:
    memory = LentMemory(SIZES)
    content = struct.pack("<4sBBB", b"BNKM", 2, 2, 2) + struct.pack("<QQQ", address, size, 0)
    content += struct.pack("<QQQ", OUTBOUND.address, OUTBOUND.size, 0)
    with open("/dev/null") as file:
        socket.send_fds(memory.chain_end, [content], [file.fileno()] * descriptors)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(RegistrationError, match=words):
        memory.receive(lambda: False)
    assert len(os.listdir("/proc/self/fd")) <= before - 1, "without its end for the chain's process"
    memory.close()


def test_the_option() -> None:
    chosen = {"transports": ("verbs",), "rdma_address": "192.0.2.1"}
    assert make_config("cuda", **chosen).rdma_wish == Wish(AUTO, doca=False)
    assert make_config("cuda", gpu_memory=PEERMEM, **chosen).rdma_wish == Wish(PEERMEM, doca=False)
    chosen["transports"] = ("verbs", "doca")
    assert make_config("cuda", gpu_memory=DMA_BUF, **chosen).rdma_wish == Wish(DMA_BUF, doca=True)
    with pytest.raises(ConfigError, match="the doca transport reaches GPU memory by dma-bufs alone"):
        make_config("cuda", gpu_memory=PEERMEM, **chosen)
    with pytest.raises(ConfigError, match="--gpu-memory must be one of: auto, dma-buf, peermem"):
        make_config("cuda", gpu_memory="bar1")
    with pytest.raises(ConfigError, match="the soft GPU's memory is the host's"):
        make_config("cpu", gpu_memory=PEERMEM)


def test_the_module_is_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(ways, "MODULE", tmp_path / "nvidia_peermem")
    assert not ways.has_peermem()
    (tmp_path / "nvidia_peermem").mkdir()
    assert ways.has_peermem()


def test_a_real_device_file_is_asked_for() -> None:
    """What stands in for it here is not what is used otherwise."""
    assert Owner.__init__.__defaults__ == (UverbsFile,)
    assert Asker.__init__.__defaults__ == (UverbsFile,)
