"""A worker process: one event loop, one channel of each runtime's arena, all listening sockets.

Started by the supervisor as `python -m dpu_service.worker DESCRIPTOR`, the descriptor being its end of a socket pair.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import socket
import sys

from blink_proto.secret import forbid_core_dumps
from dpu_service import logs, metrics
from dpu_service.api.app import App
from dpu_service.routing.prefixes import PrefixPage
from dpu_service.runtime_end import Bundles, RuntimeEnd, end_if_failed
from dpu_service.runtimes import Runtimes
from dpu_service.sequences.errors import DeviceUnavailableError, DrainTimeoutError
from dpu_service.server import Listener
from dpu_service.service import Service
from dpu_service.tenants.gate import Gate
from dpu_service.tenants.page import CounterPage
from dpu_service.tls import context_of
from dpu_service.watch import LOOK_SECONDS, FileWatch
from dpu_service.wire import Broken, Drain, MakeOffer, Offer, Session, Start, Status, Tenants, encode, read_to_worker

log = logging.getLogger(__name__)

SAMPLE_SECONDS = 0.1
"""Age of gauges at most; gateways ask about as often."""
FAREWELL_SECONDS = 0.5
"""After the grace time: for error events to reach clients and cancels to reach the device."""


class Worker:
    """Follows the supervisor's messages until told to drain."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, start: Start) -> None:
        self._reader = reader
        self._writer = writer
        self._service = Service(
            start.config, _gate(start), Runtimes(PrefixPage(start.prefixes, start.runtimes).runtimes)
        )
        app = App(self._service)
        config = start.config
        tls = context_of(config) if config.tls_cert else None
        self._tls_files = FileWatch([config.tls_cert, config.tls_key, config.tls_client_ca])
        self._listeners = [
            Listener(app, config, socket.socket(fileno=spec.descriptor), tls if spec.tls else None)
            for spec in start.listeners
        ]
        bundles = Bundles()
        self._ends = [
            RuntimeEnd(number, config, self._service.runtimes, bundles, self._tell, self._reply)
            for number in range(start.runtimes)
        ]
        self._following: list[asyncio.Task[None]] = []
        self._told: Status | None = None

    async def run(self) -> None:
        """Serves until told to drain, or the supervisor is gone."""
        for listener in self._listeners:
            await listener.start()
        chores = [asyncio.create_task(self._sample()), asyncio.create_task(self._look_around())]
        for end in self._ends:
            self._following.append(asyncio.create_task(end.follow()))
            self._following[-1].add_done_callback(end_if_failed)
        how = Drain(0)
        while message := await read_to_worker(self._reader):
            if isinstance(message, Session | MakeOffer):
                self._ends[message.runtime].put(message)
            elif isinstance(message, Tenants):
                self._service.gate.set_tenants(message.tenants)
            elif isinstance(message, Drain):
                how = message
                break
        await self._drain(how)
        for chore in chores:
            chore.cancel()

    def _reply(self, message: Offer | Broken) -> None:
        self._writer.write(encode(message))

    def _leave(self) -> None:
        for task in self._following:
            task.cancel()
        for end in self._ends:
            end.leave(DeviceUnavailableError("the server is shutting down"))

    def _tell(self) -> None:
        """Tells the supervisor when readiness has changed."""
        service = self._service
        status = Status(service.announced, service.why_not_ready(), service.runtimes.alive())
        if status != self._told:
            self._told = status
            self._writer.write(encode(status))
        metrics.WORKER_READY.set(status.ready)

    async def _drain(self, end: Drain) -> None:
        service = self._service
        service.leaving = True
        self._tell()
        await asyncio.sleep(end.unready)
        service.draining = True
        for listener in self._listeners:
            listener.drain()
        self._tell()
        if not await _within(end.grace, service.idle):
            log.warning("the grace time is over", extra={"fields": {"requests": service.active}})
            for serving in service.runtimes.servings:
                serving.pump.fail_all(DrainTimeoutError("the server is shutting down"))
            await _within(FAREWELL_SECONDS, service.idle)
            await asyncio.sleep(FAREWELL_SECONDS / 10)
        self._leave()
        for listener in self._listeners:
            listener.close()
        await asyncio.sleep(0.05)  # lets the last bytes and TLS farewells out

    async def _look_around(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self._service.gate.tick()
            if self._tls_files.changed():
                await self._renew_tls()

    async def _renew_tls(self) -> None:
        """All or nothing: a certificate without its key, in the midst of being replaced, changes nothing."""
        try:
            context = context_of(self._service.config)
        except (OSError, ValueError) as error:
            metrics.TLS_RELOADS.labels("failed").inc()
            log.error("kept the old certificate", extra={"fields": {"reason": str(error)}})
            return
        for listener in self._listeners:
            if listener.tls:
                await listener.renew(context)
        metrics.TLS_RELOADS.labels("ok").inc()
        log.info("new certificate", extra={"fields": {"file": self._service.config.tls_cert}})

    async def _sample(self) -> None:
        """Gauges and counters that nothing else touches when they change."""
        while True:
            for end in self._ends:
                end.count()
            self._service.show_sequences()
            await asyncio.sleep(SAMPLE_SECONDS)


def _gate(start: Start) -> Gate:
    """Shut until the tenants are known, where keys are needed."""
    if not start.config.guarded:
        return Gate.open_to_all()
    return Gate(CounterPage(start.counters, start.workers), start.worker)


async def _within(seconds: float, event: asyncio.Event) -> bool:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return False
    return True


def _allow_open_files() -> None:
    """As many as the system lets this process have; the usual 1,024 are fewer than the connections of a worker."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def work(descriptor: int) -> None:
    """The whole life of a worker."""
    asyncio.get_running_loop().set_exception_handler(logs.on_loop_error)
    pair = socket.socket(fileno=descriptor)
    reader, writer = await asyncio.open_connection(sock=pair)
    start = await read_to_worker(reader)
    if isinstance(start, Start):
        await Worker(reader, writer, start).run()


def main() -> None:
    """The supervisor alone decides when to stop, so signals of the terminal are ignored here."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    forbid_core_dumps()
    _allow_open_files()
    logs.set_up(f"worker {os.getpid()}", os.environ.get("BLINK_LOG_LEVEL", "info"))
    try:
        import uvloop
    except ImportError:  # not made for every platform
        asyncio.run(work(int(sys.argv[1])))
    else:
        uvloop.run(work(int(sys.argv[1])))


if __name__ == "__main__":
    main()
