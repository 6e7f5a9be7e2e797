"""Measures an OpenAI-compatible endpoint under load."""

from __future__ import annotations

import argparse
import asyncio
import resource
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from tests.bench import options, report
from tests.bench.arrivals import poisson_arrivals, prompts
from tests.bench.client import Client, first_model
from tests.bench.connection import ConnectionLost, Target
from tests.bench.load import Load
from tests.bench.record import Record
from tests.bench.stats import summarise

REDRAW_SECONDS = 0.2


class WarmupError(Exception):
    """A request before the measurement failed."""


async def measure(arguments: argparse.Namespace, console: Console) -> tuple[Load, str]:
    """One run; gives the load and the model's name."""
    target = Target.from_url(arguments.url, arguments.insecure)
    ask = options.ask_of(arguments, arguments.model or "")
    model = arguments.model or await first_model(target, ask.api_key)
    client = Client(target, options.ask_of(arguments, model))
    texts = prompts(arguments.prompt_tokens, arguments.seed)
    for _ in range(arguments.warmup):
        _check_warmup(await client.measure(next(texts), asyncio.get_running_loop().time()))
    load = Load(client, texts, arguments.concurrency_limit)
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, load.stop)
    drawing = asyncio.create_task(_draw(load, arguments, console))
    if arguments.rate:
        await load.open(poisson_arrivals(arguments.rate, arguments.seed), arguments.duration, arguments.requests)
    else:
        await load.closed(arguments.streams, arguments.duration, arguments.requests)
    drawing.cancel()
    with suppress(asyncio.CancelledError):
        await drawing
    client.close()
    return load, model


def _check_warmup(record: Record) -> None:
    if not record.ok:
        raise WarmupError(f"the first request failed: {record.error}: {record.detail}")


async def _draw(load: Load, arguments: argparse.Namespace, console: Console) -> None:
    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        bar = progress.add_task("", total=1.0)
        while True:
            elapsed = asyncio.get_running_loop().time() - load.start if load.start else 0.0
            part = max(elapsed / arguments.duration, load.sent / arguments.requests if arguments.requests else 0.0)
            failed = sum(not record.ok for record in load.records)
            text = f"{len(load.records)} answered, {load.in_flight} running, {failed} failed"
            progress.update(bar, completed=min(part, 1.0), description=text)
            await asyncio.sleep(REDRAW_SECONDS)


def _raise_file_limit() -> None:
    """Each request in flight is an open socket."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def settings_of(arguments: argparse.Namespace, model: str) -> dict[str, Any]:
    """The arguments as the JSON report states them."""
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()}
    return plain | {"model": model}


def main(argv: list[str] | None = None) -> int:
    """Exit status 0 when at least one request succeeded, 1 when none did, 2 when the endpoint is not usable."""
    arguments = options.parse(argv)
    console = Console(stderr=True)
    _raise_file_limit()
    try:
        load, model = asyncio.run(measure(arguments, console))
    except (WarmupError, ConnectionLost, OSError, ValueError) as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False)
        return 2
    summary = summarise(load.records, load.start, options.slo_of(arguments))
    report.show(summary, Console(), title=f"{model} at {arguments.url}")
    for kind in summary.errors:
        detail = next(record.detail for record in load.records if record.error == kind)
        console.print(f"first {kind}: {detail}", markup=False, highlight=False, soft_wrap=True)
    if arguments.json:
        report.write_json(arguments.json, settings_of(arguments, model), summary, load.records)
    return 0 if summary.succeeded else 1


if __name__ == "__main__":
    sys.exit(main())
