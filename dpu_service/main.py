"""Command line of the front end: `blink-dpu`."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from blink_proto.dial import Dial, DialError
from blink_proto.rdma.binding import AUTO as ANY_BINDING
from blink_proto.rdma.binding import BINDING_CHOICES
from blink_proto.secret import forbid_core_dumps
from dpu_service import logs
from dpu_service.config import WorkerConfig
from dpu_service.http.choose import HAS_HTTP2
from dpu_service.supervisor import Listening, Supervisor, listen
from dpu_service.tenants.command import app as tenant_commands
from dpu_service.tenants.file import KeysFile
from dpu_service.text.tools.formats import AUTO, CHOICES
from dpu_service.tls import MIN_VERSIONS, default_data_folder, self_signed, server_context
from dpu_service.transport.choose import TRANSPORTS
from dpu_service.wire import Drain

log = logging.getLogger(__name__)

MOST_WORKERS = 4
OFF = "off"
app = typer.Typer(add_completion=False)
app.add_typer(tenant_commands, name="keys")


def default_workers(cores: int) -> int:
    """One for each core, at most 4; one alone on small machines, where the soft GPU wants the rest."""
    return 1 if cores <= 2 else min(cores, MOST_WORKERS)


def split_address(text: str) -> tuple[str, int]:
    """Host and port of `host:port` or `[host]:port`.

    Raises:
        typer.BadParameter: it is neither.
    """
    host, separator, port = text.rpartition(":")
    if not separator or not host or not port.isdigit() or int(port) > 65535:
        raise typer.BadParameter(f"{text!r} is not an address like 127.0.0.1:8443, and not 'off'")
    return host.removeprefix("[").removesuffix("]"), int(port)


def certificate(tls_cert: str, tls_key: str, client_ca: str, min_version: str, folder: Path) -> tuple[str, str]:
    """Files of the certificate and its key, checked.

    Raises:
        typer.BadParameter: only one is given, or they cannot be used.
    """
    if min_version not in MIN_VERSIONS:
        raise typer.BadParameter(f"--tls-min-version must be one of {', '.join(MIN_VERSIONS)}")
    if bool(tls_cert) != bool(tls_key):
        raise typer.BadParameter("--tls-cert and --tls-key go together")
    try:
        files = (tls_cert, tls_key) if tls_cert else tuple(map(str, self_signed(folder)))
        server_context(files[0], files[1], client_ca, min_version)
    except OSError as error:
        raise typer.BadParameter(f"cannot use the TLS certificate: {error}") from error
    return files[0], files[1]


def check_dial(dial: Dial) -> None:
    """Refuses what cannot work.

    Raises:
        typer.BadParameter: files are missing, or plain text would leave this machine.
    """
    try:
        dial.check()
    except DialError as error:
        hint = "see --runtime-ca, --runtime-cert, --runtime-key and --runtime-insecure"
        raise typer.BadParameter(f"{error} ({hint})") from error


def keys_file(path: str) -> KeysFile:
    """The file of tenants, checked.

    Raises:
        typer.BadParameter: it cannot be used.
    """
    keys = KeysFile(path)
    try:
        keys.read()
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"cannot use the file of API keys: {error}") from error
    return keys


def bind(https: str, http: str) -> list[Listening]:
    """The wanted listening sockets.

    Raises:
        typer.BadParameter: both are off, or an address cannot be bound.
    """
    wanted = [(address, tls) for address, tls in ((https, True), (http, False)) if address != OFF]
    if not wanted:
        raise typer.BadParameter("--https and --http are both off")
    bound = []
    for address, tls in wanted:
        try:
            bound.append(listen(*split_address(address), tls=tls))
        except OSError as error:
            raise typer.BadParameter(f"cannot listen on {address}: {error.strerror or error}") from error
    return bound


def announce(listening: list[Listening], ready_fd: int) -> None:
    """Tells the starter, in one line, that requests are taken: `ready https://… http://…`."""
    line = " ".join(["ready", *(one.url for one in listening)]) + "\n"
    if ready_fd >= 0:
        os.write(ready_fd, line.encode())
        os.close(ready_fd)
    else:
        sys.stdout.write(line)
        sys.stdout.flush()


@app.callback(invoke_without_command=True)
def run(
    context: typer.Context,
    runtime: Annotated[str, typer.Option(help="Control plane of the GPU runtime.")] = "127.0.0.1:50051",
    runtime_ca: Annotated[str, typer.Option(help="PEM authorities of its certificate; default: plain text.")] = "",
    runtime_cert: Annotated[str, typer.Option(help="PEM certificate towards it, for the role front-end.")] = "",
    runtime_key: Annotated[str, typer.Option(help="PEM key of --runtime-cert.")] = "",
    runtime_server_name: Annotated[
        str, typer.Option(help="Name in the runtime's certificate, if it is called by another.")
    ] = "",
    runtime_insecure: Annotated[
        bool, typer.Option("--runtime-insecure", help="Plain text also to a runtime on another machine.")
    ] = False,
    transport: Annotated[str, typer.Option(help=f"How to reach the arena: {', '.join(TRANSPORTS)}.")] = "shm",
    rdma_device: Annotated[str, typer.Option(help="RDMA device; default: the one with --rdma-address.")] = "",
    rdma_address: Annotated[
        str,
        typer.Option(help="Its IP address; so you declare that network private: payload crosses it as plaintext."),
    ] = "",
    verbs_binding: Annotated[
        str, typer.Option(help=f"Package for --transport verbs: {', '.join(BINDING_CHOICES)}.")
    ] = ANY_BINDING,
    https: Annotated[str, typer.Option(help="Address for HTTPS, or 'off'.")] = "127.0.0.1:8443",
    http: Annotated[str, typer.Option(help="Address for plain HTTP, or 'off'.")] = "127.0.0.1:8000",
    workers: Annotated[int, typer.Option(min=0, max=64, help="Worker processes; 0: by the number of cores.")] = 0,
    tls_cert: Annotated[str, typer.Option(help="PEM certificate chain; default: a self-signed one.")] = "",
    tls_key: Annotated[str, typer.Option(help="PEM key of --tls-cert.")] = "",
    data_dir: Annotated[str, typer.Option(help="Where the self-signed certificate is kept.")] = "",
    name: Annotated[str, typer.Option(help="Stable name towards the runtime; default: host and port.")] = "",
    queue_depth: Annotated[
        int, typer.Option(min=1, help="Sequences of a worker that may wait for their first token.")
    ] = 256,
    device_timeout: Annotated[float, typer.Option(min=1, help="Seconds of silence that mean a lost device.")] = 10.0,
    grace: Annotated[float, typer.Option(min=0, help="Seconds to finish running requests at the end.")] = 30.0,
    tls_client_ca: Annotated[
        str, typer.Option(help="PEM certificates of authorities; clients must then have a certificate of theirs.")
    ] = "",
    tls_min_version: Annotated[str, typer.Option(help="1.2 or 1.3.")] = "1.2",
    api_keys: Annotated[str, typer.Option(help="File of tenants and their keys; default: anybody may ask.")] = "",
    open_metrics: Annotated[bool, typer.Option(help="/metrics needs no key.")] = False,
    unready: Annotated[
        float, typer.Option(min=0, help="Seconds to go on serving at the end while probes hear that it is not ready.")
    ] = 0.0,
    keep_alive: Annotated[float, typer.Option(min=1, help="Seconds that an idle connection stays open.")] = 130.0,
    header_timeout: Annotated[float, typer.Option(min=1, help="Seconds for the head of a request.")] = 20.0,
    body_timeout: Annotated[float, typer.Option(min=1, help="Seconds for the body of a request.")] = 60.0,
    write_timeout: Annotated[
        float, typer.Option(min=1, help="Seconds that a client may leave its answer unread.")
    ] = 60.0,
    max_connections: Annotated[int, typer.Option(min=1, help="Open connections of a worker and address.")] = 8192,
    http2_streams: Annotated[int, typer.Option(min=1, max=10_000, help="Open requests of an HTTP/2 connection.")] = 128,
    max_body_bytes: Annotated[int, typer.Option(min=1024, help="Bytes of a request's body at most.")] = 8 << 20,
    access_log: Annotated[bool, typer.Option(help="One JSON line for each request.")] = True,
    tool_parser: Annotated[
        str, typer.Option(help=f"How the model writes tool calls: {', '.join(CHOICES)}. auto: by its chat template.")
    ] = AUTO,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    ready_fd: Annotated[int, typer.Option(help="Write the ready line there instead of standard output.")] = -1,
) -> None:
    """Runs the front end: HTTPS and HTTP on one side, the GPU's arena on the other."""
    if context.invoked_subcommand is not None:
        return
    if log_level not in ("debug", "info", "warning", "error"):
        raise typer.BadParameter("--log-level must be debug, info, warning or error")
    if transport not in TRANSPORTS:
        raise typer.BadParameter(f"--transport must be one of: {', '.join(TRANSPORTS)}")
    if transport != "shm" and not rdma_address:
        raise typer.BadParameter("RDMA needs --rdma-address: naming it declares that interface's network private")
    if verbs_binding not in BINDING_CHOICES:
        raise typer.BadParameter(f"--verbs-binding must be one of: {', '.join(BINDING_CHOICES)}")
    if tool_parser not in CHOICES:
        raise typer.BadParameter(f"--tool-parser must be one of: {', '.join(CHOICES)}")
    forbid_core_dumps()
    os.environ["BLINK_LOG_LEVEL"] = log_level
    logs.set_up("supervisor", log_level)
    cert, key = "", ""
    if https != OFF:
        folder = Path(data_dir) if data_dir else default_data_folder()
        cert, key = certificate(tls_cert, tls_key, tls_client_ca, tls_min_version, folder)
    if not HAS_HTTP2:
        log.warning("the package h2 is not installed: HTTP/1.1 only")
    keys = keys_file(api_keys) if api_keys else None
    if keys is None:
        log.warning("no --api-keys: whoever reaches this address may use it")
    listening = bind(https, http)
    config = WorkerConfig(
        queue_depth=queue_depth,
        device_timeout=device_timeout,
        keep_alive=keep_alive,
        header_timeout=header_timeout,
        body_timeout=body_timeout,
        write_timeout=write_timeout,
        max_connections=max_connections,
        http2_streams=http2_streams,
        max_body_bytes=max_body_bytes,
        access_log=access_log,
        tool_parser=tool_parser,
        transport=transport,
        rdma_device=rdma_device,
        rdma_address=rdma_address,
        verbs_binding=verbs_binding,
        tls_cert=cert,
        tls_key=key,
        guarded=bool(api_keys),
        open_metrics=open_metrics,
        tls_client_ca=tls_client_ca,
        tls_min_version=tls_min_version,
    )
    dial = Dial(runtime, runtime_ca, runtime_cert, runtime_key, runtime_server_name, runtime_insecure)
    check_dial(dial)
    count = workers or default_workers(os.cpu_count() or 1)

    async def supervise() -> None:
        def on_ready() -> None:
            announce(listening, ready_fd)

        await Supervisor(config, listening, count, dial, name, Drain(grace, unready), on_ready, keys).run()

    asyncio.run(supervise())


def main() -> None:
    """Console script."""
    app()


if __name__ == "__main__":
    main()
