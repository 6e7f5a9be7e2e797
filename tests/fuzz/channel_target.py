"""Any memory where the device writes: nothing but the channel's own errors may come out of its reader, no sequence may
get more than it asked for, and each call ends."""

from __future__ import annotations

import numpy as np

from blink_proto import arena
from blink_proto.arena import Finish, RecordKind
from dpu_service import metrics
from dpu_service.channel.client import ChannelClient, LeaseState
from dpu_service.channel.errors import ChannelError, LeaseLostError
from dpu_service.channel.geometry import Geometry
from dpu_service.channel.news import News
from dpu_service.channel.prompt import SharedPrompt
from dpu_service.channel.rings import Sampling
from dpu_service.sequences.health import HeartbeatWatch
from dpu_service.transport.base import Range, TransportError
from tests.fuzz.inputs import Choices

SIZES = arena.Sizes(channels=1, submit_slots=8, cancel_slots=4, log_slots=16, heap_tokens=128)
INBOUND, OUTBOUND = arena.InboundLayout(SIZES), arena.OutboundLayout(SIZES)
VOCABULARY, MAX_TOKENS, TURNS = 100, 12, 64
WORDS = ("log_written", "submit_read", "cancel_read", "log_start", "lease", "live")


class Memory:
    """The arena as plain bytes (see transport/base.py)."""

    def __init__(self) -> None:
        self.inbound, self.outbound = bytearray(INBOUND.total_bytes), bytearray(OUTBOUND.total_bytes)

    def write(self, offset: int, payload: bytes) -> None:
        if not 0 <= offset <= offset + len(payload) <= len(self.inbound):
            raise TransportError("outside the region")
        self.inbound[offset : offset + len(payload)] = payload

    def commit(self, offset: int, word: int) -> None:
        self.write(offset, word.to_bytes(8, "little"))

    def read(self, offset: int, size: int) -> bytes:
        if not 0 <= offset <= offset + size <= len(self.outbound):
            raise TransportError("outside the region")
        return bytes(self.outbound[offset : offset + size])

    def fetch(self, *ranges: Range) -> int:
        for one in ranges:
            self.read(*one)
        return 0

    def fetched(self, ticket: int) -> bool:
        return True

    @property
    def descriptor(self) -> int | None:
        return None

    def flush(self, timeout: float) -> None: ...

    def close(self) -> None: ...


def one(data: bytes) -> None:
    """One input.

    Raises:
        Exception: a fault was found.
    """
    choices, memory = Choices(data), Memory()
    if choices.below(16) == 15:
        _any_header(choices, memory)
        return
    device = _Device(choices, memory)
    client = ChannelClient(memory, device.geometry, 0)
    client.ask_lease(1)
    device.accept()
    assert client.take_lease()
    _play(client, device)


def _any_header(choices: Choices, memory: Memory) -> None:
    memory.outbound[:] = choices.take(len(memory.outbound))
    try:
        ChannelClient(memory, _Device(choices, memory, with_header=False).geometry, 0)
    except ChannelError:
        return
    raise AssertionError("an arena that nobody made was taken")


