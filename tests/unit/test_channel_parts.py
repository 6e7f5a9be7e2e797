"""Prompt heap, rings and token log, each alone."""

from __future__ import annotations

import random
import struct

import numpy as np
import pytest

from blink_proto import arena
from blink_proto.arena import Finish, RecordKind
from dpu_service.channel.errors import ChannelError
from dpu_service.channel.faults import fault_of
from dpu_service.channel.heap import PromptHeap
from dpu_service.channel.log import Record, TokenLog
from dpu_service.channel.rings import Ring, Sampling, cancel_payload, submit_payload


class Memory:
    """A transport over two byte arrays."""

    def __init__(self, inbound: int, outbound: int) -> None:
        self.inbound, self.outbound = bytearray(inbound), bytearray(outbound)
        self.order: list[tuple[str, int]] = []

    def write(self, offset: int, payload: bytes) -> None:
        self.inbound[offset : offset + len(payload)] = payload
        self.order.append(("write", offset))

    def commit(self, offset: int, word: int) -> None:
        self.inbound[offset : offset + 8] = word.to_bytes(8, "little")
        self.order.append(("commit", offset))

    def read(self, offset: int, size: int) -> bytes:
        return bytes(self.outbound[offset : offset + size])

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


def test_heap_never_hands_out_a_token_twice() -> None:
    chance = random.Random(1)
    heap, owner = PromptHeap(500), [0] * 500
    held: dict[int, int] = {}
    for turn in range(1, 5000):
        if held and chance.random() < 0.5:
            start = chance.choice(list(held))
            for at in range(start, start + held.pop(start)):
                owner[at] = 0
            heap.free(start)
            continue
        size = chance.randint(1, 120)
        start = heap.allocate(size)
        if start is None:
            longest = max(map(len, "".join("x" if o else " " for o in owner).split("x")))
            assert longest < size, "a hole was large enough"
            continue
        assert not any(owner[start : start + size])
        owner[start : start + size] = [turn] * size
        held[start] = size
    for start in held:
        heap.free(start)
    assert heap.allocate(500) == 0


def test_heap_takes_the_first_hole_and_joins_neighbours() -> None:
    heap = PromptHeap(10)
    a, b, c = heap.allocate(3), heap.allocate(3), heap.allocate(3)
    assert (a, b, c) == (0, 3, 6)
    assert heap.allocate(2) is None
    heap.free(0)
    heap.free(6)
    assert heap.allocate(4) == 6
    heap.free(3)
    assert heap.allocate(6) == 0
    assert heap.used_tokens == 10
    with pytest.raises(KeyError):
        heap.free(4)


def test_a_record_is_committed_after_its_payload_with_lap_and_lease() -> None:
    memory = Memory(4 * 16, 0)
    ring = Ring(memory, 0, 4, 16)
    ring.start(5, lease=9)
    for target in range(5, 9):
        assert ring.append(cancel_payload(target)) == target
    assert memory.order[:2] == [("write", 16), ("commit", 24)]
    words = [int.from_bytes(memory.inbound[i * 16 + 8 : i * 16 + 16], "little") for i in range(4)]
    # positions 8, 5, 6, 7 lie in slots 0 to 3; laps by hand: 1 + 8 // 4 = 3 and 1 + 5 // 4 = 2
    assert words == [9 << 32 | 3, 9 << 32 | 2, 9 << 32 | 2, 9 << 32 | 2]
    assert not ring.has_room(5)
    assert ring.has_room(6)


def test_submit_payload_fields() -> None:
    sampling = Sampling(7, 0.5, 0.25, 40, -1, (3, 4), ignore_eos=True)
    raw = submit_payload(100, 20, sampling)
    assert len(raw) == 120
    assert raw[:16] == b"".join(n.to_bytes(4, "little") for n in (100, 20, 7, 40))
    assert raw[24:32] == b"\xff" * 8
    assert raw[32:40] == b"\x01\0\0\0\x02\0\0\0"
    assert raw[40:48] == b"\x03\0\0\0\x04\0\0\0"
    assert raw[76:80] == struct.pack("<f", 1)
    assert not any(raw[48:76] + raw[80:])


