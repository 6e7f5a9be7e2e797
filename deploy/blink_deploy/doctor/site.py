"""What a machine is for."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from blink_deploy.doctor.probe import Probe
from blink_proto.dial import Dial


class Part(StrEnum):
    """Which part of Blink runs on a machine."""

    GPU = "gpu"
    """The GPU runtime, with front ends elsewhere."""
    DPU = "dpu"
    """The front end, with the GPU runtime elsewhere."""
    SINGLE = "single"
    """Both, over shared memory."""


class Transport(StrEnum):
    """How the two programs share the arena."""

    SHM = "shm"
    VERBS = "verbs"
    DOCA = "doca"


@dataclass(frozen=True)
class Site:
    """Args:
    address: of the private link's end on this machine, as in `--rdma-address`; empty: not told.
    device: RDMA device, as in `--rdma-device`; empty: the one with the address.
    doca_libraries: folder of DOCA's libraries; None: where the transport looks.
    https_cert: PEM file that clients are shown, as in `--tls-cert`; empty: not told.
    """

    part: Part
    transport: Transport
    dial: Dial = field(default_factory=lambda: Dial("127.0.0.1:50051"))
    address: str = ""
    device: str = ""
    doca_libraries: str | None = None
    https_cert: str = ""


def guess_part(probe: Probe) -> Part:
    """A BlueField's Arm cores are for the front end; a machine with NVIDIA's GPU driver and an RDMA device for the GPU
    runtime; any other for both programs.
    """
    if probe.machine == "aarch64" and is_bluefield(probe):
        return Part.DPU
    if probe.files.exists("/proc/driver/nvidia/version") and probe.files.names("/sys/class/infiniband"):
        return Part.GPU
    return Part.SINGLE


def is_bluefield(probe: Probe) -> bool:
    """By the name that the firmware gives, or the release file of NVIDIA's image."""
    names = ("/sys/class/dmi/id/product_name", "/proc/device-tree/model", "/etc/mlnx-release")
    return any("bluefield" in (probe.files.text(name) or "").lower() for name in names)


def usual_transport(part: Part) -> Transport:
    """Where none is named."""
    return Transport.SHM if part is Part.SINGLE else Transport.VERBS
