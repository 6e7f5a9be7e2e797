"""The way on the bus between the RDMA device and the GPU."""

from __future__ import annotations

from blink_deploy.doctor.errors import UnknownError
from blink_deploy.doctor.probe import Files, Probe
from blink_deploy.doctor.rdma import FOLDER
from blink_deploy.doctor.report import Finding, fail, ok, skip, warn, worst
from blink_deploy.doctor.site import Site

DEVICES = "/sys/bus/pci/devices"
_EXTENDED = 0x100
"""Where the list of extended capabilities begins; without privileges the kernel shows the first 64 bytes only."""
_ACS = 0x000D
REDIRECTS = {0x04: "request redirect", 0x08: "completion redirect"}
"""Bits of the ACS control register that send traffic between two devices up to the root."""


def path(probe: Probe, site: Site) -> Finding:
    """Whether RDMA device and GPU hang below one switch or root port, and whether ACS lets them talk directly."""
    networks, gpus = _networks(probe, site), [gpu.pci for gpu in probe.gpus().devices]
    if not networks or not gpus:
        return skip("there is no RDMA device on the bus" if gpus else "there is no GPU")
    return worst([_nearest(probe.files, gpu, networks) for gpu in gpus])


def _nearest(files: Files, gpu: str, networks: list[str]) -> Finding:
    """Of the RDMA devices the one that shares most of its way with the GPU."""
    ways = {network: _shared(files, gpu, network) for network in networks}
    network = max(ways, key=lambda each: len(ways[each]))
    shared = ways[network]
    if not shared:
        todo = "across root ports peer-to-peer is slow or fails: take devices below one PCIe switch or root port"
        return warn(f"{gpu} and {network} share no root port", todo)
    bridges = [name for device in (gpu, network) for name in _way(files, device)[:-1] if name not in shared]
    seen = f"{gpu} and {network} meet below {shared[-1]}"
    states = {name: _redirects(files, name) for name in dict.fromkeys(bridges)}
    redirecting = [f"{name} ({', '.join(state)})" for name, state in states.items() if state]
    if redirecting:
        todo = "switch ACS redirect off on these bridges (firmware, or setpci at boot): peer-to-peer is slow or fails"
        return warn(f"{seen}; ACS redirects at {', '.join(redirecting)}", todo)
    unknown = [name for name, state in states.items() if state is None]
    return ok(
        seen
        + (f"; ACS of {', '.join(unknown)} is not to be read by this user" if unknown else "; ACS redirects nothing")
    )


def iommu(probe: Probe, site: Site) -> Finding:
    """Whether addresses on the bus are translated."""
    if not probe.files.names("/sys/class/iommu"):
        return ok("no IOMMU is on")
    devices = [*_networks(probe, site), *_gpus(probe)]
    kinds = {name: probe.files.text(f"{DEVICES}/{name}/iommu_group/type") for name in devices}
    known = {name: kind for name, kind in kinds.items() if kind}
    if not known:
        return skip("an IOMMU is on; the groups of GPU and RDMA device are not seen here")
    seen = ", ".join(f"{name} {kind}" for name, kind in known.items())
    if all(kind == "identity" for kind in known.values()):
        return ok(f"passthrough: {seen}")
    return fail(
        seen, "translated addresses make peer-to-peer fail, or reads of it: boot with iommu=pt, or without IOMMU"
    )


def _networks(probe: Probe, site: Site) -> list[str]:
    names = [name for name in probe.files.names(FOLDER) if site.device in ("", name)]
    found = [probe.files.target(f"{FOLDER}/{name}/device")[-1] for name in names]
    return sorted({name for name in found if probe.files.exists(f"{DEVICES}/{name}")})


def _gpus(probe: Probe) -> list[str]:
    try:
        return [gpu.pci for gpu in probe.gpus().devices]
    except UnknownError:
        return []


def _way(files: Files, device: str) -> list[str]:
    """From the root port to the device: addresses on the bus."""
    return [part for part in files.target(f"{DEVICES}/{device}") if part.count(":") == 2]


def _shared(files: Files, one: str, other: str) -> list[str]:
    """Bridges that both ways have, from the root port on."""
    shared = []
    for first, second in zip(_way(files, one)[:-1], _way(files, other)[:-1], strict=False):
        if first != second:
            break
        shared.append(first)
    return shared


def _redirects(files: Files, bridge: str) -> list[str] | None:
    """What a bridge's ACS redirects; None when that cannot be read."""
    config = files.data(f"{DEVICES}/{bridge}/config")
    if len(config) <= _EXTENDED:
        return None
    at, seen = _EXTENDED, set()
    while at and at + 8 <= len(config) and at not in seen:
        seen.add(at)
        header = int.from_bytes(config[at : at + 4], "little")
        if header & 0xFFFF == _ACS:
            control = int.from_bytes(config[at + 6 : at + 8], "little")
            return [words for bit, words in REDIRECTS.items() if control & bit]
        at = header >> 20
    return []
