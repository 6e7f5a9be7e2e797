"""A front-end worker of one channel, well-behaved or not, that writes the inbound region word by word."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from random import Random

import numpy as np

from blink_proto import arena
from blink_proto.arena import Finish, RecordKind
from tests.property.limits import Inbound, Limits, Outbound


@dataclass
class Ledger:
    """What a worker has read about one submission."""

    tokens: list[int] = field(default_factory=list)
    last: tuple[int, int, int] | None = None
    """(kind, finish, detail) of the last record."""

    def add(self, kind: int, finish: int, detail: int, token: int) -> None:
        """Takes a record in; it must be possible after those before it."""
        assert self.last is None, "a record after the sequence's last one"
        if kind == RecordKind.TOKEN:
            assert detail == 0
            assert finish in (Finish.NONE, Finish.STOP, Finish.LENGTH)
            self.tokens.append(token)
        else:
            assert token == 0
            assert finish in (Finish.CANCELLED, Finish.ERROR)
            assert (detail != 0) == (finish == Finish.ERROR)
            assert kind == RecordKind.END or (kind == RecordKind.REJECT and not self.tokens)
        if finish != Finish.NONE:
            self.last = (kind, finish, detail)


class Worker:
    """One channel's worker. It keeps its own positions, as a worker must."""

    def __init__(self, limits: Limits, inbound: Inbound, outbound: Outbound, channel: int) -> None:
        self.limits, self.inbound, self.outbound, self.channel = limits, inbound, outbound, channel
        self.lease = 0
        self.asked = False
        self.muted = False
        self.skipped = False
        """Some records of this lease were given away by a wrong cursor."""
        self.submit_read_before = 0
        self.submit_position = 0
        self.cancel_position = 0
        self.first_position = 0
        self.read_position = 0
        self.ledgers: dict[int, Ledger] = {}

    def _set(self, name: str, value: int) -> None:
        self.inbound.words[self.inbound.control_at(self.channel, name)] = value & (2**64 - 1)

    def out(self, name: str) -> int:
        """A word that the scheduler wrote for this channel."""
        return self.outbound.control(self.channel, name)

    @property
    def live(self) -> bool:
        """Whether the channel is this worker's."""
        return not self.asked and self.lease != 0 and self.out("live") == 1 and self.out("lease") == self.lease

    # leases

    def ask(self) -> None:
        """Asks for the next lease."""
        self.lease = self.out("lease") + 1
        self.asked, self.muted = True, False
        self.submit_position, self.cancel_position = self.out("submit_read"), self.out("cancel_read")
        self._set("lease", self.lease)

    def write_lease(self, word: int) -> None:
        """Writes any lease word."""
        self._set("lease", word)

    def before_step(self) -> None:
        """One heartbeat, unless muted."""
        self.submit_read_before = self.out("submit_read")
        if not self.muted:
            at = self.inbound.control_at(self.channel, "heartbeat")
            self.inbound.words[at] = (self.inbound.words[at] + 1) & (2**64 - 1)

    def after_step(self) -> None:
        """Starts from where the scheduler says once the lease is granted; sees what a wrong cursor gave away."""
        if self.asked and self.out("live") == 1 and self.out("lease") == self.lease:
            self.asked = self.skipped = False
            self.first_position = self.submit_read_before
            self.read_position = self.out("log_start")
            self.ledgers = {}
        word = self.inbound.words[self.inbound.control_at(self.channel, "log_read")]
        if self.live and self.read_position < word <= self.out("log_written"):
            self.read_position, self.skipped = word, True

    # submissions

    def write_prompt(self, offset: int, tokens: list[int]) -> None:
        """Writes into the heap, wrapping."""
        base = self.inbound.heap_at(self.channel)
        for index, token in enumerate(tokens):
            self.inbound.halves[base + (offset + index) % self.limits.heap_tokens] = token

    def write_record(self, record: np.ndarray, position: int) -> None:
        """Writes a submission without its commit word."""
        at = self.inbound.submit_at(self.channel, position)
        self.inbound.view[at : at + 120] = record.tobytes()[:120]

    def commit(self, position: int, lap_shift: int = 0, lease_shift: int = 0) -> None:
        """Writes a submission's commit word, by a shift the wrong one."""
        lap = 1 + position // self.limits.submit_slots % (2**32 - 1) + lap_shift
        at = self.inbound.submit_at(self.channel, position) + 120
        self.inbound.words[at // 8] = arena.pack_commit_word(lap, self.lease + lease_shift)

    def submit(self, record: np.ndarray) -> None:
        """Writes and commits a submission when the ring has room."""
        if self.submit_position - self.out("submit_read") < self.limits.submit_slots:
            self.write_record(record, self.submit_position)
            self.commit(self.submit_position)
            self.submit_position += 1

    def good_record(self, rng: Random, long: bool) -> np.ndarray:
        """A valid submission; its prompt is written to the heap."""
        limits = self.limits
        room = min(limits.max_model_tokens, 1 + (limits.blocks - 1) * limits.block_tokens)
        room = min(room, 1 + limits.blocks_per_sequence * limits.block_tokens)
        most = max(1, room - 1 if long else min(6, room - 1))
        prompt = rng.randint(1, min(most, limits.heap_tokens))
        offset = rng.randint(0, limits.heap_tokens - prompt)
        self.write_prompt(offset, [rng.randrange(limits.vocab_size) for _ in range(prompt)])
        record = np.zeros((), arena.SubmitRecord)
        record["prompt_offset"], record["prompt_tokens"] = offset, prompt
        record["max_tokens"] = rng.randint(1, max(1, room - prompt if long else min(8, room - prompt)))
        record["temperature"] = rng.choice([0, -0.0, 0.5, 1, 100])
        record["top_p"] = rng.choice([1, 0.5, 1e-6])
        record["top_k"] = rng.choice([0, 1, 40, 2**32 - 1])
        record["seed"] = rng.getrandbits(64)
        record["flags"] = rng.randrange(2)
        record["stop_count"] = count = rng.choice([0, 0, 1, 8])
        record["stop_tokens"] = [rng.randrange(limits.vocab_size) for _ in range(count)] + [2**32 - 1] * (8 - count)
        return record

    def bad_record(self, rng: Random, which: int) -> np.ndarray:
        """A submission with one or two faults, each at its limit or far beyond it."""
        record = self.good_record(rng, long=False)
        for fault in (which, rng.randrange(16)) if rng.random() < 0.3 else (which,):
            self._spoil(record, rng, fault % 9)
        return record

    def _spoil(self, record: np.ndarray, rng: Random, fault: int) -> None:
        limits, far = self.limits, 2**32 - 1
        offset, prompt = int(record["prompt_offset"]), int(record["prompt_tokens"])
        if fault == 0:
            record["flags"] = rng.choice([2, 3, 2**31, far])
        elif fault == 1:
            record["reserved"][rng.randrange(48)] = rng.randint(1, 255)
        elif fault == 2:
            record["prompt_tokens"] = rng.choice([0, limits.heap_tokens - offset + 1, far, (far - offset + 1) & far])
        elif fault == 3:
            record["max_tokens"] = 0
        elif fault == 4:
            record["max_tokens"] = rng.choice(
                [(limits.max_model_tokens - prompt + 1) & far, far, (far - prompt + 1) & far]
            )
        elif fault == 5:
            most = min(limits.blocks - 1, limits.blocks_per_sequence) * limits.block_tokens
            record["max_tokens"] = max(1, most + 2 - prompt)
        elif fault == 6:
            name = rng.choice(["temperature", "top_p"])
            record[name] = rng.choice([np.nan, np.inf, -np.inf, -1e-9, 1.001, 100.01, 0, 1e-45])
        elif fault == 7:
            record["stop_count"] = rng.choice([1, 8, 9, far])
            record["stop_tokens"][rng.randrange(8)] = rng.choice([limits.vocab_size, far])
        else:
            where = offset + rng.randrange(max(1, min(prompt, limits.heap_tokens)))
            self.write_prompt(where, [rng.choice([limits.vocab_size, far, 2**31])])

    # cancels

    def cancel(self, target: int, lap_shift: int = 0) -> None:
        """Writes and commits a cancel record when the ring has room."""
        if self.cancel_position - self.out("cancel_read") >= self.limits.cancel_slots:
            return
        at = self.inbound.cancel_at(self.channel, self.cancel_position)
        lap = 1 + self.cancel_position // self.limits.cancel_slots % (2**32 - 1) + lap_shift
        word = arena.pack_commit_word(lap, self.lease)
        self.inbound.view[at : at + 16] = struct.pack("<QQ", target & (2**64 - 1), word)
        self.cancel_position += lap_shift == 0

    # reading

    def read(self, most: int) -> list[tuple[int, int]]:
        """Reads at most that many records, checks them and publishes the cursor; (head, body) of each."""
        found: list[tuple[int, int]] = []
        while self.live and len(found) < most and self.read_position < self.out("log_written"):
            head, body = self.outbound.token_record(self.channel, self.read_position)
            self._take(head, body)
            found.append((head, body))
            self.read_position += 1
        if self.live:
            self._set("log_read", self.read_position)
        return found

    def write_log_read(self, word: int) -> None:
        """Writes any read cursor."""
        self._set("log_read", word)

    def _take(self, head: int, body: int) -> None:
        lap = 1 + self.read_position // self.limits.log_slots % 65535
        head_lap, kind, finish, sequence = arena.unpack_token_head(head)
        body_lap, detail, token = arena.unpack_token_body(body)
        assert head_lap == body_lap == lap, "a record was overwritten before it was read"
        assert self.first_position <= sequence < self.out("submit_read")
        if not self.skipped:
            self.ledgers.setdefault(sequence, Ledger()).add(kind, finish, detail, token)

    # noise

    def scribble(self, rng: Random) -> None:
        """Random tokens all over the heap."""
        base = self.inbound.heap_at(self.channel)
        for index in range(self.limits.heap_tokens):
            self.inbound.halves[base + index] = rng.getrandbits(32)

    def noise(self, rng: Random) -> None:
        """Random 8-byte words anywhere in the channel, rings and control words included."""
        size = self.inbound.layout.channel_heap_offset // 8
        base = self.inbound.layout.channel_offset(self.channel) // 8
        for _ in range(rng.randint(1, 8)):
            word = rng.choice([rng.getrandbits(64), rng.getrandbits(8), 0, 2**64 - 1])
            self.inbound.words[base + rng.randrange(size)] = word
