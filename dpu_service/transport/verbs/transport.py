"""The `verbs` transport: see `Transport` for what every method promises."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from blink_proto import arena
from blink_proto.rdma.binding import Access, Device, Domain, QueuePair, RdmaError, open_device
from blink_proto.rdma.choice import RdmaChoice
from blink_proto.rdma.wire import Answer, WireError
from dpu_service.transport.base import Range, TransportError
from dpu_service.transport.verbs.giving_back import Closable, give_back
from dpu_service.transport.verbs.memory import PinnedMemory, Staging
from dpu_service.transport.verbs.mirror import SLOT_BYTES, SLOTS, Mirror
from dpu_service.transport.verbs.sender import DEPTH, PIECE_BYTES, Payload, Sender, word_payload
from dpu_service.transport.verbs.windows import Windows

log = logging.getLogger(__name__)

STAGING_BYTES = 2 << 20
CONNECT_SECONDS = 5.0
_WORD = 8


class VerbsConnector:
    """See `Connector`. Opens the device and makes the queue pair, whose number is what the runtime has to know.

    Raises:
        TransportError: there is no such device.
    """

    def __init__(self, rdma: RdmaChoice) -> None:
        made: list[Closable] = []
        try:
            self._device = open_device(rdma.device, rdma.address, rdma.bindings)
            made.append(self._device)
            self._domain: Domain | None = self._device.domain()
            made.append(self._domain)
            self._pair = self._domain.queue_pair(DEPTH)
        except RdmaError as error:
            give_back(*reversed(made))
            raise TransportError(str(error)) from error
        log.info("verbs", extra={"fields": {"binding": self._device.binding, "device": self._device.name}})

    @property
    def offer(self) -> bytes:
        """The queue pair's endpoint."""
        return self._pair.endpoint.to_bytes()

    def connect(self, answer: bytes, sizes: arena.Sizes, channel: int) -> VerbsTransport:
        """Connects, and fetches the header, the telemetry page and the channel's cursors."""
        assert self._domain is not None, "a connector is used once"
        try:
            found = Answer.from_bytes(answer)
            self._pair.connect(found.endpoint, Access(0))
            transport = VerbsTransport(self._device, self._domain, self._pair, found, sizes)
        except (WireError, RdmaError) as error:
            raise TransportError(str(error)) from error
        self._domain = None
        try:
            transport.fetch_now(_first_ranges(sizes, channel), CONNECT_SECONDS)
        except TransportError:
            transport.close()
            raise
        return transport

    def close(self) -> None:
        """What a transport has taken over stays."""
        if self._domain is not None:
            give_back(self._pair, self._domain, self._device)
            self._domain = None

    def __repr__(self) -> str:
        return "VerbsConnector(redacted)"


class VerbsTransport:
    """Payloads go through a staging ring and are posted with the commit word that follows them: RDMA writes of one
    queue pair are placed in order. Nothing is waited for: what finds no room on the queue pair goes when there is some.
    """

    def __init__(self, device: Device, domain: Domain, pair: QueuePair, answer: Answer, sizes: arena.Sizes) -> None:
        self._device, self._domain, self._pair = device, domain, pair
        inbound, outbound = arena.InboundLayout(sizes).total_bytes, arena.OutboundLayout(sizes).total_bytes
        self._inbound, readable = Windows(answer.inbound, inbound), Windows(answer.outbound, outbound)
        self._memory = PinnedMemory(domain, STAGING_BYTES + SLOTS * SLOT_BYTES)
        self._sender = Sender(pair, self._memory, Staging(0, STAGING_BYTES))
        self._mirror = Mirror(self._sender, self._memory, STAGING_BYTES, readable, outbound)
        self._unsent: list[Payload] = []
        self._armed = False
        self._closed = False

    def write(self, offset: int, payload: bytes) -> None:
        """Goes with the next commit."""
        self._sender.check()
        remote, key = self._inbound.find(offset, len(payload))
        for at in range(0, len(payload), PIECE_BYTES):
            self._unsent.append(Payload(payload[at : at + PIECE_BYTES], remote + at, key))

    def commit(self, offset: int, word: int) -> None:
        """An inline write of its own, behind the payloads on the same queue pair."""
        remote, key = self._inbound.find(offset, _WORD, aligned=True)
        self._send_out(word_payload(word, remote, key))

    def read(self, offset: int, size: int) -> bytes:
        """From the local copy, after taking in what has come."""
        self._progress()
        return self._mirror.read(offset, size)

    def fetch(self, *ranges: Range) -> int:
        """RDMA reads on the same queue pair, up to SLOTS fetches at a time."""
        self._progress()
        ticket = self._mirror.fetch(ranges)
        self._arm()
        return ticket

    def fetched(self, ticket: int) -> bool:
        """After taking in what has come."""
        self._progress()
        return self._mirror.fetched(ticket)

    @property
    def descriptor(self) -> int | None:
        """The completion channel's."""
        return self._pair.descriptor

    def fetch_now(self, ranges: tuple[Range, ...], timeout: float) -> None:
        """Fetches and waits; for the beginning and for tests.

        Raises:
            TransportError: it took longer than `timeout` seconds.
        """
        ticket = self.fetch(*ranges)
        self._await(lambda: self._mirror.fetched(ticket), timeout)

    def flush(self, timeout: float) -> None:
        """An acknowledged RDMA write has reached the device's memory, or will before any later access of it."""
        if self._unsent:
            self._send_out()
        self._await(lambda: self._sender.idle, timeout)

    def close(self) -> None:
        """Ends the connection. May be called again."""
        if self._closed:
            return
        self._closed = True
        give_back(self._pair, self._memory, self._domain, self._device)

    def _send_out(self, *last: Payload) -> None:
        self._sender.check()
        payloads, self._unsent = [*self._unsent, *last], []
        self._sender.send_payloads(payloads)

    def _progress(self) -> None:
        if self._closed:
            raise TransportError("the connection was closed")
        if self._armed and self._pair.take_event():
            self._armed = False
        self._sender.progress()
        if not self._armed:
            self._arm()

    def _arm(self) -> None:
        """Asks for an event when something is awaited; what came before the question is looked for again."""
        if self._armed or not self._mirror.awaited:
            return
        self._armed = True
        self._pair.arm()
        self._sender.progress()

    def _await(self, true: Callable[[], bool], timeout: float) -> None:
        end = time.monotonic() + timeout
        while not true():
            if time.monotonic() > end:
                raise TransportError("the arena did not answer in time")
            time.sleep(0.0002)
            self._progress()

    def __repr__(self) -> str:
        return "VerbsTransport(redacted)"


def _first_ranges(sizes: arena.Sizes, channel: int) -> tuple[Range, ...]:
    layout = arena.OutboundLayout(sizes)
    cursors = layout.channel_offset(channel) + layout.channel_control_offset
    return (
        Range(layout.header_offset, arena.ArenaHeader.itemsize),
        Range(layout.telemetry_offset, arena.Telemetry.itemsize),
        Range(cursors, arena.ChannelOut.itemsize),
    )
