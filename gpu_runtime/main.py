"""`blink-gpu`: loads a model, starts the chain, and idles."""

from __future__ import annotations

import asyncio
import os
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from blink_proto.adapters import try_adapters
from blink_proto.links import TRANSPORTS, LinkError
from blink_proto.rdma.binding import AUTO, BINDING_CHOICES
from blink_proto.secret import forbid_core_dumps
from gpu_runtime import logs
from gpu_runtime.chain.process import ChainError
from gpu_runtime.config import ConfigError, RuntimeConfig, make_config
from gpu_runtime.control.device_check import require_device
from gpu_runtime.control.errors import ControlError
from gpu_runtime.control.runtime import Runtime
from gpu_runtime.control.server import AddressError, Listen, start_server, wait_for_end
from gpu_runtime.control.tls import TlsFiles
from gpu_runtime.registration.ways import CHOICES as GPU_MEMORY_CHOICES

console = Console(stderr=True, markup=False, emoji=False)


def say_error(error: Exception | str) -> None:
    """On a line of its own, as long as it is, with nothing in it taken for markup."""
    console.print(str(error), style="red", highlight=False, soft_wrap=True)


async def load_with_progress(runtime: Runtime, source: str, name: str) -> None:
    """Loads a model and shows how far it is."""
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    shown = console.is_terminal
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True, disable=not shown) as bar:
        task = bar.add_task("resolving the model", total=None)

        def show(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total or None, description=what)

        model = await runtime.load(source, name, show)
    console.print(f"serving {model.name}: {model.architecture}, {model.parameters / 1e6:.1f} M parameters")


def tls_files(certificate: str, key: str, client_ca: str) -> TlsFiles | None:
    """All three, or none for plain text.

    Raises:
        ConfigError: only some are given.
    """
    if not certificate and not key and not client_ca:
        return None
    if not (certificate and key and client_ca):
        raise ConfigError("--tls-cert, --tls-key and --client-ca go together")
    return TlsFiles(certificate, key, client_ca)


async def serve(config: RuntimeConfig, listen: Listen, source: str, name: str, grace: float, ready_fd: int) -> int:
    """Runs until told to stop; the exit status."""
    runtime = Runtime(config)
    server = await start_server(runtime, listen)
    console.print(f"control plane on port {server.port} ({listen.address}, {'TLS' if listen.tls else 'plain text'})")
    try:
        if source:
            await load_with_progress(runtime, source, name)
        if ready_fd >= 0:
            os.write(ready_fd, f"ready {server.port}\n".encode())
            os.close(ready_fd)
        status = await wait_for_end(runtime)
        if status:
            say_error(runtime.watch.state.detail)
            await asyncio.sleep(0.5)  # lets WatchState tell the front ends
        return status
    finally:
        try:
            await runtime.close(grace)
        finally:
            await server.stop()


