"""All checks, in the order in which they are told; GUIDE.md explains each by its name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from blink_deploy.doctor import certificates, control, gpu, limits, machine, pci, rdma
from blink_deploy.doctor.errors import UnknownError
from blink_deploy.doctor.probe import Probe
from blink_deploy.doctor.report import Finding, Result, skip
from blink_deploy.doctor.site import Part, Site


@dataclass(frozen=True)
class Check:
    """`look` is called with the machine and what it is for."""

    name: str
    parts: frozenset[Part]
    look: Callable[[Probe, Site], Finding]


_GPU = frozenset({Part.GPU})
_WITH_GPU = frozenset({Part.GPU, Part.SINGLE})
_LINK = frozenset({Part.GPU, Part.DPU})
_FRONT = frozenset({Part.DPU, Part.SINGLE})
_ALL = frozenset(Part)

CHECKS: Sequence[Check] = (
    Check("gpu-driver", _WITH_GPU, gpu.driver),
    Check("gpu-modules", _GPU, gpu.open_modules),
    Check("gpu-direct", _GPU, gpu.direct_rdma),
    Check("gpu-dma-buf", _GPU, gpu.dma_buf),
    Check("gpu-peermem", _GPU, gpu.peermem),
    Check("gpu-write-order", _GPU, gpu.write_order),
    Check("gpu-bar1", _GPU, gpu.bar1),
    Check("gpu-clocks", _WITH_GPU, gpu.clocks),
    Check("gpu-persistence", _WITH_GPU, gpu.persistence),
    Check("rdma-devices", _LINK, rdma.devices),
    Check("rdma-files", _LINK, rdma.files),
    Check("rdma-modules", _LINK, machine.modules),
    Check("rdma-verbs", _LINK, rdma.verbs),
    Check("rdma-doca", _LINK, rdma.doca),
    Check("rdma-address", _LINK, rdma.address),
    Check("rdma-mtu", _LINK, rdma.mtu),
    Check("rdma-ordering", _LINK, rdma.ordering),
    Check("private-link", _LINK, rdma.private_link),
    Check("bus-path", _GPU, pci.path),
    Check("iommu", _GPU, pci.iommu),
    Check("locked-memory", _LINK, limits.locked_memory),
    Check("open-files", _ALL, limits.open_files),
    Check("shared-memory", _ALL, limits.shared_memory),
    Check("huge-pages", _ALL, limits.huge_pages),
    Check("clock", _ALL, machine.clock),
    Check("processors", _ALL, machine.processors),
    Check("page-size", _ALL, machine.page_size),
    Check("kernel", _ALL, machine.kernel),
    Check("certificates", _ALL, certificates.own_pair),
    Check("https-certificate", _FRONT, certificates.shown_to_clients),
    Check("control-plane", _ALL, control.reachable),
    Check("arena", _ALL, control.same_arena),
)


def examine(probe: Probe, site: Site) -> dict[str, Finding]:
    """Every check that the machine's part has, by name. What cannot be told is skipped with the reason."""
    return {check.name: _look(check, probe, site) for check in CHECKS if site.part in check.parts}


def _look(check: Check, probe: Probe, site: Site) -> Finding:
    try:
        return check.look(probe, site)
    except UnknownError as error:
        return skip(str(error))


def is_fit(findings: dict[str, Finding], *, strict: bool) -> bool:
    """Whether nothing failed; strict: nothing is to be warned of either."""
    bad = {Result.FAIL, Result.WARN} if strict else {Result.FAIL}
    return not bad & {finding.result for finding in findings.values()}
