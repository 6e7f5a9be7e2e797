"""A worker process: one event loop, one channel of the arena, all listening sockets.

Started by the supervisor as `python -m dpu_service.worker DESCRIPTOR`, the descriptor being its end of a socket pair.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import signal
import socket
import sys

from blink_proto.secret import forbid_core_dumps
from dpu_service import logs, metrics
from dpu_service.api.app import App
from dpu_service.channel.client import ChannelClient
from dpu_service.channel.errors import ChannelError
from dpu_service.sequences.errors import DeviceUnavailableError, DrainTimeoutError
from dpu_service.sequences.pump import Pump
from dpu_service.server import Listener
from dpu_service.service import Service, Serving
from dpu_service.tenants.gate import Gate
from dpu_service.tenants.page import CounterPage
from dpu_service.text.bundle import BundleError, TextBundle
from dpu_service.text.encoder import TextEncoder
from dpu_service.text.template import ChatTemplateError
from dpu_service.tls import context_of
from dpu_service.transport.base import Connector, TransportError
from dpu_service.transport.choose import RdmaChoice, make_connector
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
        self._service = Service(start.config, _gate(start))
        app = App(self._service)
        config = start.config
        tls = context_of(config) if config.tls_cert else None
        self._tls_files = FileWatch([config.tls_cert, config.tls_key, config.tls_client_ca])
        self._listeners = [
            Listener(app, config, socket.socket(fileno=spec.descriptor), tls if spec.tls else None)
            for spec in start.listeners
        ]
        self._connector: Connector | None = None
        self._pumping: asyncio.Task[None] | None = None
        self._told: Status | None = None

    async def run(self) -> None:
        """Serves until told to drain, or the supervisor is gone."""
        for listener in self._listeners:
            await listener.start()
        chores = [asyncio.create_task(self._sample()), asyncio.create_task(self._look_around())]
        end = Drain(0)
        while message := await read_to_worker(self._reader):
            if isinstance(message, Session):
                await self._open(message)
            elif isinstance(message, MakeOffer):
                self._writer.write(encode(await self._make_offer(message.number)))
            elif isinstance(message, Tenants):
                self._service.gate.set_tenants(message.tenants)
            elif isinstance(message, Drain):
                end = message
                break
        await self._drain(end)
        for chore in chores:
            chore.cancel()

    async def _make_offer(self, number: int) -> Offer:
        self._drop_connector()
        try:
            self._connector = await asyncio.to_thread(self._new_connector)
        except TransportError as error:
            return Offer(number, b"", str(error))
        return Offer(number, self._connector.offer)

    def _new_connector(self) -> Connector:
        config = self._service.config
        return make_connector(
            config.transport, RdmaChoice(config.rdma_device, config.rdma_address, config.verbs_binding)
        )

    def _drop_connector(self) -> None:
        connector, self._connector = self._connector, None
        if connector is not None:
            connector.close()

    async def _open(self, session: Session) -> None:
        """Replaces the session; running requests of the old one end with an error."""
        self._leave(DeviceUnavailableError("the GPU runtime was restarted"))
        try:
            self._service.serving = await self._serving(session)
        except (BundleError, ChannelError, ChatTemplateError, TransportError) as error:
            log.error("cannot use the session", extra={"fields": {"reason": str(error)}})
            if isinstance(error, TransportError):
                self._broke()
            return
        finally:
            self._tell()
        _spare_collector()
        self._pumping = asyncio.create_task(self._service.serving.pump.run())
        self._pumping.add_done_callback(_check_pump)

    async def _serving(self, session: Session) -> Serving:
        geometry = session.geometry
        if session.transport != self._service.config.transport:
            raise TransportError(f"the session is for another transport, {session.transport!r}")
        bundle = await asyncio.to_thread(TextBundle, session.tokenizer_files)
        encoder = TextEncoder(bundle, geometry.window, self._service.config.tool_parser)
        geometry.check()
        connector, self._connector = self._connector, None
        if connector is None:
            connector = await asyncio.to_thread(self._new_connector)
        try:
            transport = await asyncio.to_thread(
                connector.connect, session.transport_blob, geometry.sizes, session.channel
            )
        finally:
            connector.close()
        client = ChannelClient(transport, geometry, session.channel)
        config = self._service.config
        pump = Pump(client, config.queue_depth, config.device_timeout, self._tell, self._broke)
        return Serving(session.model, geometry, encoder, pump)

    def _broke(self) -> None:
        """The connection to the arena is of no use any more."""
        self._leave(DeviceUnavailableError("the connection to the device was lost"))
        self._tell()
        self._writer.write(encode(Broken()))

    def _leave(self, failure: DeviceUnavailableError) -> None:
        serving, self._service.serving = self._service.serving, None
        if serving is not None:
            serving.pump.close(failure)
            serving.encoder.close()

    def _tell(self) -> None:
        """Tells the supervisor when readiness has changed."""
        status = Status(self._service.announced, self._service.why_not_ready())
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
        if not await _within(end.grace, service.idle) and service.serving is not None:
            log.warning("the grace time is over", extra={"fields": {"requests": service.active}})
            service.serving.pump.fail_all(DrainTimeoutError("the server is shutting down"))
            await _within(FAREWELL_SECONDS, service.idle)
            await asyncio.sleep(FAREWELL_SECONDS / 10)
        self._leave(DeviceUnavailableError("the server is shutting down"))
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
        seen = {"unknown": 0, "faults": 0, "leases": 0}
        pump = None
        while True:
            serving = self._service.serving
            if serving is not None:
                if serving.pump is not pump:
                    pump, seen = serving.pump, dict.fromkeys(seen, 0)
                now = {"unknown": pump.client.unknown_records, "faults": pump.faults, "leases": pump.leases}
                metrics.UNKNOWN_RECORDS.inc(now["unknown"] - seen["unknown"])
                metrics.DEVICE_FAULTS.inc(now["faults"] - seen["faults"])
                metrics.LEASES.inc(now["leases"] - seen["leases"])
                seen = now
            self._service.show_sequences()
            await asyncio.sleep(SAMPLE_SECONDS)


def _spare_collector() -> None:
    """What lives now lives long, and of what comes, reference counts free nearly all: the collector of cycles need not
    look at the former, and at the latter rarely: every stream would have to wait for it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def _gate(start: Start) -> Gate:
    """Shut until the tenants are known, where keys are needed."""
    if not start.config.guarded:
        return Gate.open_to_all()
    return Gate(CounterPage(start.counters, start.workers), start.worker)


def _check_pump(pumping: asyncio.Task[None]) -> None:
    """A worker that no longer follows its channel is of no use: it ends, and the supervisor starts another."""
    if not pumping.cancelled() and (error := pumping.exception()) is not None:
        log.critical("the pump failed", exc_info=error)
        os._exit(1)


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
