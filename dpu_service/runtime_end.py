"""A worker's end of one runtime: the way to its arena, the channel and the pump, renewed with every session."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
from collections.abc import Callable
from weakref import WeakValueDictionary

from blink_proto.tokenizer.files import BundleError
from dpu_service import metrics
from dpu_service.channel.client import ChannelClient
from dpu_service.channel.errors import ChannelError
from dpu_service.config import WorkerConfig
from dpu_service.identity import digest_of
from dpu_service.runtimes import Runtimes, Serving
from dpu_service.sequences.errors import DeviceUnavailableError
from dpu_service.sequences.pump import Pump
from dpu_service.text.bundle import TextBundle
from dpu_service.text.encoder import TextEncoder
from dpu_service.text.template import ChatTemplateError
from dpu_service.transport.base import Connector, Transport, TransportError
from dpu_service.transport.choose import make_connector
from dpu_service.wire import Broken, MakeOffer, Offer, Session

log = logging.getLogger(__name__)

Reply = Callable[[Offer | Broken], None]


class Bundles:
    """Tokenizer files, loaded once for all runtimes that have the same."""

    def __init__(self) -> None:
        self._loaded: WeakValueDictionary[bytes, TextBundle] = WeakValueDictionary()
        self._loading = asyncio.Lock()

    async def load(self, files: dict[str, bytes]) -> TextBundle:
        """Those of a session.

        Raises:
            BundleError: they cannot be used.
        """
        key = digest_of(files)
        async with self._loading:
            bundle = self._loaded.get(key)
            if bundle is None:
                bundle = self._loaded[key] = await asyncio.to_thread(TextBundle, files)
            return bundle


class RuntimeEnd:
    """See the module. Messages are followed one after the other, without keeping those of other runtimes waiting.

    Args:
        runtime: its number.
        runtimes: where what is served is put.
        on_change: called when readiness may have changed.
        reply: takes what the supervisor is to hear.
    """

    def __init__(
        self,
        runtime: int,
        config: WorkerConfig,
        runtimes: Runtimes,
        bundles: Bundles,
        on_change: Callable[[], None],
        reply: Reply,
    ) -> None:
        self._runtime = runtime
        self._config = config
        self._runtimes = runtimes
        self._bundles = bundles
        self._on_change = on_change
        self._reply = reply
        self._messages: asyncio.Queue[Session | MakeOffer] = asyncio.Queue()
        self._connector: Connector | None = None
        self._pumping: asyncio.Task[None] | None = None
        self._counted: tuple[Pump | None, list[int]] = (None, [])

    def put(self, message: Session | MakeOffer) -> None:
        """From the supervisor."""
        self._messages.put_nowait(message)

    async def follow(self) -> None:
        """Does what the messages say; runs for ever."""
        while True:
            message = await self._messages.get()
            if isinstance(message, MakeOffer):
                self._reply(await self._make_offer(message.number))
            else:
                await self._open(message)

    def leave(self, failure: DeviceUnavailableError) -> None:
        """Ends what runs there with an error, and gives the channel back."""
        serving = self._runtimes.take(self._runtime)
        if serving is not None:
            serving.pump.close(failure)
            serving.encoder.close()

    def count(self) -> None:
        """Adds to the metrics what the pump has counted since the last call."""
        serving = self._runtimes.at(self._runtime)
        if serving is None:
            return
        pump, (before, seen) = serving.pump, self._counted
        now = [pump.client.unknown_records, pump.faults, pump.leases]
        counters = (metrics.UNKNOWN_RECORDS, metrics.DEVICE_FAULTS, metrics.LEASES)
        for counter, new, old in zip(counters, now, seen if before is pump else [0, 0, 0], strict=True):
            counter.inc(new - old)
        self._counted = (pump, now)

    async def _make_offer(self, number: int) -> Offer:
        self._drop_connector()
        try:
            self._connector = await asyncio.to_thread(self._new_connector)
        except TransportError as error:
            return Offer(number, b"", str(error))
        return Offer(number, self._connector.offer)

    def _new_connector(self) -> Connector:
        return make_connector(self._config.transport, self._config.rdma)

    def _drop_connector(self) -> None:
        connector, self._connector = self._connector, None
        if connector is not None:
            connector.close()

    async def _open(self, session: Session) -> None:
        """Replaces the session; running requests of the old one end with an error."""
        self.leave(DeviceUnavailableError("the GPU runtime was restarted"))
        try:
            serving = await self._serving(session)
        except (BundleError, ChannelError, ChatTemplateError, TransportError) as error:
            fields = {"runtime": self._runtime, "reason": str(error)}
            log.error("cannot use the session", extra={"fields": fields})
            if isinstance(error, TransportError):
                self._broke()
            self._on_change()
            return
        self._runtimes.put(serving)
        self._on_change()
        _spare_collector()
        self._pumping = asyncio.create_task(serving.pump.run())
        self._pumping.add_done_callback(end_if_failed)

    async def _serving(self, session: Session) -> Serving:
        geometry, config = session.geometry, self._config
        if session.transport != config.transport:
            raise TransportError(f"the session is for another transport, {session.transport!r}")
        bundle = await self._bundles.load(session.tokenizer_files)
        encoder = TextEncoder(bundle, geometry.window, config.tool_parser)
        geometry.check()
        connector, self._connector = self._connector, None
        if connector is None:
            connector = await asyncio.to_thread(self._new_connector)
        transport = await asyncio.to_thread(_connected, connector, session)
        try:
            client = ChannelClient(transport, geometry, session.channel)
        except BaseException:
            transport.close()
            raise
        pump = Pump(client, config.queue_depth, config.device_timeout, self._on_change, self._broke)
        return Serving(session.model, geometry, encoder, pump, self._runtime)

    def _broke(self) -> None:
        """The connection to the arena is of no use any more."""
        self.leave(DeviceUnavailableError("the connection to the device was lost"))
        self._on_change()
        self._reply(Broken(self._runtime))


def _connected(connector: Connector, session: Session) -> Transport:
    """Closes the connector where it was used: a caller that goes away must not do so meanwhile."""
    try:
        return connector.connect(session.transport_blob, session.geometry.sizes, session.channel)
    finally:
        connector.close()


def end_if_failed(task: asyncio.Task[None]) -> None:
    """A worker that no longer follows its channels is of no use: it ends, and the supervisor starts another."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("a task failed that must not", exc_info=error)
        os._exit(1)


def _spare_collector() -> None:
    """What lives now lives long, and of what comes, reference counts free nearly all: the collector of cycles need not
    look at the former, and at the latter rarely: every stream would have to wait for it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
