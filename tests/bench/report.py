"""Shows a run as a table and writes it as JSON."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from tests.bench.record import Record
from tests.bench.stats import Distribution, Summary

FORMAT_VERSION = 1
DISTRIBUTIONS = (
    ("time to first token", "ttft"),
    ("time per output token", "tpot"),
    ("gap between chunks", "gap"),
    ("whole answer", "latency"),
    ("sent late by", "lag"),
)


def show(summary: Summary, console: Console, title: str = "") -> None:
    """Prints the tables of one run."""
    if title:
        console.print(title, style="bold", markup=False, highlight=False, soft_wrap=True)
    console.print(_times(summary))
    for name, value in _figures(summary):
        console.print(f"{name:<18}{value}", highlight=False, markup=False, soft_wrap=True)


def _times(summary: Summary) -> Table:
    table = Table()
    table.add_column("milliseconds")
    for name in ("mean", "P50", "P90", "P99", "max"):
        table.add_column(name, justify="right")
    for name, key in DISTRIBUTIONS:
        found: Distribution | None = getattr(summary, key)
        if found:
            cells = (found.mean, found.p50, found.p90, found.p99, found.max)
            table.add_row(name, *(f"{1000 * cell:.1f}" for cell in cells))
    return table


def _figures(summary: Summary) -> list[tuple[str, str]]:
    mean_prompt = summary.prompt_tokens / summary.succeeded if summary.succeeded else 0
    mean_output = summary.output_tokens / summary.succeeded if summary.succeeded else 0
    figures = [
        ("requests", f"{summary.succeeded} of {summary.requests} succeeded in {summary.seconds:.1f} s"),
        ("tokens a request", f"{mean_prompt:.0f} in, {mean_output:.0f} out (counted by {summary.tokens_counted_by})"),
        ("throughput", f"{summary.requests_per_s:.2f} requests/s, {summary.output_tokens_per_s:.1f} output tokens/s"),
    ]
    if summary.goodput:
        goodput = summary.goodput
        rates = f"{goodput.requests_per_s:.2f} requests/s, {goodput.tokens_per_s:.1f} output tokens/s"
        figures.append(("goodput", f"{rates} ({100 * goodput.share:.1f} % of all requests)"))
    if summary.errors:
        figures.append(("failures", ", ".join(f"{kind}: {count}" for kind, count in summary.errors.items())))
    return figures


def write_json(path: Path, settings: Mapping[str, Any], summary: Summary, records: Sequence[Record]) -> None:
    """Writes one run: settings, machine, figures, and every request without its text."""
    document = {
        "format": FORMAT_VERSION,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "machine": machine(),
        "settings": dict(settings),
        "summary": asdict(summary),
        "requests": [_row(record) for record in records],
    }
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _row(record: Record) -> dict[str, Any]:
    return {
        "due": record.due,
        "sent": record.sent,
        "ttft": record.ttft,
        "tpot": record.tpot,
        "latency": record.latency,
        "prompt_tokens": record.prompt_tokens,
        "output_tokens": record.output_tokens,
        "finish_reason": record.finish_reason,
        "status": record.status,
        "error": record.error,
    }


def versions() -> dict[str, str]:
    """Versions of what measured."""
    found = {"python": sys.version.split()[0]}
    for name in ("blink-serving", "httptools", "msgspec"):
        found[name] = metadata.version(name)
    return found


def machine() -> dict[str, Any]:
    """The machine that the generator ran on."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": platform.platform(),
        "load_average": os.getloadavg()[0],
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
