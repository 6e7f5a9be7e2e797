"""Times between the chunks of many HTTPS streams, in windows of one run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np

from tests.bench.client import Ask, Client
from tests.bench.connection import Target
from tests.bench.load import Load
from tests.gpu.gaps import Gaps
from tests.shapes import letters


@dataclass
class Window:
    """A part of the run, with something that holds meanwhile."""

    seconds: float
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    begin: float = field(default=0.0)
    end: float = field(default=0.0)


async def run_streams(url: str, model: str, streams: int, tokens: int, windows: list[Window]) -> list[Gaps]:
    """Keeps the streams running through all windows; the gaps of each window.

    Raises:
        AssertionError: a request failed.
    """
    ask = Ask(model, max_tokens=tokens, extra={"ignore_eos": True}, timeout=60)
    load = Load(Client(Target.from_url(url, insecure=True), ask), letters(32, seed=1))
    running = asyncio.create_task(load.closed(streams, sum(window.seconds for window in windows)))
    for window in windows:
        window.begin = asyncio.get_running_loop().time()
        with window.around():
            await asyncio.sleep(window.seconds)
        window.end = asyncio.get_running_loop().time()
    await running
    failures = [record.error for record in load.records if not record.ok]
    assert not failures, failures[:5]
    return [_gaps_within(load, window) for window in windows]


def _gaps_within(load: Load, window: Window) -> Gaps:
    gaps = [
        later - earlier
        for record in load.records
        for earlier, later in zip(record.chunk_times, record.chunk_times[1:], strict=False)
        if window.begin <= later <= window.end
    ]
    return Gaps.of(np.array(gaps))
