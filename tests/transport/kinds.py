"""The transports that the contract is held against, each with what it takes to set one up over a scripted device.

To add one: a `Kind` in `KINDS`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from blink_proto.doca.settings import DocaSettings
from blink_proto.rdma.binding import OPENERS, RdmaError, open_device
from blink_proto.rdma.choice import RdmaChoice
from dpu_service.transport.base import Connector
from dpu_service.transport.choose import make_connector
from gpu_runtime.registration.base import Registrar
from gpu_runtime.registration.parts import Part
from gpu_runtime.registration.shm import ShmRegistrar
from tests.replay import ReplayDevice
from tests.transport.doca.build import SHIM_ADDRESS, shim_folder
from tests.transport.forging import DocaForge, Forge, StandInForge, VerbsForge
from tests.transport.played import ADDRESS, REFUSED, PlayedDevice, PlayedDeviceWithoutWindows

OPENERS["played"], OPENERS["played-regions"] = PlayedDevice, PlayedDeviceWithoutWindows

RDMA_ADDRESS = os.environ.get("BLINK_RDMA_ADDRESS", "10.9.0.1")
DOCA_ADDRESS = os.environ.get("BLINK_DOCA_ADDRESS", "")
"""Of a card on this machine that DOCA is to use; without one a stand-in for DOCA's libraries is built and used."""


@dataclass(frozen=True)
class Kind:
    """A transport under test.

    `why_not` says why it cannot run here, or nothing. `guards`: its registrations give the least rights, and can be
    revoked; where memory is shared by its name there is nothing to guard with.
    """

    name: str
    connector: Callable[[], Connector]
    registrar: Callable[[ReplayDevice], Registrar]
    why_not: Callable[[], str]
    guards: bool
    refusal: str = "."
    """What errors say when the other end refuses an access."""
    apart: bool = True
    """Both ends may be processes of their own."""
    forge: Forge | None = None
    """For answers with other keys; None where there are no keys."""


def _shm_registrar(device: ReplayDevice) -> Registrar:
    shared: Any = SimpleNamespace(name=SimpleNamespace(transport_blob=device.blob))
    return ShmRegistrar(shared)


class DeviceMemory:
    """A scripted device's arena, for `ArenaMemory`."""

    no_windows = ""

    def __init__(self, device: ReplayDevice) -> None:
        self._regions = {True: np.frombuffer(device.inbound, np.uint8), False: np.frombuffer(device.outbound, np.uint8)}

    def register(self, domain: Any, part: Part, access: Any) -> Any:
        """As `HostMemory` does."""
        return domain.register(int(self._regions[part.inbound].ctypes.data) + part.offset, part.size, access)


def _verbs(name: str, binding: str, address: str = RDMA_ADDRESS, apart: bool = True) -> Kind:
    """The verbs transport with both ends by one package."""

    def registrar(device: ReplayDevice) -> Registrar:
        from gpu_runtime.registration.verbs import VerbsRegistrar

        return VerbsRegistrar(DeviceMemory(device), device.sizes, choice)

    choice = RdmaChoice("", address, binding)

    def connector() -> Connector:
        return make_connector("verbs", choice)

    return Kind(name, connector, registrar, lambda: why_no_verbs(choice), True, REFUSED, apart, VerbsForge())


def why_no_verbs(choice: RdmaChoice) -> str:
    """Why there is no RDMA device to be had, or an empty string."""
    try:
        open_device("", choice.address, choice.bindings).close()
    except RdmaError as error:
        return f"{error}; make test-rdma runs this in a virtual machine"
    return ""


def doca_settings() -> DocaSettings:
    """For both ends."""
    if DOCA_ADDRESS:
        return DocaSettings(address=DOCA_ADDRESS)
    return DocaSettings(address=SHIM_ADDRESS, libraries=str(shim_folder()))


def _doca_connector() -> Connector:
    from dpu_service.transport.doca.connector import DocaConnector

    return DocaConnector(doca_settings())


def _doca_registrar(device: ReplayDevice) -> Registrar:
    from gpu_runtime.registration.doca import DocaRegistrar

    return DocaRegistrar(DeviceMemory(device), device.sizes, doca_settings())


def why_no_doca() -> str:
    """Why DOCA, or the stand-in for it, cannot be had here."""
    if not DOCA_ADDRESS and shutil.which("cc") is None:
        return "there is no C compiler to build a stand-in for DOCA with"
    return ""


_DOCA_FORGE = DocaForge() if DOCA_ADDRESS else StandInForge()
KINDS = {
    kind.name: kind
    for kind in (
        Kind("shm", lambda: make_connector("shm", RdmaChoice()), _shm_registrar, lambda: "", guards=False),
        _verbs("verbs", "ibverbs"),
        _verbs("verbs-pyverbs", "pyverbs"),
        _verbs("verbs-played", "played", ADDRESS, apart=False),
        _verbs("verbs-played-regions", "played-regions", ADDRESS, apart=False),
        Kind("doca", _doca_connector, _doca_registrar, why_no_doca, guards=True, forge=_DOCA_FORGE),
    )
}
