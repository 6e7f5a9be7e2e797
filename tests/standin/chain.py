"""The process of a chain without its device: `python -m tests.standin.chain`, started as the real one is.

Its arena lies in files of memory, which it hands over as if they were dma-bufs of device memory; or with `OWNER`, the
name of a folder, in files there, which it registers itself when asked to (`table`). Scheduler and relay are the real
ones on emulated threads (the library that `BLINK_STANDIN` names); tokens follow from their positions.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu_runtime.chain.child import begin_child
from gpu_runtime.chain.cuda import Orders
from gpu_runtime.chain.loan import MemoryLoan
from gpu_runtime.chain.spec import ChainSpec
from gpu_runtime.config import scheduler_config
from gpu_runtime.registration.handover import PAGE, Exported, RegionAddress, send_addresses, send_regions
from gpu_runtime.registration.peermem_owner import Owner
from gpu_runtime.scheduler import host, layout
from gpu_runtime.shared_arena import SharedArena
from tests.standin import table

LIBRARY, SILENT, OWNER = "BLINK_STANDIN", "BLINK_STANDIN_SILENT", "BLINK_STANDIN_OWNER"
LONGEST_POLL = 0.02
ADDRESS = 0x7F00_0000_0000
"""Where the device would say that the arena lies."""


def token_at(position: int) -> int:
    """What is sampled at a position of any sequence; never a stop token."""
    return 3 + position * 7 % 200


@dataclass(frozen=True)
class Region:
    """What stands in for device memory."""

    descriptor: int
    view: NDArray[np.uint8]

    @classmethod
    def make(cls, name: str, size: int) -> Region:
        """Zeroed, in whole pages."""
        whole = -(-size // PAGE) * PAGE
        if OWNER in os.environ:
            descriptor = os.open(Path(os.environ[OWNER]) / name, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        else:
            descriptor = os.memfd_create("standin-device")
        os.ftruncate(descriptor, whole)
        return cls(descriptor, np.frombuffer(mmap.mmap(descriptor, whole), np.uint8))


class StandinChain:
    """Of CudaChain what the process around it uses."""

    def __init__(self, spec: ChainSpec, shared: SharedArena) -> None:
        self.inbound = Region.make("inbound", shared.inbound.nbytes)
        self.outbound = Region.make("outbound", shared.outbound.nbytes)
        self.outbound.view[: shared.outbound.nbytes] = shared.outbound
        library = os.environ[LIBRARY]
        host.use_library(Path(library))
        self._calls = calls = ctypes.CDLL(library)
        pointer, number = ctypes.c_void_p, ctypes.c_uint64
        calls.blink_relay_lie_in.argtypes = [pointer, pointer]
        calls.blink_relay_set_direct.argtypes = [pointer, number]
        calls.blink_relay_direct_seen.argtypes, calls.blink_relay_direct_seen.restype = [pointer], number
        calls.blink_relay_is_wanted.argtypes = [pointer]
        calls.blink_relay_turn.argtypes = [pointer, number, ctypes.c_uint32]
        calls.blink_relay_lie_in(self.inbound.view.ctypes.data, self.outbound.view.ctypes.data)
        self._scheduler = host.HostScheduler(
            scheduler_config(spec.config, spec.limits), shared.inbound, shared.outbound
        )
        if not spec.config.serves_local:
            calls.blink_relay_all_direct.argtypes = [pointer]
            calls.blink_relay_all_direct(self._scheduler._handle)
        self._command = layout.Command.RUN

    def command(self, command: layout.Command) -> None:
        self._command = command

    def set_direct(self, channels: int) -> None:
        self._calls.blink_relay_set_direct(self._scheduler._handle, channels)

    def direct_seen(self) -> int:
        return int(self._calls.blink_relay_direct_seen(self._scheduler._handle))

    def turn(self) -> Any:
        """One step; the next plan."""
        rows = self._scheduler.plan().rows
        self._scheduler._sampled[: len(rows)] = [token_at(int(row["position"])) for row in rows]
        self._calls.blink_relay_turn(self._scheduler._handle, time.monotonic_ns(), int(self._command))
        return self._scheduler.plan()

    def rest(self, command: Any) -> None:
        """As long as nothing is wanted of it."""
        end = time.monotonic() + LONGEST_POLL
        while time.monotonic() < end and command() == self._command:
            if self._calls.blink_relay_is_wanted(self._scheduler._handle):
                return
            time.sleep(0.0002)


def begin_as_owner(loan: MemoryLoan, chain: StandinChain) -> None:
    """The end of `MemoryLoan.begin` where the device has no dma-bufs, with a played device."""
    connection = loan._connection
    assert connection is not None
    inbound = RegionAddress(table.INBOUND, chain.inbound.view.nbytes)
    outbound = RegionAddress(table.OUTBOUND, chain.outbound.view.nbytes)
    send_addresses(connection, inbound, outbound)
    loan._owner = Owner(connection, {True: inbound, False: outbound}, table.Table)
    loan._owner.start()


def main() -> int:
    """See the module."""
    spec, mailbox, shared = begin_child()
    chain = StandinChain(spec, shared)
    loan = MemoryLoan(spec.memory_descriptor)
    if OWNER in os.environ:
        begin_as_owner(loan, chain)
    elif SILENT not in os.environ:
        regions = [Exported(one.descriptor, ADDRESS, one.view.nbytes) for one in (chain.inbound, chain.outbound)]
        with socket.socket(fileno=os.dup(spec.memory_descriptor)) as connection:
            send_regions(connection, *regions)
    mailbox.set_ready()
    orders = Orders(chain, mailbox)
    while True:
        orders.pass_on()
        plan = chain.turn()
        if plan.stopped:
            break
        if not plan.tokens:
            chain.rest(lambda: mailbox.command)
    mailbox.set_halted()
    loan.wait_end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