class _Device:
    """Writes what the choices say; most records and words are nearly right, so that they get far."""

    def __init__(self, choices: Choices, memory: Memory, with_header: bool = True) -> None:
        self._choices, self._memory = choices, memory
        self._log = OUTBOUND.channel_offset(0) + OUTBOUND.channel_log_offset
        self._out = np.frombuffer(memory.outbound, arena.ChannelOut, 1, OUTBOUND.channel_offset(0)).reshape(())
        self.next = 0
        fields = {name: getattr(SIZES, name) for name in ("channels", "submit_slots", "cancel_slots", "log_slots")}
        self.geometry = Geometry(
            **fields,
            heap_tokens=SIZES.heap_tokens,
            layout_hash=arena.LAYOUT_HASH,
            version=arena.VERSION,
            inbound_bytes=INBOUND.total_bytes,
            outbound_bytes=OUTBOUND.total_bytes,
            nonce=7,
            epoch=1,
            vocab_size=VOCABULARY,
            max_model_tokens=64,
            max_sequence_tokens=64,
        )
        if with_header:
            self._write_header()

    def accept(self) -> None:
        """Takes the lease."""
        self._out["lease"], self._out["live"] = 1, 1

    @property
    def choices_left(self) -> bool:
        """Whether anything is still to come."""
        return self._choices.left

    def pick(self, limit: int) -> int:
        """A choice for the front end's own part."""
        return self._choices.below(limit)

    def act(self) -> None:
        """One thing that a device may do, or should not."""
        kind = self._choices.below(16)
        if kind < 9:
            self._say(right_lap=True)
        elif kind < 10:
            self._say(right_lap=False)
        elif kind < 12:
            self._out["submit_read"] += np.uint64(self._choices.below(3))
        elif kind < 13:
            self._out["cancel_read"] += np.uint64(self._choices.below(2))
        elif kind < 14:
            page = OUTBOUND.telemetry_offset
            self._memory.outbound[page : page + arena.Telemetry.itemsize] = self._choices.take(arena.Telemetry.itemsize)
        else:
            self._any_word()

    def _say(self, right_lap: bool) -> None:
        choices = self._choices
        lap = 1 + self.next // SIZES.log_slots % 0xFFFF if right_lap else choices.below(1 << 16)
        if choices.below(8) == 7:
            head, body = choices.below(1 << 64) & ~0xFFFF | lap, choices.below(1 << 64) & ~0xFFFF | lap
        else:
            head = arena.pack_token_head(lap, choices.below(8), choices.below(8), choices.below(8))
            body = arena.pack_token_body(lap, choices.below(4), choices.below(VOCABULARY + 2))
        at = self._log + self.next % SIZES.log_slots * arena.TokenRecord.itemsize
        record = np.frombuffer(self._memory.outbound, arena.TokenRecord, 1, at).reshape(())
        record["head"], record["body"] = head, body
        self.next += 1
        self._out["log_written"] = self.next

    def _any_word(self) -> None:
        self._out[WORDS[self._choices.below(len(WORDS))]] = self._choices.below(1 << 64)

    def _write_header(self) -> None:
        header = np.frombuffer(self._memory.outbound, arena.ArenaHeader, 1, OUTBOUND.header_offset).reshape(())
        header["magic"], header["byte_order"] = arena.MAGIC, arena.BYTE_ORDER_MARK
        for name in self.geometry.__struct_fields__:
            header[name] = getattr(self.geometry, name)
        header["block_tokens"] = 2


def _play(client: ChannelClient, device: _Device) -> None:
    got: dict[int, int] = {}
    for _ in range(TURNS):
        if not device.choices_left:
            break
        _use(client, device)
        device.act()
        client.fetch()
        try:
            news = client.poll()
        except (ChannelError, LeaseLostError):
            break
        _check(client, news, got)
    telemetry = client.telemetry()
    HeartbeatWatch(10.0, 0.0).judge(telemetry, 1.0)
    assert list(metrics.Page([metrics.Device(telemetry, True, False, 0.0)]).collect())


def _use(client: ChannelClient, device: _Device) -> None:
    kind = device.pick(8)
    if kind < 2:
        sampling = Sampling(MAX_TOKENS, logprobs=device.pick(4))
        bans = ((1, 2),) if device.pick(2) else ()
        client.submit(SharedPrompt([1, 2, 3], 1, bias=((1, 0.5),), bans=bans), sampling)
    elif kind == 2:
        client.cancel(device.pick(8))


def _check(client: ChannelClient, news: list[News], got: dict[int, int]) -> None:
    assert client.state is LeaseState.LIVE
    assert len(news) <= SIZES.log_slots
    assert client.tracked <= SIZES.heap_tokens // 5, "each holds its prompt of 3 tokens and a bias entry in the heap"
    for item in news:
        got[item.position] = got.get(item.position, 0) + len(item.tokens)
        assert got[item.position] <= MAX_TOKENS
        assert all(0 <= token < VOCABULARY for token in item.tokens)
        assert item.cached in (0, 2), "of a prompt of three tokens in blocks of two"
        assert item.finish in Finish
        assert item.fault or item.kind in (RecordKind.TOKEN, RecordKind.END, RecordKind.REJECT)
        for logprobs in item.logprobs:
            assert all(0 <= one.token < VOCABULARY for one in logprobs)