def test_a_submission_is_the_contracts_record() -> None:
    """Every field, each with a value of its own, as numpy reads it by the contract's description."""
    plain = {"max_tokens": 3, "temperature": 0.5, "top_p": 0.25, "top_k": 4, "seed": 5, "min_p": 0.125, "min_tokens": 7}
    plain |= {"repetition_penalty": 1.5, "presence_penalty": 2.5, "frequency_penalty": -1.0, "logprobs": 8}
    plain |= {"priority": -9, "cache_salt": 1 << 60}
    raw = submit_payload(100, 20, Sampling(stop_tokens=tuple(range(30, 38)), **plain), 11, 12)
    (found,) = np.frombuffer(raw + bytes(8), arena.SubmitRecord)
    derived = {"prompt_offset": 100, "prompt_tokens": 20, "flags": 0, "stop_count": 8, "bias_count": 11}
    derived |= {"ban_words": 12, "bias_offset": 120, "commit": 0}
    assert found["stop_tokens"].tolist() == list(range(30, 38))
    assert {name: found[name] for name in arena.SubmitRecord.names if name != "stop_tokens"} == plain | derived


def test_submit_payload_of_what_few_ask_for() -> None:
    sampling = Sampling(
        7,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-1,
        frequency_penalty=2,
        min_tokens=3,
        allow_only=True,
        logprobs=21,
        priority=-2,
    )
    raw = submit_payload(100, 20, sampling, bias_count=6, ban_words=9)
    assert raw[32:36] == b"\x02\0\0\0"
    assert submit_payload(0, 2, Sampling(0, logprobs=1, prompt_logprobs=True))[32:36] == b"\x04\0\0\0"
    assert raw[72:104] == struct.pack("<ffffIIII", 0.25, 1.5, -1, 2, 21, 120, 6, 3)
    assert raw[104:108] == struct.pack("<i", -2)
    assert raw[108:112] == struct.pack("<I", 9)
    assert not any(raw[112:])
    assert submit_payload(100, 20, sampling, ban_words=3)[92:100] == struct.pack("<II", 120, 0)


def record(lap: int, kind: int, finish: int, sequence: int, token: int) -> bytes:
    head = lap | kind << 16 | finish << 24 | sequence << 32
    return head.to_bytes(8, "little") + (lap | token << 32).to_bytes(8, "little")


