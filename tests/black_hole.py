"""A TCP proxy whose connections can be cut without a word: both ends think that the other one is there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class BlackHole:
    """Passes bytes on. What was connected when `swallow` was called gets no further byte, and no end; later connections
    do.
    """

    def __init__(self, port: int) -> None:
        self._to = port
        self._swallowed: list[asyncio.Event] = []
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    def swallow(self) -> None:
        for one in self._swallowed:
            one.set()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._to)
        hole = asyncio.Event()
        self._swallowed.append(hole)
        self._writers += [writer, there_writer]
        for one in (self._pass(reader, there_writer, hole), self._pass(there_reader, writer, hole)):
            self._tasks.add(asyncio.create_task(one))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hole: asyncio.Event) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                if not hole.is_set():
                    writer.write(data)
                    await writer.drain()
        if not hole.is_set():
            writer.close()

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for writer in self._writers:
            writer.close()


@asynccontextmanager
async def black_hole(port: int) -> AsyncIterator[BlackHole]:
    """Before a port of this machine."""
    made = BlackHole(port)
    server = await asyncio.start_server(made.accept, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
        made.close()
