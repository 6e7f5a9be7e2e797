"""A front-end worker of one channel, well-behaved or not, that writes the inbound region word by word."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from random import Random

import numpy as np

from blink_proto import arena
from blink_proto.arena import Finish, RecordKind
from tests.property.limits import Inbound, Limits, Outbound

TEXTS = 2


def text(which: int, length: int, vocab_size: int) -> list[int]:
    """The beginning of one of a few long texts, whose beginnings many prompts are."""
    rng = Random(which)
    return [rng.randrange(1 << 20) % vocab_size for _ in range(length)]


def next_in_text(tokens: list[int], limits: Limits) -> int | None:
    """The token with which a text goes on whose beginning this is."""
    for which in range(TEXTS):
        whole = text(which, len(tokens) + 1, limits.vocab_size)
        if whole[:-1] == tokens:
            return whole[-1]
    return None


@dataclass
class Ledger:
    """What a worker has read about one submission."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[list[tuple[int, int, int]]] = field(default_factory=list)
    """For each token the (token, bits, rank) of its LOGPROB records."""
    prompt: list[int] = field(default_factory=list)
    """Tokens of the prompt that were scored."""
    prompt_logprobs: list[list[tuple[int, int, int]]] = field(default_factory=list)
    last: tuple[int, int, int] | None = None
    """(kind, finish, detail) of the last record."""

    def add(self, kind: int, finish: int, detail: int, token: int) -> None:
        """Takes a record in; it must be possible after those before it."""
        assert self.last is None, "a record after the sequence's last one"
        if kind == RecordKind.TOKEN:
            assert detail == 0 or not self.tokens, "blocks found with a later token than the first"
            assert finish in (Finish.NONE, Finish.STOP, Finish.LENGTH)
            self.tokens.append(token)
            self.logprobs.append([])
        elif kind == RecordKind.PROMPT_TOKEN:
            assert (detail, finish) == (0, Finish.NONE)
            assert not self.tokens, "a token of the prompt after one of the answer"
            self.prompt.append(token)
            self.prompt_logprobs.append([])
        else:
            assert token == 0
            assert finish in (Finish.CANCELLED, Finish.ERROR) or (finish == Finish.LENGTH and not self.tokens)
            assert (detail != 0) == (finish == Finish.ERROR)
            assert kind == RecordKind.END or (kind == RecordKind.REJECT and not self.tokens and not self.prompt)
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
        self.submit_position = 0
        self.cancel_position = 0
        self.first_position = 0
        self.read_position = 0
        self.ledgers: dict[int, Ledger] = {}
        self.last_token: list[list[tuple[int, int, int]]] | None = None
        """Where LOGPROB records belong."""

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
        if not self.muted:
            at = self.inbound.control_at(self.channel, "heartbeat")
            self.inbound.words[at] = (self.inbound.words[at] + 1) & (2**64 - 1)

    def after_step(self) -> None:
        """Starts from where the scheduler says once the lease is granted; sees what a wrong cursor gave away."""
        if self.asked and self.out("live") == 1 and self.out("lease") == self.lease:
            self.asked = self.skipped = False
            self.first_position = self.submit_position = self.out("submit_read")
            self.cancel_position = self.out("cancel_read")
            self.read_position = self.out("log_start")
            self.ledgers, self.last_token = {}, None
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
        self.write_prompt(offset, self._prompt(rng, prompt))
        record = np.zeros((), arena.SubmitRecord)
        record["prompt_offset"], record["prompt_tokens"] = offset, prompt
        record["max_tokens"] = rng.randint(1, max(1, room - prompt if long else min(8, room - prompt)))
        record["temperature"] = rng.choice([0, -0.0, 0.5, 1, 100])
        record["top_p"] = rng.choice([1, 0.5, 1e-6])
        record["top_k"] = rng.choice([0, 1, 40, 2**32 - 1])
        record["seed"] = rng.getrandbits(64)
        record["flags"] = rng.randrange(2)
        record["cache_salt"] = rng.choice([0] * 8 + [1, 2**64 - 1])
        record["priority"] = rng.choice([0, 0, 0, 1, -1, 2**31 - 1, -(2**31)])
        record["stop_count"] = count = rng.choice([0, 0, 1, 8])
        record["stop_tokens"] = [rng.randrange(limits.vocab_size) for _ in range(count)] + [2**32 - 1] * (8 - count)
        if rng.random() < 0.4:
            self._add_extras(record, rng)
        if record["logprobs"] and rng.random() < 0.6:
            self._score_prompt(record, rng)
        return record

    def _prompt(self, rng: Random, length: int) -> list[int]:
        """Often the beginning of a text, sometimes with another end."""
        vocab = self.limits.vocab_size
        same = rng.choice([0, length, length, length, rng.randint(0, length)])
        return text(rng.randrange(TEXTS), same, vocab) + [rng.randrange(vocab) for _ in range(length - same)]

    def _score_prompt(self, record: np.ndarray, rng: Random) -> None:
        """Wants the prompt's log-probabilities too, or nothing else."""
        record["flags"] = int(record["flags"]) | arena.SubmitFlag.PROMPT_LOGPROBS
        record["logprobs"] = min(int(record["logprobs"]), rng.choice([1, 2, 22]))
        if record["prompt_tokens"] > 1 and record["logprobs"] + 2 <= self.limits.log_slots and rng.random() < 0.5:
            record["max_tokens"] = record["min_tokens"] = 0

    def _add_extras(self, record: np.ndarray, rng: Random) -> None:
        """What few submissions ask for; bias and bans go behind the prompt, or before it, where they have room."""
        limits = self.limits
        record["min_p"] = rng.choice([0, 0.25, 1])
        record["repetition_penalty"] = rng.choice([0, 1, 1.5, 100])
        record["presence_penalty"] = rng.choice([0, -2, 2])
        record["frequency_penalty"] = rng.choice([0, -0.5, 2])
        record["min_tokens"] = rng.choice([0, 1, int(record["max_tokens"])])
        most = min(arena.MAX_TOP_LOGPROBS + 1, limits.vocab_size + 1, limits.log_slots - 1)
        record["logprobs"] = rng.choice([0, min(1, most), rng.randint(0, most)])
        behind = int(record["prompt_offset"] + record["prompt_tokens"])
        place = behind if rng.random() < 0.7 else 0
        room = limits.heap_tokens - behind if place else int(record["prompt_offset"])
        count = rng.randint(0, min(4, room // 2, limits.vocab_size))
        record["bias_offset"], record["bias_count"] = place, count
        if count and rng.random() < 0.3:
            record["flags"] = int(record["flags"]) | arena.SubmitFlag.ALLOW_ONLY
        tokens = sorted(rng.sample(range(limits.vocab_size), count))
        self.write_bias(place, [(token, rng.choice([1.5, -100, -np.inf, 3e38])) for token in tokens])
        bans = self._bans(rng, room - 2 * count)
        record["ban_words"] = self.write_bans(place + 2 * count, bans)

    def _bans(self, rng: Random, room: int) -> list[list[int]]:
        """Up to three banned sequences, each of up to four tokens."""
        bans: list[list[int]] = []
        for _ in range(rng.choice([0, 0, 1, 3])):
            length = rng.randint(2, 4)
            room -= 1 + length
            bans += [[rng.randrange(self.limits.vocab_size) for _ in range(length)]] if room >= 0 else []
        return bans

    def write_bans(self, offset: int, bans: list[list[int]]) -> int:
        """Writes banned sequences into the heap; their words."""
        words = [word for tokens in bans for word in (arena.BAN_LENGTH + len(tokens), *tokens)]
        self.write_prompt(offset, words)
        return len(words)

    def write_bias(self, offset: int, entries: list[tuple[int, float]]) -> None:
        """Writes bias entries into the heap."""
        words = [word for token, value in entries for word in (token, *struct.unpack("<I", struct.pack("<f", value)))]
        self.write_prompt(offset, words)

    def bad_record(self, rng: Random, which: int) -> np.ndarray:
        """A submission with one or two faults, each at its limit or far beyond it."""
        record = self.good_record(rng, long=False)
        for fault in (which, rng.randrange(16)) if rng.random() < 0.3 else (which,):
            self._spoil(record, rng, fault % 13)
        return record

    def _spoil(self, record: np.ndarray, rng: Random, fault: int) -> None:
        limits, far = self.limits, 2**32 - 1
        offset, prompt = int(record["prompt_offset"]), int(record["prompt_tokens"])
        if fault == 0:
            record["flags"] = rng.choice([8, 15, 2**31, far])
        elif fault == 2:
            record["prompt_tokens"] = rng.choice([0, limits.heap_tokens - offset + 1, far, (far - offset + 1) & far])
        elif fault == 3:
            record["max_tokens"] = 0
            record["prompt_tokens"] = rng.choice([1, prompt])
        elif fault == 4:
            record["max_tokens"] = rng.choice(
                [(limits.max_model_tokens - prompt + 1) & far, far, (far - prompt + 1) & far]
            )
        elif fault == 5:
            most = min(limits.blocks - 1, limits.blocks_per_sequence) * limits.block_tokens
            record["max_tokens"] = max(1, most + 2 - prompt)
        elif fault == 6:
            name = rng.choice(["temperature", "top_p", "min_p", "repetition_penalty"])
            name = rng.choice([name, "presence_penalty", "frequency_penalty"])
            record[name] = rng.choice([np.nan, np.inf, -np.inf, -1e-9, 1.001, 2.001, -2.001, 100.01, 0, 1e-45])
        elif fault == 7:
            record["stop_count"] = rng.choice([1, 8, 9, far])
            record["stop_tokens"][rng.randrange(8)] = rng.choice([limits.vocab_size, far])
        elif fault == 8:
            record["min_tokens"] = rng.choice([(int(record["max_tokens"]) + 1) & far, far])
        elif fault == 9:
            record["logprobs"] = rng.choice([limits.log_slots - 1, limits.log_slots, limits.vocab_size + 2, 22, far, 0])
            record["flags"] = rng.choice([int(record["flags"]), arena.SubmitFlag.PROMPT_LOGPROBS])
        elif fault == 10:
            self._spoil_bias(record, rng)
        elif fault in (1, 11):
            self._spoil_bans(record, rng)
        else:
            where = offset + rng.randrange(max(1, min(prompt, limits.heap_tokens)))
            self.write_prompt(where, [rng.choice([limits.vocab_size, far, 2**31])])

    def _spoil_bias(self, record: np.ndarray, rng: Random) -> None:
        limits, far = self.limits, 2**32 - 1
        count = rng.randint(1, max(1, min(4, limits.heap_tokens // 2)))
        record["bias_offset"], record["bias_count"] = 0, count
        entries = [(token % limits.vocab_size, rng.choice([1.0, -np.inf])) for token in range(count)]
        which = rng.randrange(6)
        if which == 0:
            record["bias_offset"] = rng.choice([limits.heap_tokens - 2 * count + 1, far, far - 2 * count + 1]) & far
        elif which == 1:
            record["bias_count"] = rng.choice([1025, limits.heap_tokens // 2 + 1, 2**31, far])
        elif which == 2:
            record["bias_count"], record["flags"] = 0, 2
        elif which == 3:
            entries[rng.randrange(count)] = (0, rng.choice([np.nan, np.inf]))
        elif which == 4:
            entries[-1] = (rng.choice([limits.vocab_size, far]), 1.0)
        else:
            record["bias_count"] = count = min(4, limits.heap_tokens // 2)
            entries = [(0, 1.0)] * count
        self.write_bias(0, entries)

    def _spoil_bans(self, record: np.ndarray, rng: Random) -> None:
        """Without bias entries, so that nothing else is wrong with what stands there."""
        limits, far, length = self.limits, 2**32 - 1, arena.BAN_LENGTH
        token, beyond = limits.vocab_size - 1, rng.choice([limits.vocab_size, 2**31 - 1])
        record["bias_count"], record["flags"] = 0, int(record["flags"]) & ~arena.SubmitFlag.ALLOW_ONLY
        words = rng.choice(
            [
                [token, token, token],
                [length + 1, token],
                [length, length + 2, token, token],
                [length + 3, token, token],
                [length + 2, token, token, token],
                [length + 5, token, token, length + 2, token, token],
                [length + 2, token, token, length + 2, token],
                [far, token, token],
                [length + 2, beyond, token],
                [length + 2, token, beyond],
            ]
        )[: limits.heap_tokens]
        record["bias_offset"], record["ban_words"] = 0, len(words)
        self.write_prompt(0, words)
        which = rng.randrange(4)
        if which == 0:
            record["ban_words"] = rng.choice([1025, limits.heap_tokens + 1, 2**31, far])
        elif which == 1:
            record["bias_offset"] = rng.choice([limits.heap_tokens - len(words) + 1, far, far - len(words) + 1]) & far

    # cancels

    def cancel(self, target: int, lap_shift: int = 0) -> None:
        """Writes and commits a cancel record when the ring has room."""
        if self.cancel_position - self.out("cancel_read") < self.limits.cancel_slots:
            self.write_cancel(self.cancel_position, target, lap_shift)
            self.cancel_position += lap_shift == 0

    def write_cancel(self, position: int, target: int, lap_shift: int = 0, lease_shift: int = 0) -> None:
        """Writes and commits a cancel record, by a shift with a wrong word."""
        at = self.inbound.cancel_at(self.channel, position)
        lap = 1 + position // self.limits.cancel_slots % (2**32 - 1) + lap_shift
        word = arena.pack_commit_word(lap, self.lease + lease_shift)
        self.inbound.view[at : at + 16] = struct.pack("<QQ", target & (2**64 - 1), word)

    # what an earlier holder may leave

    def plant(self, records: list[np.ndarray], ahead: int) -> None:
        """Writes submissions, and as many cancels of them, where the scheduler reads next, under a lease to come."""
        submissions, cancels = self.out("submit_read"), self.out("cancel_read")
        for index, record in enumerate(records):
            self.write_record(record, submissions + index)
            self.commit(submissions + index, lease_shift=ahead)
            self.write_cancel(cancels + index, submissions + index, lease_shift=ahead)

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
        if self.skipped:
            return
        if kind == RecordKind.LOGPROB:
            assert self.last_token is not None, "log-probabilities of no token"
            _, _, rank_low, bits = arena.unpack_logprob_head(head)
            self.last_token[-1].append((token, bits, detail << 8 | rank_low))
            return
        assert self.first_position <= sequence < self.out("submit_read")
        ledger = self.ledgers.setdefault(sequence, Ledger())
        ledger.add(kind, finish, detail, token)
        places = {RecordKind.TOKEN: ledger.logprobs, RecordKind.PROMPT_TOKEN: ledger.prompt_logprobs}
        self.last_token = places.get(RecordKind(kind))

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