def test_log_reads_across_the_end_of_the_ring() -> None:
    memory = Memory(0, 4 * 16)
    for position in range(2, 6):
        at = position % 4 * 16
        memory.outbound[at : at + 16] = record(1 + position // 4, 1, 0, 10 + position, position)
    log = TokenLog(memory, 0, 4, start=2)
    assert log.read(6) == [Record(10 + p, 1, 0, 0, p) for p in range(2, 6)]
    assert log.position == 6
    assert log.read(6) == []


@pytest.mark.parametrize("word", [0, 8])
def test_log_stops_at_a_torn_record_and_takes_it_later(word: int) -> None:
    memory = Memory(0, 4 * 16)
    for position in range(3):
        memory.outbound[position * 16 : position * 16 + 16] = record(1, 1, 0, position, 5)
    whole = bytes(memory.outbound)
    memory.outbound[16 + word : 16 + word + 8] = bytes(8)
    log = TokenLog(memory, 0, 4, start=0)
    assert [r.sequence for r in log.read(3)] == [0]
    assert log.read(3) == []
    memory.outbound[:] = whole
    assert [r.sequence for r in log.read(3)] == [1, 2]


def test_laps_of_the_log_wrap_without_ever_being_zero() -> None:
    memory = Memory(0, 2 * 16)
    position = 2 * 65535 - 1  # the last one of lap 65535; the next one has lap 1 again
    memory.outbound[16:32] = record(65535, 1, 0, 1, 1)
    memory.outbound[0:16] = record(1, 1, 0, 2, 2)
    log = TokenLog(memory, 0, 2, start=position)
    assert [r.sequence for r in log.read(position + 2)] == [1, 2]


@pytest.mark.parametrize("written", [0, 7, 1 << 63])
def test_impossible_log_positions(written: int) -> None:
    log = TokenLog(Memory(0, 64), 0, 4, start=1)
    with pytest.raises(ChannelError):
        log.read(written)
    with pytest.raises(ChannelError):
        log.read_plain(written)


TOKENS = [(1, 1, 0, 7, 30), (1, 1, 0, 0xFFFF_FFFF, 0xFFFF_FFFE), (1, 1, 0, 8, 31)]
"""Lap, kind, finish, sequence and token."""


def test_plain_tokens_are_read_the_quick_way() -> None:
    memory = Memory(0, 4 * 16)
    memory.outbound[:48] = b"".join(record(*one) for one in TOKENS)
    log = TokenLog(memory, 0, 4, start=0)
    assert log.read_plain(2) == ([7, 0xFFFF_FFFF], [30, 0xFFFF_FFFE])
    assert log.read_plain(3) == ([8], [31])
    assert log.position == 3
    assert log.read_plain(3) is None


@pytest.mark.parametrize("at", range(3))
@pytest.mark.parametrize(
    "odd", [(1, 2, 2, 7, 0), (1, 1, 1, 7, 30), (1, 1, 0, 7, 30), (2, 1, 0, 7, 30), (0, 0, 0, 0, 0)]
)
def test_what_is_not_plain_is_left(odd: tuple[int, ...], at: int) -> None:
    """Another kind, a last token, words of two laps, of another lap, and nothing yet."""
    records = [record(*one) for one in TOKENS]
    records[at] = record(*odd) if odd != TOKENS[0] else record(1, 1, 0, 7, 30)[:8] + record(2, 1, 0, 7, 30)[8:]
    memory = Memory(0, 4 * 16)
    memory.outbound[:48] = b"".join(records)
    log = TokenLog(memory, 0, 4, start=0)
    assert log.read_plain(3) is None
    assert log.position == 0


def test_records_on_both_sides_of_the_ring_s_end_are_left() -> None:
    memory = Memory(0, 4 * 16)
    log = TokenLog(memory, 0, 4, start=2)
    for position in range(2, 6):
        at = position % 4 * 16
        memory.outbound[at : at + 16] = record(1 + position // 4, 1, 0, position, position)
    assert log.read_plain(6) is None
    assert log.read_plain(4) == ([2, 3], [2, 3])
    assert log.read_plain(6) == ([4, 5], [4, 5])


@pytest.mark.parametrize(
    ("bad", "left"),
    [
        (Record(0, RecordKind.TOKEN, Finish.NONE, 0, 100), 5),
        (Record(0, RecordKind.TOKEN, Finish.NONE, 0, 1), 0),
        (Record(0, RecordKind.TOKEN, 9, 0, 1), 5),
        (Record(0, 7, Finish.STOP, 0, 1), 5),
        (Record(0, RecordKind.END, Finish.NONE, 0, 0), 5),
        (Record(0, RecordKind.END, Finish.STOP, 0, 0), 5),
        (Record(0, RecordKind.REJECT, Finish.LENGTH, 0, 0), 5),
        (Record(0, RecordKind.PROMPT_TOKEN, Finish.LENGTH, 0, 0), 5),
    ],
)
def test_impossible_records_are_faults(bad: Record, left: int) -> None:
    assert fault_of(bad, vocab_size=100, tokens_left=left)
    assert not fault_of(Record(0, RecordKind.TOKEN, Finish.STOP, 0, 99), 100, 1)


def test_kinds_cover_the_contract() -> None:
    assert {kind.name for kind in arena.RecordKind} == {"TOKEN", "END", "REJECT", "LOGPROB", "PROMPT_TOKEN"}
