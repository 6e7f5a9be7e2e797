"""One runtime's arena with a scripted device behind it, and the way in for front ends."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

from blink_proto import arena
from blink_proto.arena import Finish
from dpu_service.channel.client import ChannelClient
from dpu_service.channel.geometry import Geometry
from dpu_service.channel.news import News
from dpu_service.channel.prompt import SharedPrompt
from dpu_service.channel.rings import Sampling
from dpu_service.transport.base import Transport
from gpu_runtime.registration.base import Registration
from tests.replay import ReplayDevice
from tests.transport.kinds import Kind

SIZES = arena.Sizes(channels=2, submit_slots=4, cancel_slots=2, log_slots=8, heap_tokens=1 << 17)
PATIENCE = 20.0
"""Seconds for anything to arrive; emulated machines are slow."""
WORD = 8
_beats = itertools.count(1)


@dataclass
class Entrance:
    """A front end's connection, and what the runtime gave it."""

    transport: Transport
    registration: Registration
    channel: int


class Site:
    """See the module. Everything that was opened through it is closed with it."""

    def __init__(self, kind: Kind, epoch: int = 1, sizes: arena.Sizes = SIZES) -> None:
        self.kind = kind
        self.device = ReplayDevice(sizes, vocab_size=100, window=1 << 17, epoch=epoch)
        self.device.turn()
        self.registrar = kind.registrar(self.device)
        self.inbound, self.outbound = arena.InboundLayout(sizes), arena.OutboundLayout(sizes)
        self._entrances: list[Entrance] = []
        self._gone = False

    def enter(self, channel: int = 0, forge: Callable[[bytes], bytes] = lambda answer: answer) -> Entrance:
        """A new front end's connection to a channel; `forge` changes what it is told of the runtime."""
        connector = self.kind.connector()
        try:
            registration = self.registrar.register(connector.offer, (channel,))
            transport = connector.connect(forge(registration.answer), self.device.sizes, channel)
        finally:
            connector.close()
        entrance = Entrance(transport, registration, channel)
        self._entrances.append(entrance)
        return entrance

    def geometry(self) -> Geometry:
        """As a session would tell it."""
        device, sizes = self.device, self.device.sizes
        return Geometry(
            layout_hash=arena.LAYOUT_HASH,
            version=arena.VERSION,
            channels=sizes.channels,
            submit_slots=sizes.submit_slots,
            cancel_slots=sizes.cancel_slots,
            log_slots=sizes.log_slots,
            heap_tokens=sizes.heap_tokens,
            inbound_bytes=len(device.inbound),
            outbound_bytes=len(device.outbound),
            nonce=device.nonce,
            epoch=device.epoch,
            vocab_size=device.vocab_size,
            max_model_tokens=device.window,
            max_sequence_tokens=device.window,
        )

    def client(self, channel: int = 0) -> ChannelClient:
        """A front end that holds the channel's lease."""
        return self.lease(self.enter(channel))

    def lease(self, entrance: Entrance) -> ChannelClient:
        """Takes the lease over a connection."""
        client = ChannelClient(entrance.transport, self.geometry(), entrance.channel)
        client.fetch()
        client.ask_lease(next(_beats))
        self.until(lambda: self.step(client) and client.take_lease())
        return client

    def step(self, *clients: ChannelClient) -> bool:
        """A turn of the device, and the front ends ask what is new."""
        self.device.turn()
        for client in clients:
            client.fetch()
        return True

    def heap(self, channel: int = 0) -> int:
        """Offset of a channel's prompt heap in the inbound region: plain bytes to write to."""
        return self.inbound.channel_offset(channel) + self.inbound.channel_heap_offset

    def log(self, channel: int = 0) -> int:
        """Offset of a channel's token log in the outbound region."""
        return self.outbound.channel_offset(channel) + self.outbound.channel_log_offset

    def written(self, offset: int) -> int:
        """A word of the inbound region as the device sees it."""
        return memoryview(self.device.inbound).cast("Q")[offset // WORD]

    def publish(self, offset: int, word: int) -> None:
        """The device writes a word of the outbound region, in one store: `struct.pack_into` would zero it before."""
        memoryview(self.device.outbound).cast("Q")[offset // WORD] = word

    def until(self, true: Callable[[], bool], patience: float = PATIENCE) -> None:
        """Waits until something holds."""
        end = time.monotonic() + patience
        while not true():
            assert time.monotonic() < end, "it did not come true in time"
            time.sleep(0.0005)

    def die(self) -> None:
        """The runtime is gone, without a word to anybody."""
        if not self._gone:
            self._gone = True
            for entrance in self._entrances:
                entrance.registration.revoke()
            self.registrar.close()
            self.device.close()

    def close(self) -> None:
        """Ends both sides."""
        for entrance in self._entrances:
            entrance.transport.close()
        self.die()


def ask(client: ChannelClient, prompt: list[int], max_tokens: int = 10) -> int | None:
    """One submission; its position."""
    return client.submit(SharedPrompt(prompt, 1), Sampling(max_tokens))


def poll_until_over(site: Site, client: ChannelClient, sequences: int) -> dict[int, list[News]]:
    """News by submission, until so many have ended."""
    news: dict[int, list[News]] = {}
    over = 0
    end = time.monotonic() + PATIENCE
    while over < sequences:
        assert time.monotonic() < end, "the sequences did not end"
        site.step(client)
        time.sleep(0.0003)
        for item in client.poll():
            news.setdefault(item.position, []).append(item)
            over += item.finish is not Finish.NONE
    return news


def tokens_of(news: list[News]) -> list[int]:
    """All tokens of a sequence."""
    return [token for item in news for token in item.tokens]
