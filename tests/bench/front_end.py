"""How many tokens one front-end worker streams: `python -m tests.bench.front_end [--streams 64] [--rate 200]`.

The real `blink-dpu` with one worker over the scripted device, which speaks on every stream at a fixed rate, over plain
HTTP; the client runs on the same machine.
"""

from __future__ import annotations

import argparse
import asyncio
import time

import psutil

from blink_proto import arena
from blink_proto.arena import Finish
from tests.bench.client import Ask, Client
from tests.bench.connection import Target
from tests.bench.load import Load
from tests.front_end import MODEL, front_end, make_device
from tests.replay import Script

TOKENS = 400
SIZES = arena.Sizes(channels=1, submit_slots=512, cancel_slots=512, log_slots=16384, heap_tokens=1 << 16)


async def stream(url: str, streams: int) -> tuple[int, float]:
    """Tokens streamed and seconds, two requests on each stream."""
    ask = Ask(MODEL, max_tokens=TOKENS, extra={"ignore_eos": True})
    load = Load(Client(Target.from_url(url, insecure=True), ask), iter(lambda: "hi", None), 0)
    begin = time.perf_counter()
    await load.closed(streams, 600.0, 2 * streams)
    seconds = time.perf_counter() - begin
    assert all(record.ok for record in load.records), [record.error for record in load.records if not record.ok][:3]
    return 2 * streams * TOKENS, seconds


def main() -> None:
    """Prints tokens per second and the worker's CPU time per token."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rate", type=float, default=200.0, help="tokens/s of each stream")
    arguments = parser.parse_args()
    device = make_device(sizes=SIZES, window=1024)
    device.script = lambda submission: Script([40] * TOKENS, Finish.LENGTH, every=1 / arguments.rate)
    flags = ("--workers", "1", "--no-access-log", "--queue-depth", "512")
    with front_end(*flags, device=device) as running:
        worker = psutil.Process(running.workers()[0])
        before = sum(worker.cpu_times()[:2])
        tokens, seconds = asyncio.run(stream(running.http, arguments.streams))
        spent = sum(worker.cpu_times()[:2]) - before
    print(f"offered {arguments.streams * arguments.rate:.0f} tokens/s: {tokens / seconds:.0f} tokens/s streamed,")
    print(f"{1e6 * spent / tokens:.0f} µs of CPU a token, {100 * spent / seconds:.0f} % of a core")


if __name__ == "__main__":
    main()
