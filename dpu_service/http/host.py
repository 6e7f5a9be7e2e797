"""What the connections of one listener share."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import TYPE_CHECKING, Any

from dpu_service.config import WorkerConfig

if TYPE_CHECKING:
    from dpu_service.http.connection import Connection
    from dpu_service.http.stream import Stream

log = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
App = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]


@dataclass(eq=False)
class Host:
    """The application, the limits and the open connections."""

    app: App
    config: WorkerConfig
    connections: set[Connection] = field(default_factory=set)
    draining: bool = False
    date: bytes = b""
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def full(self) -> bool:
        """Whether another connection is one too many."""
        return len(self.connections) >= self.config.max_connections

    def tick(self) -> None:
        """Once a second: the time for the Date header."""
        self.date = formatdate(usegmt=True).encode()

    def run(self, stream: Stream) -> None:
        """Lets the application answer a request."""
        task = asyncio.get_running_loop().create_task(self._answer(stream))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def drain(self) -> None:
        """Every connection ends with its next answer, or when told to close."""
        self.draining = True
        for connection in list(self.connections):
            connection.drain()

    def close(self) -> None:
        """Ends every connection once what is written has left."""
        for connection in list(self.connections):
            connection.close()

    async def _answer(self, stream: Stream) -> None:
        try:
            await self.app(stream.scope, stream.receive, stream.send)
        except Exception:
            log.exception("the application failed")
        finally:
            stream.done()