def run(
    device: Annotated[str, typer.Option(help="cpu: the soft GPU. cuda: the first CUDA device.")] = "cpu",
    listen: Annotated[str, typer.Option(help="Address of the gRPC control plane.")] = "127.0.0.1:50051",
    tls_cert: Annotated[
        str, typer.Option(help="PEM certificate chain of the control plane; default: plain text.")
    ] = "",
    tls_key: Annotated[str, typer.Option(help="PEM key of --tls-cert.")] = "",
    client_ca: Annotated[str, typer.Option(help="PEM authorities that sign the callers' certificates.")] = "",
    insecure: Annotated[bool, typer.Option("--insecure", help="Plain text also to other machines.")] = False,
    reflection: Annotated[
        bool | None, typer.Option(help="gRPC reflection; default: only in plain text on a local address.")
    ] = None,
    audit_log: Annotated[str, typer.Option(help="File for administrative calls; -: standard error.")] = "-",
    refused_certificates: Annotated[
        str, typer.Option(help="File of certificates that are refused: a SHA-256 or a subject a line.")
    ] = "",
    model: Annotated[str, typer.Option(help="Hugging Face folder, GGUF file or built-in name to load at start.")] = "",
    name: Annotated[str, typer.Option(help="Name that clients use for it; default: its own.")] = "",
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32; default: bfloat16 on CUDA.")] = "",
    random_weights: Annotated[bool, typer.Option(help="Measure without the weights: the folder needs none.")] = False,
    channels: Annotated[int, typer.Option(min=1, max=64, help="Front-end workers at most.")] = 8,
    kv_tokens: Annotated[int, typer.Option(min=0, help="Tokens that the KV cache holds; 0: by the device.")] = 0,
    memory_share: Annotated[float, typer.Option(min=0.05, max=0.98, help="Share of a CUDA device to use.")] = 0.9,
    token_budget: Annotated[int, typer.Option(min=0, max=8192, help="Tokens of a step at most; 0: by the device.")] = 0,
    max_running: Annotated[int, typer.Option(min=0, max=1024, help="Sequences that run; 0: by the device.")] = 0,
    max_sequences: Annotated[int, typer.Option(min=0, max=65536, help="Running and waiting; 0: by the device.")] = 0,
    max_model_tokens: Annotated[int, typer.Option(min=0, help="Context window; 0: the model's own.")] = 0,
    prefix_cache: Annotated[bool, typer.Option(help="Share the KV of equal beginnings of prompts.")] = True,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads of the soft GPU; 0: all cores.")] = 0,
    lease_timeout: Annotated[float, typer.Option(min=1, help="Seconds without a heartbeat that end a lease.")] = 15.0,
    transport: Annotated[
        str, typer.Option(help=f"How front ends reach it, by commas: {', '.join(TRANSPORTS)}.")
    ] = "shm",
    rdma_device: Annotated[str, typer.Option(help="RDMA device; default: the one with --rdma-address.")] = "",
    rdma_address: Annotated[
        str,
        typer.Option(
            help="Its IP address, not a public one: so you declare that network private; payload is plaintext."
        ),
    ] = "",
    verbs_binding: Annotated[
        str, typer.Option(help=f"Package for --transport verbs: {', '.join(BINDING_CHOICES)}.")
    ] = AUTO,
    gpu_memory: Annotated[
        str, typer.Option(help=f"How RDMA devices get at a CUDA device's memory: {', '.join(GPU_MEMORY_CHOICES)}.")
    ] = AUTO,
    grace: Annotated[float, typer.Option(min=0, help="Seconds to finish running sequences at the end.")] = 30.0,
    ready_fd: Annotated[int, typer.Option(hidden=True)] = -1,
) -> None:
    """Runs the GPU runtime: loads a model, starts the chain, and idles."""
    forbid_core_dumps()
    logs.set_up()
    try:
        tls = tls_files(tls_cert, tls_key, client_ca)
        where = Listen(listen, tls, insecure, reflection, audit_log, refused_certificates)
        config = make_config(
            device,
            dtype=dtype,
            random_weights=random_weights,
            channels=channels,
            kv_tokens=kv_tokens,
            memory_share=memory_share,
            token_budget=token_budget,
            max_running=max_running,
            max_sequences=max_sequences,
            max_model_tokens=max_model_tokens,
            prefix_cache=prefix_cache,
            threads=threads,
            lease_timeout_seconds=lease_timeout,
            transports=tuple(dict.fromkeys(transport.split(","))),
            rdma_device=rdma_device,
            rdma_address=rdma_address,
            verbs_binding=verbs_binding,
            gpu_memory=gpu_memory,
        )
        require_device(device, config.rdma_wish if config.uses_rdma else None)
        try_adapters(config.transports, config.rdma)
        raise SystemExit(asyncio.run(serve(config, where, model, name, grace, ready_fd)))
    except (ConfigError, LinkError) as error:
        say_error(error)
        raise SystemExit(2) from error
    except (ControlError, ChainError, AddressError) as error:
        say_error(error)
        raise SystemExit(1) from error


def main() -> None:
    """Console script."""
    app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)
    app.command()(run)
    app()


if __name__ == "__main__":
    main()
