"""`blinkctl doctor` itself."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from blink_deploy.doctor.checks import examine, is_fit
from blink_deploy.doctor.probe import Probe
from blink_deploy.doctor.report import Finding, Result
from blink_deploy.doctor.site import Part, Site, Transport, guess_part, usual_transport
from blink_deploy.output import REFUSED, USAGE, plain, say_error, show
from blink_proto.links import ip_address_of

AUTO = "auto"
_STYLES = {Result.OK: "green", Result.WARN: "yellow", Result.FAIL: "bold red", Result.SKIPPED: "dim"}


def doctor(
    context: typer.Context,
    role: Annotated[
        str, typer.Option(help="What runs on this machine: gpu, dpu or single (both); auto: by what it has.")
    ] = AUTO,
    transport: Annotated[str, typer.Option(help="shm, verbs or doca; auto: shm for single, else verbs.")] = AUTO,
    rdma_address: Annotated[str, typer.Option(help="This machine's end of the private link, as blink-gpu's.")] = "",
    rdma_device: Annotated[str, typer.Option(help="RDMA device; default: every one.")] = "",
    doca_libraries: Annotated[
        str | None, typer.Option(help="Folder of DOCA's libraries; default: where the transport looks.")
    ] = None,
    https_cert: Annotated[str, typer.Option(help="PEM file that clients are shown, as blink-dpu's --tls-cert.")] = "",
    strict: Annotated[bool, typer.Option("--strict", help="Status 1 for warnings too.")] = False,
) -> None:
    """Checks this machine: GPU, RDMA, limits, clock, certificates, control plane; says what to do. Changes nothing.

    Status 0: nothing failed (warnings do not count unless --strict is given); 1: a check failed; 2: wrong usage.
    """
    probe = Probe()
    try:
        part = guess_part(probe) if role == AUTO else Part(role)
        chosen = usual_transport(part) if transport == AUTO else Transport(transport)
        if rdma_address:
            ip_address_of(rdma_address)
    except ValueError as error:
        say_error(str(error))
        raise typer.Exit(USAGE) from error
    site = Site(part, chosen, context.obj.dial, rdma_address, rdma_device, doca_libraries, https_cert)
    findings = examine(probe, site)
    show(context.obj.output, as_json(site, findings), lambda: as_table(site, findings))
    if not is_fit(findings, strict=strict):
        raise typer.Exit(REFUSED)


def as_json(site: Site, findings: dict[str, Finding]) -> dict[str, Any]:
    """For programs."""
    checks = [
        {"name": name, "result": found.result.value, "seen": found.seen, "todo": found.todo}
        for name, found in findings.items()
    ]
    return {"role": site.part.value, "transport": site.transport.value, "checks": checks}


def as_table(site: Site, findings: dict[str, Finding]) -> Table:
    """For people: what to do stands below what was seen."""
    counts = Counter(found.result for found in findings.values())
    told = ", ".join(f"{counts[result]} {result}" for result in Result if counts[result])
    title = f"role {site.part}, transport {site.transport}: {told}"
    made = Table("check", "result", "seen, and what to do", title=title, title_justify="left")
    for name, found in findings.items():
        text = Text(plain(found.seen))
        if found.todo:
            text.append(f"\n→ {plain(found.todo)}", style="italic")
        made.add_row(name, Text(found.result.value, style=_STYLES[found.result]), text)
    return made
