"""What one worker of the front end does: `python -m tests.bench.front_end [--seconds 20] [--only streams,single]`.

The real `blink-dpu` with one worker, over a device that writes tokens at a fixed rate and stamps them. Its clients run
on the same machine and want a core of their own. Ends with tables, in about a minute and a half.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import ssl
import sys

from gpu_runtime.model.source import resolve_model
from tests.bench.front import single, stages, tokenising
from tests.bench.front.streams import Scenario, measure

STREAMS = 256
SCENARIOS = (
    Scenario("all tokens in one step", STREAMS, 50),
    Scenario("all tokens in one step, chat", STREAMS, 50, chat=True),
    Scenario("all tokens in one step, plain HTTP", STREAMS, 50, tls=False),
    Scenario("tokens spread over the time", STREAMS, 50, phases=20),
    Scenario("tokens spread over the time", STREAMS, 80, phases=12),
    Scenario("more than it can take", STREAMS, 300, phases=4),
)
SIZES = (100, 1000, 8000)
PARTS = ("streams", "single", "stages", "tokenise")


def streams(seconds: float) -> None:
    """Prints the rows of all scenarios."""
    print(
        f"\n| {STREAMS} streams over TLS | offered tokens/s | tokens/s | core | CPU/token | a write | delay P50 | P99 |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for one in SCENARIOS:
        got = measure(one, seconds)
        delays = f"{got.delay_p50:.1f} ms | {got.delay_p99:.1f} ms"
        cpu = f"{100 * got.core_share:.0f} % | {got.cpu_per_token:.1f} µs | {got.tokens_per_event:.1f} tokens"
        print(f"| {one.name} | {got.offered:,.0f} | {got.tokens_per_second:,.0f} | {cpu} | {delays} |", flush=True)


def one_token(seconds: float) -> None:
    """Prints the rate of one-token completions."""
    rate = single.measure(seconds)
    print(f"\none-token completions over TLS, {single.CONNECTIONS} connections: {rate.per_second:,.0f} requests/s,")
    print(f"{100 * rate.core_share:.0f} % of a core, {rate.cpu_per_request:.0f} µs of CPU each", flush=True)


def one_process() -> None:
    """Prints the stages of a token by themselves."""
    took = stages.measure()
    print("\nµs a token without sockets: " + ", ".join(f"{name} {us:.2f}" for name, us in took.items()), flush=True)


def tokenise() -> None:
    """Prints how long prompts take."""
    folder = resolve_model("smollm2-135m-instruct", lambda done, total, what: None, weights=False).path
    took = tokenising.run(folder, SIZES)
    print("\ntokenising, SmolLM2: " + ", ".join(f"{tokens:,} tokens {ms:.2f} ms" for tokens, ms in took.items()))


def about() -> str:
    """The machine and the versions."""
    versions = " ".join(f"{name} {importlib.metadata.version(name)}" for name in ("uvloop", "httptools", "msgspec"))
    cores = f"{os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[0]:.1f}"
    return f"{cores}; Python {platform.python_version()}, {versions}, {ssl.OPENSSL_VERSION}"


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--seconds",
        type=float,
        default=20.0,
        help="of each scenario; the first and last step of a stream weigh more in short ones",
    )
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas between them")
    arguments = parser.parse_args()
    parts = set(arguments.only.split(","))
    if not parts <= set(PARTS):
        sys.exit(f"--only takes {', '.join(PARTS)}")
    print(about(), flush=True)
    if "streams" in parts:
        streams(arguments.seconds)
    if "single" in parts:
        one_token(arguments.seconds)
    if "stages" in parts:
        one_process()
    if "tokenise" in parts:
        tokenise()


if __name__ == "__main__":
    main()
