"""The arena's device memory in the hands of the control process, which registers it for RDMA."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from gpu_runtime.config import RuntimeConfig
from gpu_runtime.registration.gpu_memory import hand_over
from gpu_runtime.registration.handover import RegionAddress
from gpu_runtime.registration.peermem_owner import Owner
from gpu_runtime.registration.ways import PEERMEM

if TYPE_CHECKING:
    from gpu_runtime.chain.device_scheduler import DeviceArena  # needs torch

LET_GO_SECONDS = 20.0
"""How long the control process may take to let it go, once the chain has ended."""


class MemoryLoan:
    """From `begin` on until the control process closes its end, at the end of the chain.

    Args:
        descriptor: see ChainSpec.memory_descriptor.
    """

    def __init__(self, descriptor: int) -> None:
        self._connection = socket.socket(fileno=descriptor) if descriptor >= 0 else None
        self._owner: Owner | None = None

    def begin(self, arena: DeviceArena, config: RuntimeConfig, driver: Any, device: Any) -> None:
        """Hands both regions over, if they are wanted, or registers them from now on when the control process asks.

        Args:
            driver, device: `cuda.bindings.driver` and the CUdevice that has them.

        Raises:
            RegistrationError: the device cannot be trusted with RDMA, or exports nothing.
        """
        if self._connection is None:
            return
        inbound, outbound = (RegionAddress(one.address, one.size) for one in (arena.inbound, arena.outbound))
        if hand_over(driver, device, config.rdma_wish, inbound, outbound, self._connection) == PEERMEM:
            self._owner = Owner(self._connection, {True: inbound, False: outbound})
            self._owner.start()

    def wait_end(self, seconds: float = LET_GO_SECONDS) -> None:
        """Until everything that was registered is revoked. What is held on to longer the driver keeps."""
        if self._connection is None:
            return
        if self._owner is not None:
            self._owner.wait_end(seconds)
            return
        self._connection.settimeout(seconds)
        with suppress(OSError):
            self._connection.recv(1)
