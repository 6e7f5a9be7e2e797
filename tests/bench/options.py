"""Command line of the load generator."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from tests.bench.client import Ask
from tests.bench.stats import Slo


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Reads and checks the arguments; ends the program where they make no sense."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    _add_target(parser)
    _add_load(parser)
    _add_request(parser)
    _add_report(parser)
    arguments = parser.parse_args(argv)
    if (arguments.rate is None) == (arguments.streams is None):
        parser.error("one of --rate (open loop) and --streams (closed loop) is needed")
    if not arguments.stream and (arguments.slo_ttft_ms or arguments.slo_tpot_ms):
        parser.error("objectives on token times need --stream")
    if arguments.api_key_env and not os.environ.get(arguments.api_key_env):
        parser.error(f"{arguments.api_key_env} is not set")
    return arguments


def ask_of(arguments: argparse.Namespace, model: str) -> Ask:
    """What each request asks."""
    return Ask(
        model=model,
        api=arguments.api,
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        stream=arguments.stream,
        timeout=arguments.timeout,
        api_key=os.environ[arguments.api_key_env] if arguments.api_key_env else "",
        extra=arguments.extra_body,
    )


def slo_of(arguments: argparse.Namespace) -> Slo | None:
    """The objectives, if any."""
    ttft, tpot = arguments.slo_ttft_ms, arguments.slo_tpot_ms
    if ttft is None and tpot is None:
        return None
    return Slo(ttft=ttft / 1000 if ttft else None, tpot=tpot / 1000 if tpot else None)


def _add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", required=True, help="for example https://127.0.0.1:8443, with or without /v1")
    parser.add_argument("--insecure", action="store_true", help="accept any certificate")
    parser.add_argument("--model", default="", help="default: the first that the endpoint lists")
    parser.add_argument("--api", choices=("completions", "chat"), default="completions")
    parser.add_argument("--api-key-env", default="", metavar="NAME", help="environment variable with the key")


def _add_load(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rate", type=_positive, help="open loop: mean requests/s, Poisson arrivals")
    parser.add_argument("--streams", type=_count, help="closed loop: requests kept running")
    parser.add_argument("--duration", type=_positive, default=30.0, help="seconds in which requests start")
    parser.add_argument("--requests", type=_count, default=0, help="end after so many requests")
    parser.add_argument("--concurrency-limit", type=_count, default=0, help="open loop: arrivals beyond it fail unsent")
    parser.add_argument("--warmup", type=int, default=1, help="requests before the measurement, one at a time")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals and prompts")


def _add_request(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt-tokens", type=_count, default=128, help="words of the prompt, about a token each")
    parser.add_argument("--max-tokens", type=_count, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--stream", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--timeout", type=_positive, default=600.0, help="seconds for a whole answer")
    parser.add_argument("--extra-body", type=_json_object, default={}, metavar="JSON", help='e.g. {"ignore_eos": true}')


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--slo-ttft-ms", type=_positive, help="objective for the time to first token")
    parser.add_argument("--slo-tpot-ms", type=_positive, help="objective for the mean time per output token")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write settings, machine, figures and requests")


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"not above 0: {text}")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"not at least 1: {text}")
    return value


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("not a JSON object")
    return value
