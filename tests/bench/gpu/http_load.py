"""One load on a server, from a process of its own on the client's cores; prints the figures as JSON."""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from tests.bench.gpu.cores import pin
from tests.shapes import letters

DRAIN_SECONDS = 60.0
USUAL_OUTPUT = 128
"""Longer answers are named by their length."""


@dataclass(frozen=True)
class Wanted:
    """A closed loop of `streams`, each with `rounds` requests, or an open loop of `rate` requests/s for `seconds`."""

    prompt_tokens: int
    output_tokens: int
    streams: int = 0
    rounds: int = 2
    rate: float = 0.0
    seconds: float = 10.0

    @property
    def name(self) -> str:
        """For the table."""
        if self.streams:
            length = "" if self.output_tokens <= USUAL_OUTPUT else f" of {self.output_tokens} tokens"
            return f"{self.streams} stream{'s'[: self.streams > 1]}{length}"
        return f"{self.rate:g} requests/s"


class LoadFailed(RuntimeError):
    """The load's process ended with an error, or requests failed."""


def run(url: str, model: str, wanted: Wanted, cores: Iterable[int], seconds: float) -> dict[str, Any]:
    """Runs one load; the figures of `tests.bench.stats.Summary`.

    Raises:
        LoadFailed: the process failed, took longer than `seconds`, or not every request succeeded.
    """
    command = [sys.executable, "-m", "tests.bench.gpu.http_load", url, model, json.dumps(asdict(wanted))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    pin(process.pid, cores)
    try:
        said, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise LoadFailed(f"{wanted.name}: no end within {seconds:.0f} s") from None
    if process.returncode:
        raise LoadFailed(f"{wanted.name}: {(errors.strip().splitlines() or ['no message'])[-1]}")
    figures: dict[str, Any] = json.loads(said)
    if figures["succeeded"] != figures["requests"] or not figures["requests"]:
        raise LoadFailed(
            f"{wanted.name}: {figures['succeeded']} of {figures['requests']} succeeded: {figures['errors']}"
        )
    return figures


async def measure(url: str, model: str, wanted: Wanted) -> dict[str, Any]:
    """In this process."""
    from tests.bench.arrivals import poisson_arrivals
    from tests.bench.client import Ask, Client
    from tests.bench.connection import Target
    from tests.bench.load import Load
    from tests.bench.stats import summarise

    ask = Ask(model, max_tokens=wanted.output_tokens, extra={"ignore_eos": True}, timeout=DRAIN_SECONDS)
    prompts = letters(wanted.prompt_tokens, seed=secrets.randbits(64))  # no load finds the last one's prompts cached
    load = Load(Client(Target.from_url(url, insecure=True), ask), prompts)
    if wanted.streams:
        await load.closed(wanted.streams, DRAIN_SECONDS, wanted.streams * wanted.rounds)
    else:
        await load.open(poisson_arrivals(wanted.rate, seed=3), wanted.seconds)
    return asdict(summarise(load.records, load.start))


def main() -> None:
    """URL, model, and a Wanted as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("url", "model", "wanted"):
        parser.add_argument(name)
    arguments = parser.parse_args()
    figures = asyncio.run(measure(arguments.url, arguments.model, Wanted(**json.loads(arguments.wanted))))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
