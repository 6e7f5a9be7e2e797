"""Waiting for what may never come: files on servers that are gone, chains that do not start."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from gpu_runtime.chain.process import Progress
from gpu_runtime.control.errors import StalledError

STALL_SECONDS = 900.0
"""A load of which nothing was heard for so long is given up. The longest silences of sound ones are a large matrix from
a slow disk and the compilation of a step's kernels: minutes."""
T = TypeVar("T")
_going_on: set[asyncio.Task[Any]] = set()
"""The event loop itself holds tasks but weakly."""


async def while_it_moves(work: Callable[[Progress], Awaitable[T]], progress: Progress) -> T:
    """Awaits work that tells its progress; cancels it when that is the same for `STALL_SECONDS`.

    Raises:
        StalledError: after that.
    """
    loop = asyncio.get_running_loop()
    latest, moved = (0, 0, ""), loop.time()

    def note(done: int, total: int, what: str) -> None:
        nonlocal latest, moved
        if (done, total, what) != latest:
            latest, moved = (done, total, what), loop.time()
        progress(done, total, what)

    task = asyncio.ensure_future(work(note))
    try:
        while not task.done():
            left = moved + STALL_SECONDS - loop.time()
            if left <= 0:
                last = f", the last being: {latest[2]}" if latest[2] else ""
                raise StalledError(f"the load was given up: nothing was heard of it for {STALL_SECONDS:.0f} s{last}")
            await asyncio.wait([task], timeout=left)
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Awaits work that goes on when its caller is cancelled."""
    task = asyncio.create_task(work)
    _going_on.add(task)
    task.add_done_callback(_going_on.discard)
    return await asyncio.shield(task)


async def in_thread(call: Callable[[], T], undo: Callable[[T], object] | None = None) -> T:
    """Runs a call in a thread of its own. One that never returns is left behind when the caller is cancelled: nobody
    waits for it at the end of the process, other than for the event loop's own threads.

    Args:
        undo: called in a thread with an outcome that nobody waits for any more.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if outcome.cancelled():
            if undo is not None and error is None:
                threading.Thread(target=undo, args=(result,), daemon=True).start()
            return
        if error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, failure = None, None
        try:
            result = call()
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, daemon=True).start()
    return await outcome
