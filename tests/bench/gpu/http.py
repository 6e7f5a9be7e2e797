"""End to end through HTTPS: `python -m tests.bench.gpu.http --model Llama-3.1-8B`; prints rows as lines of JSON.

`blink up` with random weights; the front end on four cores (the stand-in for a DPU), the load generator on four others,
the GPU runtime on the rest. First with the rest quiet, then with 24 processes that compute and copy memory there.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.gpu import peers
from tests.bench.gpu.cores import Cores
from tests.bench.gpu.hog import hogs
from tests.bench.gpu.http_load import LoadFailed, Wanted, run
from tests.bench.gpu.rows import REHEARSAL, Row, to_lines
from tests.bench.gpu.served import Served, serve, shape_arguments

MODELS = ("Llama-3.1-8B", "Llama-3.2-1B", "SmolLM2-135M")
HOGS = 24
LOAD_SECONDS = 45.0
STREAMS = (1, 8, 64)
LONG = {"Llama-3.1-8B": ((8, 512), (64, 512))}
"""Streams and tokens of answers so long that they are decoded rather than waiting for other streams' prompts."""
RATES = {"Llama-3.1-8B": (4.0, 16.0), "Llama-3.2-1B": (16.0,), "SmolLM2-135M": (16.0,)}


@dataclass(frozen=True)
class Plan:
    """What one model's server is asked."""

    model: str
    device: str
    loads: Sequence[Wanted]
    hogs: int

    @classmethod
    def of(cls, model: str, device: str) -> Plan:
        """512 tokens in, 128 out; small on the CPU."""
        if device == "cpu":
            loads = [Wanted(64, 32, streams=1), Wanted(64, 32, streams=4), Wanted(64, 32, rate=4.0, seconds=3.0)]
            return cls(REHEARSAL, device, loads, 2)
        loads = [Wanted(512, 128, streams=streams, rounds=4 if streams == 1 else 2) for streams in STREAMS]
        loads += [Wanted(512, 128, rate=rate, seconds=10.0) for rate in RATES[model]]
        loads += [Wanted(512, tokens, streams=streams, rounds=1) for streams, tokens in LONG.get(model, ())]
        return cls(model, device, loads, HOGS)


def measure(plan: Plan, up: Sequence[str] = (), company: Sequence[bool] = (False, True)) -> Iterator[Row]:
    """All rows of one model.

    Args:
        up: further arguments of `blink up`.
        company: whether the host is busy, in turn.
    """
    cores = Cores.split()
    with tempfile.TemporaryDirectory() as folder:
        arguments, name = shape_arguments(Path(folder), plan.device, plan.model)
        workers = min(4, len(cores.front_end))
        with serve([*arguments, "--workers", str(workers), *up]) as server:
            ready = peers.ready_seconds(plan.model)
            yield Row("http", plan.model, "blink up, until ready", server.ready_seconds, unit="s", peers=ready)
            server.keep_apart(cores)
            _warm_up(server, name, plan, cores)
            for busy in company:
                with _company(plan, cores, busy):
                    yield from _loads(server, name, plan, cores, busy)


def _company(plan: Plan, cores: Cores, busy: bool) -> AbstractContextManager[None]:
    return hogs(plan.hogs, cores.rest) if busy else nullcontext()


def _warm_up(server: Served, name: str, plan: Plan, cores: Cores) -> None:
    run(server.url, name, Wanted(plan.loads[0].prompt_tokens, 8, streams=8, rounds=1), cores.client, LOAD_SECONDS)


def _loads(server: Served, name: str, plan: Plan, cores: Cores, busy: bool) -> Iterator[Row]:
    for wanted in plan.loads:
        what = f"{wanted.name}, {'busy' if busy else 'quiet'}"
        try:
            figures = run(server.url, name, wanted, cores.client, LOAD_SECONDS)
        except LoadFailed as error:
            yield Row("http", plan.model, what, error=str(error))
            continue
        yield from rows_of(plan.model, wanted, busy, figures)


def rows_of(model: str, wanted: Wanted, busy: bool, figures: dict[str, Any]) -> Iterator[Row]:
    """Time to first token, time per output token and, for open loops, the gap between chunks."""
    when = f"{wanted.name}, {'busy' if busy else 'quiet'}"
    yield _row(model, f"first token, {when}", figures["ttft"], peers.open_loop(model, wanted.rate, "ttft", busy), True)
    yield _row(model, f"per output token, {when}", figures["tpot"], peers.tpot(model, wanted.streams, busy), False)
    if wanted.rate:
        yield _row(model, f"gap, {when}", figures["gap"], peers.open_loop(model, wanted.rate, "gap", busy), True)


def _row(model: str, what: str, figures: dict[str, float] | None, others: dict[str, float], by_p99: bool) -> Row:
    if figures is None:
        return Row("http", model, what, error="no figures: the answers had too few tokens")
    p50, p99 = figures["p50"] * 1e3, figures["p99"] * 1e3
    return Row("http", model, what, p50, p99, peers=others, judged_by_p99=by_p99)


def main() -> None:
    """Rows as lines on standard output."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, choices=MODELS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--up", type=shlex.split, default=[], help="further arguments of `blink up`, in one string")
    parser.add_argument("--quiet", action="store_true", help="leave the busy host out")
    arguments = parser.parse_args()
    plan = Plan.of(arguments.model, arguments.device)
    for row in measure(plan, arguments.up, (False,) if arguments.quiet else (False, True)):
        sys.stdout.write(to_lines([row]))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
