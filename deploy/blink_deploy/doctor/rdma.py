"""RDMA devices, the private link, and the libraries of the transports."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from blink_deploy.doctor.errors import UnknownError
from blink_deploy.doctor.probe import Files, Probe
from blink_deploy.doctor.report import Finding, fail, ok, skip, warn, worst
from blink_deploy.doctor.site import Site, Transport
from blink_proto.links import ip_address_of, why_not_private
from blink_proto.rdma.binding import BINDINGS
from blink_proto.rdma.gids import gid_of, text_of

FOLDER = "/sys/class/infiniband"
LARGE_MTU = 4200
"""Of the interface, for RDMA's largest packets of 4,096 bytes and their headers."""
REORDERING = "MLX5_RELAXED_PACKET_ORDERING_ON"


@dataclass(frozen=True)
class Port:
    """A port of an RDMA device. `gids`: index to address, kind (`RoCE v2`) and network interface."""

    device: str
    number: str
    state: str
    layer: str
    rate: str
    gids: dict[int, tuple[str, str, str]]


def ports(files: Files) -> list[Port]:
    """All of this machine."""
    return [
        _port(files, device, number)
        for device in files.names(FOLDER)
        for number in files.names(f"{FOLDER}/{device}/ports")
    ]


def _port(files: Files, device: str, number: str) -> Port:
    base = f"{FOLDER}/{device}/ports/{number}"
    gids = {}
    for index in files.names(f"{base}/gids"):
        gid = files.text(f"{base}/gids/{index}") or ""
        kind, interface = (files.text(f"{base}/gid_attrs/{what}/{index}") or "" for what in ("types", "ndevs"))
        if gid.strip("0:"):
            gids[int(index)] = (gid, kind, interface)
    state, layer, rate = (files.text(f"{base}/{what}") or "unknown" for what in ("state", "link_layer", "rate"))
    return Port(device, number, state.partition(":")[2].strip() or state, layer, rate, gids)


def devices(probe: Probe, site: Site) -> Finding:
    """Devices and whether their links are up."""
    found = ports(probe.files)
    if not found:
        return fail(
            f"nothing in {FOLDER}",
            "load the device's driver (mlx5_ib); in a pod ask for the RDMA resource (rdma.resource)",
        )
    chosen = [port for port in found if site.device in ("", port.device)]
    if not chosen:
        return fail(f"no device {site.device}; there are {_names(found)}", "correct --rdma-device")
    seen = "; ".join(f"{port.device}/{port.number} {port.state}, {port.layer}, {port.rate}" for port in chosen)
    if any(port.state == "ACTIVE" for port in chosen):
        return ok(seen)
    return fail(seen, "no link is up: cable, the DPU's switch, `ip link set … up`")


def address(probe: Probe, site: Site) -> Finding:
    """Whether a device speaks for the link's address by RoCE v2."""
    if not site.address:
        return skip("give --rdma-address")
    wanted = _gid(site.address)
    entries = {
        f"{port.device} index {index}": kind
        for port in ports(probe.files)
        for index, (gid, kind, _) in port.gids.items()
        if gid == wanted
    }
    if "RoCE v2" in entries.values():
        places = ", ".join(place for place, kind in entries.items() if kind == "RoCE v2")
        return ok(f"{site.address} is {places}, RoCE v2")
    if entries:
        return fail(
            f"{site.address} is there for RoCE v1 only", "switch RoCE v2 on (cma_roce_mode), or update the driver"
        )
    known = {text for port in ports(probe.files) for gid, _, _ in port.gids.values() if (text := _mapped(gid))}
    where = f"no device has {site.address}; there are {', '.join(sorted(known)) or 'none'}"
    return fail(where, "give the link's interface that address, or correct --rdma-address")


def mtu(probe: Probe, site: Site) -> Finding:
    """Size of packets on the link."""
    interfaces = {
        interface
        for port in ports(probe.files)
        for gid, _, interface in port.gids.values()
        if interface and (gid == _gid(site.address) if site.address else site.device in ("", port.device))
    }
    sizes = {name: probe.files.number(f"/sys/class/net/{name}/mtu") for name in sorted(interfaces)}
    known = {name: size for name, size in sizes.items() if size is not None}
    if not known:
        return skip("no interface of an RDMA device is seen here")
    seen = ", ".join(f"{name} {size}" for name, size in known.items())
    if min(known.values()) >= LARGE_MTU:
        return ok(seen)
    return warn(seen, "9000 on both ends and in the DPU's switch: fewer packets")


