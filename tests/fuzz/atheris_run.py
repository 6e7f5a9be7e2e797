"""Drives a target by coverage. Usage: python -m tests.fuzz.atheris_run TARGET LIBFUZZER_ARGUMENTS…

TARGET: `request` (bodies of requests) or `channel` (what the device writes).
"""

from __future__ import annotations

import sys

import atheris


def _mutate_request(data: bytes, max_size: int, seed: int) -> bytes:
    from tests.fuzz.json_mutator import mutated

    if seed % 4 == 0:
        return bytes(atheris.Mutate(data, max_size))
    endpoint = b"c" if seed % 2 else b"t"
    return (endpoint + mutated(data[1:], seed))[:max_size]


def main() -> None:
    """Runs until libFuzzer's arguments say to stop, or a fault is found."""
    target = sys.argv.pop(1)
    with atheris.instrument_imports(include=["dpu_service"]):
        if target == "request":
            from tests.fuzz.request_target import one
        else:
            from tests.fuzz.channel_target import one
    options = {"custom_mutator": _mutate_request} if target == "request" else {}
    atheris.Setup(sys.argv, one, **options)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
