"""Command line of the front end: `blink-dpu`."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from functools import partial
from pathlib import Path

import msgspec
import typer

from blink_proto.adapters import try_adapters
from blink_proto.dial import Dial, DialError
from blink_proto.links import LinkError
from blink_proto.rdma.choice import RdmaChoice
from blink_proto.secret import forbid_core_dumps
from dpu_service import logs
from dpu_service.config import WorkerConfig
from dpu_service.http.choose import HAS_HTTP2
from dpu_service.options import OFF, Options, Runtimes, takes_options
from dpu_service.supervisor import Listening, Supervisor, listen
from dpu_service.tenants.command import app as tenant_commands
from dpu_service.tenants.file import KeysFile
from dpu_service.tls import MIN_VERSIONS, default_data_folder, self_signed, server_context
from dpu_service.wire import Drain

log = logging.getLogger(__name__)

MOST_WORKERS = 4
app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)
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


def dials(runtimes: Runtimes) -> list[Dial]:
    """How to call each runtime, checked.

    Raises:
        typer.BadParameter: files are missing, or plain text would leave this machine.
    """
    made = [
        Dial(
            address,
            runtimes.runtime_ca,
            runtimes.runtime_cert,
            runtimes.runtime_key,
            runtimes.runtime_server_name,
            runtimes.runtime_insecure,
        )
        for address in runtimes.runtime
    ]
    try:
        for dial in made:
            dial.check()
    except DialError as error:
        hint = "see --runtime-ca, --runtime-cert, --runtime-key and --runtime-insecure"
        raise typer.BadParameter(f"{error} ({hint})") from error
    return made


def worker_config(options: Options) -> WorkerConfig:
    """What the workers need of the options; makes the self-signed certificate where none is given.

    Raises:
        typer.BadParameter: certificate and key cannot be used.
    """
    values, addresses = options.values(), options.addresses
    cert, key = "", ""
    if addresses.https != OFF:
        folder = Path(addresses.data_dir) if addresses.data_dir else default_data_folder()
        cert, key = certificate(
            addresses.tls_cert, addresses.tls_key, addresses.tls_client_ca, addresses.tls_min_version, folder
        )
    own = {"tls_cert": cert, "tls_key": key, "guarded": bool(addresses.api_keys)}
    named = {one.name: values[one.name] for one in msgspec.structs.fields(WorkerConfig) if one.name not in own}
    return msgspec.convert(named | own, WorkerConfig)


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


def require_adapters(runtimes: Runtimes) -> None:
    """Ends the program, with status 2 and one line, where this machine does not have what the transport needs."""
    try:
        try_adapters(
            [runtimes.transport], RdmaChoice(runtimes.rdma_device, runtimes.rdma_address, runtimes.verbs_binding)
        )
    except LinkError as error:
        typer.echo(error, err=True)
        raise typer.Exit(2) from error


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
@takes_options
def run(context: typer.Context, options: Options) -> None:
    """Runs the front end: HTTPS and HTTP on one side, the GPUs' arenas on the other."""
    if context.invoked_subcommand is not None:
        return
    options.check()
    addresses, life = options.addresses, options.life
    forbid_core_dumps()
    os.environ["BLINK_LOG_LEVEL"] = life.log_level
    logs.set_up("supervisor", life.log_level)
    require_adapters(options.runtimes)
    config = worker_config(options)
    if not HAS_HTTP2:
        log.warning("the package h2 is not installed: HTTP/1.1 only")
    keys = keys_file(addresses.api_keys) if addresses.api_keys else None
    if keys is None:
        log.warning("no --api-keys: whoever reaches this address may use it")
    listening = bind(addresses.https, addresses.http)
    called = dials(options.runtimes)
    count = life.workers or default_workers(os.cpu_count() or 1)
    end = Drain(life.grace, life.unready)

    async def supervise() -> None:
        on_ready = partial(announce, listening, life.ready_fd)
        name = options.runtimes.name
        await Supervisor(config, listening, count, called, name, end, on_ready, keys).run()

    asyncio.run(supervise())


def main() -> None:
    """Console script."""
    app()


if __name__ == "__main__":
    main()
