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

from gpu_runtime.chain.process import ChainError
from gpu_runtime.config import RuntimeConfig
from gpu_runtime.control.errors import ControlError
from gpu_runtime.control.runtime import Runtime
from gpu_runtime.control.server import AddressError, start_server, stop_server, wait_for_end

console = Console(stderr=True)


async def load_with_progress(runtime: Runtime, source: str, name: str) -> None:
    """Loads a model and shows how far it is."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task("resolving the model", total=None)

        def show(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total or None, description=what)

        model = await runtime.load(source, name, show)
    console.print(f"serving {model.name}: {model.architecture}, {model.parameters / 1e6:.1f} M parameters")


async def serve(config: RuntimeConfig, listen: str, source: str, name: str, grace: float, ready_fd: int) -> int:
    """Runs until told to stop; the exit status."""
    runtime = Runtime(config)
    server, port, follower = await start_server(runtime, listen)
    console.print(f"control plane on port {port} ({listen})")
    try:
        if source:
            await load_with_progress(runtime, source, name)
        if ready_fd >= 0:
            os.write(ready_fd, f"ready {port}\n".encode())
            os.close(ready_fd)
        status = await wait_for_end(runtime)
        if status:
            console.print(f"[red]{runtime.watch.state.detail}")
            await asyncio.sleep(0.5)  # lets WatchState tell the front ends
        return status
    finally:
        await runtime.close(grace)
        await stop_server(server, follower)


def run(
    device: Annotated[str, typer.Option(help="cpu: the soft GPU.")] = "cpu",
    listen: Annotated[str, typer.Option(help="Address of the gRPC control plane.")] = "127.0.0.1:50051",
    model: Annotated[str, typer.Option(help="Hugging Face folder, GGUF file or built-in name to load at start.")] = "",
    name: Annotated[str, typer.Option(help="Name that clients use for it; default: its own.")] = "",
    channels: Annotated[int, typer.Option(min=1, max=64, help="Front-end workers at most.")] = 8,
    kv_tokens: Annotated[int, typer.Option(min=32, help="Tokens that the KV cache holds.")] = 16384,
    token_budget: Annotated[int, typer.Option(min=1, max=8192, help="Tokens of a step at most.")] = 128,
    max_running: Annotated[int, typer.Option(min=1, max=1024, help="Sequences that run at a time.")] = 64,
    max_sequences: Annotated[int, typer.Option(min=1, max=65536, help="Running and waiting together.")] = 256,
    max_model_tokens: Annotated[int, typer.Option(min=0, help="Context window; 0: the model's own.")] = 0,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads of the soft GPU; 0: all cores.")] = 0,
    lease_timeout: Annotated[float, typer.Option(min=1, help="Seconds without a heartbeat that end a lease.")] = 15.0,
    grace: Annotated[float, typer.Option(min=0, help="Seconds to finish running sequences at the end.")] = 30.0,
    ready_fd: Annotated[int, typer.Option(hidden=True)] = -1,
) -> None:
    """Runs the GPU runtime: loads a model, starts the chain, and idles."""
    if device != "cpu":
        console.print(f"[red]device {device!r} is not available in this version; use --device cpu (the soft GPU)")
        raise SystemExit(2)
    config = RuntimeConfig(
        device=device,
        channels=channels,
        kv_tokens=kv_tokens,
        token_budget=max(token_budget, max_running),
        max_running=max_running,
        max_sequences=max(max_sequences, max_running),
        max_model_tokens=max_model_tokens,
        threads=threads,
        lease_timeout_seconds=lease_timeout,
    )
    try:
        raise SystemExit(asyncio.run(serve(config, listen, model, name, grace, ready_fd)))
    except (ControlError, ChainError, AddressError) as error:
        console.print(f"[red]{error}")
        raise SystemExit(1) from error


def main() -> None:
    """Console script."""
    typer.run(run)


if __name__ == "__main__":
    main()