def private_link(probe: Probe, site: Site) -> Finding:
    """Whether the interface that is declared private may be: prompts and tokens cross it as plaintext."""
    if not site.address:
        return skip("give --rdma-address: naming it declares that interface private")
    if reason := why_not_private(ip_address_of(site.address)):
        return fail(f"{site.address} {reason}", "give --rdma-address one of the interface's own, of a private network")
    name = next((name for name, found in probe.addresses().items() if site.address in found), None)
    if name is None:
        return warn(f"no interface here has {site.address}", "look where the program runs (in its pod or namespace)")
    if name in _default_routes(probe.files):
        todo = "payload crosses it as plaintext: take a link that leads to the other machine and nowhere else"
        return warn(f"{name} has {site.address} and the way to all other networks", todo)
    return ok(f"{name} has {site.address}, a private address, and no default route")


def files(probe: Probe, site: Site) -> Finding:
    """The kernel's files through which a program reaches the devices."""
    found = [name for name in probe.files.names("/dev/infiniband") if name.startswith("uverbs")]
    if not found:
        return fail("no /dev/infiniband/uverbs…", "modprobe ib_uverbs; in a pod ask for the RDMA resource")
    closed = [name for name in found if not probe.files.usable(f"/dev/infiniband/{name}")]
    if len(closed) == len(found):
        return fail(
            f"{', '.join(closed)}: not for this user", "mode 0666 or this user's group (udev; the device plugin)"
        )
    return ok(", ".join(name for name in found if name not in closed))


def verbs(probe: Probe, site: Site) -> Finding:
    """The bindings of the verbs transport: one of them must see a device."""
    seen, missing = {}, {}
    for binding in BINDINGS:
        try:
            seen[binding] = probe.verbs(binding)
        except UnknownError as error:
            missing[binding] = str(error)
    said = [f"{binding} sees {', '.join(names) or 'no device'}" for binding, names in seen.items()]
    said += [f"no {binding}: {reason}" for binding, reason in missing.items()]
    if any(seen.values()):
        return ok("; ".join(said))
    if site.transport is not Transport.VERBS:
        return skip(f"{'; '.join(said)}; --transport {site.transport} needs none")
    if seen:
        return fail("; ".join(said), "see rdma-devices; the provider's library (ibverbs-providers) may be missing")
    todo = "pip install 'blink-serving[rdma]' with Debian's libibverbs1 and ibverbs-providers, or python3-pyverbs"
    return fail("; ".join(said), todo)


def doca(probe: Probe, site: Site) -> Finding:
    """DOCA's libraries, as the doca transport loads and checks them."""
    try:
        return ok(f"DOCA {probe.doca(site.doca_libraries)}, with every function that is called")
    except UnknownError as error:
        if site.transport is not Transport.DOCA:
            return skip(f"{error}; --transport {site.transport} needs none")
        return fail(str(error), "install doca-sdk-common and doca-sdk-rdma, 2.9 to 3.x (never PyPI's pydoca)")


def ordering(probe: Probe, site: Site) -> Finding:
    """Switches that let writes pass each other, so that a commit word comes before what it commits."""
    if probe.environment.get(REORDERING, "0") not in ("", "0"):
        return fail(f"{REORDERING} is set", "unset it: both programs refuse to start")
    found = sorted({port.device for port in ports(probe.files) if site.device in ("", port.device)})
    if not found:
        return skip(f"{REORDERING} is not set; no device to look at")
    return worst([_device_ordering(probe, device) for device in found])


def _device_ordering(probe: Probe, device: str) -> Finding:
    pci = probe.files.target(f"{FOLDER}/{device}/device")[-1]
    try:
        said = probe.run(["mlxconfig", "-d", pci, "-e", "query", "PCI_WR_ORDERING"])
    except UnknownError as error:
        return skip(f"{device}: PCI_WR_ORDERING is unknown ({error}); it should be per_mkey(0)")
    if "force_relax" in said:
        todo = f"mlxconfig -d {pci} set PCI_WR_ORDERING=per_mkey, then a cold reset"
        return fail(f"{device}: PCI_WR_ORDERING force_relax", todo)
    if "per_mkey" in said:
        return ok(f"{device}: PCI_WR_ORDERING per_mkey")
    return skip(f"{device}: mlxconfig does not tell PCI_WR_ORDERING")


def _default_routes(files: Files) -> set[str]:
    """Interfaces that lead to all other networks, by IPv4."""
    lines = [line.split() for line in (files.text("/proc/net/route") or "").splitlines()[1:]]
    return {line[0] for line in lines if len(line) > 7 and line[1] == line[7] == "00000000"}


def _gid(text: str) -> str:
    """An IP address as sysfs writes an entry of the table."""
    return text_of(gid_of(text))


def _mapped(gid: str) -> str:
    """The IPv4 address of an entry, empty for others."""
    mapped = ipaddress.IPv6Address(gid).ipv4_mapped
    return str(mapped) if mapped else ""


def _names(found: list[Port]) -> str:
    return ", ".join(sorted({port.device for port in found}))
