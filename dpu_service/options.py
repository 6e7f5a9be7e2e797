"""The options of `blink-dpu`: dataclasses whose fields are options, in the groups in which `--help` shows them.

Times in seconds.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, get_args, get_type_hints

import typer
from typer import Option

from blink_proto.links import TRANSPORTS, LinkError, check_link
from blink_proto.rdma.binding import AUTO as ANY_BINDING
from blink_proto.rdma.binding import BINDING_CHOICES
from dpu_service.text.tools.formats import AUTO, CHOICES

OFF = "off"
DEFAULT_RUNTIME = "127.0.0.1:50051"
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True)
class Runtimes:
    """The GPU runtimes and the way to them"""

    runtime: Annotated[list[str], Option(help="Control plane of a GPU runtime; again for each further one.")] = field(
        default_factory=lambda: [DEFAULT_RUNTIME]
    )
    runtime_ca: Annotated[str, Option(help="PEM authorities of their certificates; default: plain text.")] = ""
    runtime_cert: Annotated[str, Option(help="PEM certificate towards them, for the role front-end.")] = ""
    runtime_key: Annotated[str, Option(help="PEM key of --runtime-cert.")] = ""
    runtime_server_name: Annotated[str, Option(help="Name in their certificates, if they are called by another.")] = ""
    runtime_insecure: Annotated[
        bool, Option("--runtime-insecure", help="Plain text also to runtimes on other machines.")
    ] = False
    name: Annotated[str, Option(help="Stable name towards the runtimes; default: host and port.")] = ""
    transport: Annotated[str, Option(help=f"How to reach the arenas: {', '.join(TRANSPORTS)}.")] = "shm"
    rdma_device: Annotated[str, Option(help="RDMA device; default: the one with --rdma-address.")] = ""
    rdma_address: Annotated[
        str, Option(help="Its IP address, not a public one: so you declare that network private; payload is plaintext.")
    ] = ""
    verbs_binding: Annotated[str, Option(help=f"Package for --transport verbs: {', '.join(BINDING_CHOICES)}.")] = (
        ANY_BINDING
    )
    device_timeout: Annotated[float, Option(min=1, help="Seconds of silence that mean a lost device.")] = 10.0


@dataclass(frozen=True)
class Addresses:
    """Where clients ask, TLS and keys"""

    https: Annotated[str, Option(help="Address for HTTPS, or 'off'.")] = "127.0.0.1:8443"
    http: Annotated[str, Option(help="Address for plain HTTP, or 'off'.")] = "127.0.0.1:8000"
    tls_cert: Annotated[str, Option(help="PEM certificate chain; default: a self-signed one.")] = ""
    tls_key: Annotated[str, Option(help="PEM key of --tls-cert.")] = ""
    tls_client_ca: Annotated[
        str, Option(help="PEM certificates of authorities; clients must then have a certificate of theirs.")
    ] = ""
    tls_min_version: Annotated[str, Option(help="1.2 or 1.3.")] = "1.2"
    data_dir: Annotated[str, Option(help="Where the self-signed certificate is kept.")] = ""
    api_keys: Annotated[str, Option(help="File of tenants and their keys; default: anybody may ask.")] = ""
    open_metrics: Annotated[bool, Option(help="/metrics needs no key.")] = False


@dataclass(frozen=True)
class Limits:
    """What clients may hold"""

    queue_depth: Annotated[
        int, Option(min=1, help="Sequences of a worker and runtime that may wait for their first token.")
    ] = 256
    keep_alive: Annotated[float, Option(min=1, help="Seconds that an idle connection stays open.")] = 130.0
    header_timeout: Annotated[float, Option(min=1, help="Seconds for the head of a request.")] = 20.0
    body_timeout: Annotated[float, Option(min=1, help="Seconds for the body of a request.")] = 60.0
    write_timeout: Annotated[float, Option(min=1, help="Seconds that a client may leave its answer unread.")] = 60.0
    max_connections: Annotated[int, Option(min=1, help="Open connections of a worker and address.")] = 8192
    http2_streams: Annotated[int, Option(min=1, max=10_000, help="Open requests of an HTTP/2 connection.")] = 128
    max_body_bytes: Annotated[int, Option(min=1024, help="Bytes of a request's body at most.")] = 8 << 20


@dataclass(frozen=True)
class Life:
    """Workers, start and end"""

    workers: Annotated[int, Option(min=0, max=64, help="Worker processes; 0: by the number of cores.")] = 0
    grace: Annotated[float, Option(min=0, help="Seconds to finish running requests at the end.")] = 30.0
    unready: Annotated[
        float, Option(min=0, help="Seconds to go on serving at the end while probes hear that it is not ready.")
    ] = 0.0
    access_log: Annotated[bool, Option(help="One JSON line for each request.")] = True
    tool_parser: Annotated[
        str, Option(help=f"How the model writes tool calls: {', '.join(CHOICES)}. auto: by its chat template.")
    ] = AUTO
    log_level: Annotated[str, Option(help=f"{', '.join(LOG_LEVELS)}.")] = "info"
    ready_fd: Annotated[int, Option(help="Write the ready line there instead of standard output.")] = -1


@dataclass(frozen=True)
class Options:
    """All of them."""

    runtimes: Runtimes
    addresses: Addresses
    limits: Limits
    life: Life

    def check(self) -> None:
        """Refuses what cannot work whatever the files and addresses are.

        Raises:
            typer.BadParameter: says what.
        """
        runtimes, life = self.runtimes, self.life
        if life.log_level not in LOG_LEVELS:
            raise typer.BadParameter("--log-level must be debug, info, warning or error")
        try:
            check_link([runtimes.transport], runtimes.rdma_address)
        except LinkError as error:
            raise typer.BadParameter(str(error)) from error
        if runtimes.verbs_binding not in BINDING_CHOICES:
            raise typer.BadParameter(f"--verbs-binding must be one of: {', '.join(BINDING_CHOICES)}")
        if life.tool_parser not in CHOICES:
            raise typer.BadParameter(f"--tool-parser must be one of: {', '.join(CHOICES)}")
        twice = {address for address in runtimes.runtime if runtimes.runtime.count(address) > 1}
        if twice:
            raise typer.BadParameter(f"--runtime {', '.join(sorted(twice))} is there more than once")

    def values(self) -> dict[str, Any]:
        """By name."""
        groups = (self.runtimes, self.addresses, self.limits, self.life)
        return {one.name: getattr(group, one.name) for group in groups for one in dataclasses.fields(group)}


def takes_options(run: Callable[[typer.Context, Options], None]) -> Callable[..., None]:
    """A command that typer can read: with a parameter for each field of each group."""
    groups: dict[str, Any] = get_type_hints(Options)
    found = [_parameter(group, one) for group in groups.values() for one in dataclasses.fields(group)]

    def command(context: typer.Context, **values: Any) -> None:
        made = {
            name: group(**{one.name: values[one.name] for one in dataclasses.fields(group)})
            for name, group in groups.items()
        }
        run(context, Options(**made))

    context = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    command.__signature__ = inspect.Signature([context, *found])  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in (context, *found)}
    command.__doc__ = run.__doc__
    return command


def _parameter(group: Any, one: dataclasses.Field[Any]) -> inspect.Parameter:
    annotation = get_type_hints(group, include_extras=True)[one.name]
    (flag,) = get_args(annotation)[1:]
    flag.rich_help_panel = group.__doc__
    made = one.default_factory
    default = one.default if made is dataclasses.MISSING else made()
    return inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
