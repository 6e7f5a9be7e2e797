"""A naive twin of the scheduler, written from `gpu_runtime/scheduler/README.md` alone.

Plain lists and integers, one thing at a time, no thought of speed: the oracle that the C++ core is compared with.
It reads the same inbound memory, keeps an outbound region of its own, and comes to the same plans and records.
Which KV block and which table slot a sequence gets is not its business.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from enum import Enum
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from blink_proto import arena
from blink_proto.arena import ErrorCode, Finish, RecordKind
from gpu_runtime.scheduler import layout
from gpu_runtime.scheduler.layout import Command
from tests.property.limits import Inbound, Limits, Outbound

LAP_32 = (1 << 32) - 1
LAP_16 = 65535
MOST_RANK = (1 << 24) - 1

Logprob = tuple[int, int, int]
"""A sampled log-probability: token, bits of the f32, rank."""


class Stage(Enum):
    """Where a sequence stands."""

    WAITING = "taken, no KV blocks"
    RUNNING = "admitted"
    ENDING = "over, but its END record has no room yet"
    GONE = "not in the table"


@dataclass(frozen=True)
class Extras:
    """What few sequences need for sampling; fields as in `layout.SampleExtras`, bias entries, bans."""

    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    prompt_tokens: int
    allow_only: bool
    stop_tokens: list[int]
    bias: list[tuple[int, float]]
    bans: list[list[int]]


@dataclass(eq=False)
class Block:
    """A block of the prefix cache: what it holds, and the block with what comes before."""

    salt: int
    parent: Block | None
    tokens: list[int]


@dataclass(eq=False)
class Sequence:
    """One sequence of the table. `tokens` is its history: prompt and generated tokens."""

    channel: int
    position: int
    tokens: list[int]
    prompt: int
    max_tokens: int
    ignore_eos: bool
    stops: list[int]
    top_k: int
    temperature: float
    top_p: float
    seed: int
    logprobs: int
    min_tokens: int
    extras: Extras | None
    priority: int = 0
    prompt_logprobs: bool = False
    salt: int = 0
    shared: list[Block] = field(default_factory=list)
    """Its first blocks, as far as they are the cache's."""
    found: int = 0
    """Of them those that were there when it was admitted."""
    stage: Stage = Stage.WAITING
    computed: int = 0
    finish: Finish = Finish.NONE
    detail: ErrorCode = ErrorCode.NONE

    @property
    def left(self) -> int:
        """Tokens that are known, to be computed, and not yet computed."""
        return len(self.tokens) - self.computed - self.only_scored

    @property
    def only_scored(self) -> bool:
        """Nothing is generated."""
        return self.max_tokens == 0

    @property
    def scores(self) -> bool:
        """Whether the next token's logits are those of a token of the prompt, whose log-probabilities are wanted."""
        return self.prompt_logprobs and self.computed < self.prompt - 1


@dataclass
class Channel:
    """One channel as the scheduler knows it. `history` is every token record ever written: (head, body)."""

    lease: int = 0
    live: bool = False
    log_start: int = 0
    log_read: int = 0
    submit_read: int = 0
    cancel_read: int = 0
    rejected: int = 0
    protocol_errors: int = 0
    lease_word: int = 0
    log_read_word: int = 0
    heartbeat: int = 0
    heartbeat_ns: int = 0
    history: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Row:
    """How to sample one token, or which known one to score; fields as in `layout.SampleRow`."""

    sequence: Sequence
    token_index: int
    position: int
    top_k: int
    temperature: float
    top_p: float
    seed: int
    flags: int
    logprobs: int

    @property
    def known(self) -> bool:
        """Whether the token is one of the prompt."""
        return self.position < self.sequence.prompt


Said = tuple[Sequence, RecordKind | None, int]
"""What a row brings: sequence, kind of its record (None: no record), token."""


@dataclass(frozen=True)
class PlannedWork:
    """One sequence's share of a step. `row` is the first of its rows."""

    sequence: Sequence
    start: int
    query_start: int
    query_tokens: int
    row: int | None


@dataclass
class Plan:
    """A step as the twin plans it."""

    step: int = 0
    works: list[PlannedWork] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    decode_works: int = 0
    decode_tiles: list[tuple[int, int, int, int]] = field(default_factory=list)
    decode_span: int = 0
    chunk_tiles: list[tuple[int, int, int, int]] = field(default_factory=list)
    bucket: int = 0
    live: int = 0
    stopped: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of the step without padding."""
        return sum(work.query_tokens for work in self.works)


def tiles(first_work: int, sizes: list[int], span: int) -> list[tuple[int, int, int, int]]:
    """(work, first position, index of the work's first tile, its number of tiles), work after work."""
    found: list[tuple[int, int, int, int]] = []
    for index, size in enumerate(sizes):
        starts, base = range(0, size, span), len(found)
        found += [(first_work + index, start, base, len(starts)) for start in starts]
    return found


class SchedulerTwin:
    """See the module. Methods stand in the order of a step."""

    def __init__(self, limits: Limits, inbound: Inbound) -> None:
        self.limits = limits
        self.inbound = inbound
        self.outbound = Outbound(limits.sizes)
        self.channels = [Channel() for _ in range(limits.channels)]
        self.arrived: list[Sequence] = []
        self.plan = Plan()
        self.holding: list[Sequence] = []
        """Those that hold blocks, in order of arrival."""
        self.cache: list[Block] = []
        self.idle: list[Block] = []
        """Those of the cache that no sequence holds, in the order in which they will be evicted."""
        self.turn = 0
        self.count = dict.fromkeys(arena.TELEMETRY_OFFSETS, 0)
        del self.count["pad0"]

    def step(
        self,
        sampled: list[int],
        now_ns: int,
        command: int = Command.RUN,
        logprobs: list[list[Logprob]] | None = None,
    ) -> Plan:
        """Takes in the sampled token of each row of the last plan, and its log-probabilities where the row asks for
        them, and plans the next step."""
        said = self.harvest(sampled)
        self.keep_prompts()
        self.publish(said, logprobs or [[] for _ in sampled])
        self.intake(now_ns, command)
        self.cancel()
        self.plan = Plan(stopped=True) if command == Command.STOP else self.emit(*self.share_out(self.admit()))
        self.launch(command)
        return self.plan

    # harvest

    def harvest(self, sampled: list[int]) -> list[Said]:
        """Takes in the tokens; what is to be said of each row."""
        assert len(sampled) == len(self.plan.rows)
        for work in self.plan.works:
            sequence = work.sequence
            end = work.start + work.query_tokens
            self.count["prompt_tokens"] += max(0, min(end, sequence.prompt) - work.start)
            sequence.computed = end
        spoilt = {
            id(row.sequence) for row, token in zip(self.plan.rows, sampled, strict=True) if self.spoils(row, token)
        }
        said = []
        for row, token in zip(self.plan.rows, sampled, strict=True):
            if id(row.sequence) not in spoilt:
                said.append(self.take_row(row, token))
            elif row.sequence.stage is Stage.RUNNING:
                self.end(row.sequence, Finish.ERROR, ErrorCode.BAD_SAMPLE)
                said.append((row.sequence, RecordKind.END, 0))
            else:
                said.append((row.sequence, None, 0))
        return said

    def spoils(self, row: Row, token: int) -> bool:
        """Whether a row came to no token, so that no row of its sequence counts."""
        return not 0 <= token < self.limits.vocab_size

    def take_row(self, row: Row, token: int) -> Said:
        """What is to be said of a row: (sequence, kind of its record, token)."""
        sequence = row.sequence
        if not row.known:
            self.take_token(sequence, token)
            return sequence, RecordKind.TOKEN, token
        if sequence.only_scored and row.position == sequence.prompt - 1:
            self.end(sequence, Finish.LENGTH)
        return sequence, RecordKind.PROMPT_TOKEN, sequence.tokens[row.position]

    def take_token(self, sequence: Sequence, token: int) -> None:
        """Appends a token and decides whether it is the last one."""
        sequence.tokens.append(token)
        self.count["generated_tokens"] += 1
        if self.is_stop(sequence, token):
            self.end(sequence, Finish.STOP)
        elif len(sequence.tokens) == sequence.prompt + sequence.max_tokens:
            self.end(sequence, Finish.LENGTH)

    def is_stop(self, sequence: Sequence, token: int) -> bool:
        """Whether a token ends a sequence."""
        return token in sequence.stops or (token in self.limits.eos_tokens and not sequence.ignore_eos)

    def end(self, sequence: Sequence, finish: Finish, detail: ErrorCode = ErrorCode.NONE) -> None:
        """A sequence is over; its record is still to come."""
        sequence.stage, sequence.finish, sequence.detail = Stage.ENDING, finish, detail
        self.count[f"finished_{finish.name.lower()}"] += 1

    # publish

    def publish(self, harvested: list[Said], logprobs: list[list[Logprob]]) -> None:
        """The records of each row, then those of sequences that ended earlier."""
        ended = list(dict.fromkeys(sequence for sequence, _, _ in harvested if sequence.stage is Stage.ENDING))
        for at, ((sequence, kind, token), found) in enumerate(zip(harvested, logprobs, strict=True)):
            if kind is RecordKind.PROMPT_TOKEN:
                self.append_prompt_token(sequence, token)
            elif kind is not None:
                self.append(sequence, kind, token)
            if kind in (RecordKind.TOKEN, RecordKind.PROMPT_TOKEN):
                self.append_logprobs(sequence, found)
            last = at + 1 == len(harvested) or harvested[at + 1][0] is not sequence
            if last and kind is RecordKind.PROMPT_TOKEN and sequence.stage is Stage.ENDING:
                self.append(sequence, RecordKind.END, 0)
        self.let_go()
        for sequence in ended:
            self.remove(sequence)
        self.publish_ending()

    def publish_ending(self) -> None:
        """END records, in order of arrival, while there is room."""
        for sequence in [each for each in self.arrived if each.stage is Stage.ENDING]:
            if self.log_free(sequence.channel) > 0:
                self.append(sequence, RecordKind.END, 0)
                self.remove(sequence)

    def append(self, sequence: Sequence, kind: RecordKind, token: int) -> None:
        """Appends a record about a sequence to its channel's log."""
        detail: int = sequence.detail
        if kind is RecordKind.TOKEN and len(sequence.tokens) == sequence.prompt + 1:
            detail = min(sequence.found, 65535)
        self.write_record(sequence.channel, sequence.position, kind, sequence.finish, detail, token)

    def append_prompt_token(self, sequence: Sequence, token: int) -> None:
        """Appends the record of a token of the prompt, which never ends a sequence."""
        kind = RecordKind.PROMPT_TOKEN
        self.write_record(sequence.channel, sequence.position, kind, Finish.NONE, ErrorCode.NONE, token)

    def append_logprobs(self, sequence: Sequence, found: list[Logprob]) -> None:
        """Appends a token's LOGPROB records: its own, then those of ranks 1, 2, …"""
        for index, (token, bits, sampled_rank) in enumerate(found[: sequence.logprobs]):
            rank = min(index or sampled_rank, MOST_RANK)
            lap = self.next_lap(sequence.channel)
            head = arena.pack_logprob_head(lap, RecordKind.LOGPROB, rank % 256, bits)
            self.write_words(sequence.channel, head, arena.pack_logprob_body(lap, rank // 256, token))

    def write_record(
        self, channel: int, position: int, kind: RecordKind, finish: Finish, detail: int, token: int
    ) -> None:
        """Appends a token record."""
        lap = self.next_lap(channel)
        head = arena.pack_token_head(lap, kind, finish, position)
        self.write_words(channel, head, arena.pack_token_body(lap, detail, token))

    def next_lap(self, channel: int) -> int:
        """Lap of the next record of a channel's log."""
        return 1 + len(self.channels[channel].history) // self.limits.log_slots % LAP_16

    def write_words(self, channel: int, head: int, body: int) -> None:
        """Appends a record's words."""
        at = len(self.channels[channel].history)
        self.channels[channel].history.append((head, body))
        word = self.outbound.log_at(channel, at)
        self.outbound.words[word], self.outbound.words[word + 1] = head, body

    def remove(self, sequence: Sequence) -> None:
        """Gives the sequence's slot and blocks back."""
        sequence.stage = Stage.GONE
        self.arrived.remove(sequence)

    def log_free(self, channel: int) -> int:
        """Free records of a channel's log."""
        return self.limits.log_slots - (len(self.channels[channel].history) - self.channels[channel].log_read)

    def log_room(self, channel: int) -> int:
        """Free records beyond those due to ending sequences."""
        due = sum(each.channel == channel and each.stage is Stage.ENDING for each in self.arrived)
        return self.log_free(channel) - due

    # intake

    def intake(self, now_ns: int, command: int) -> None:
        """Leases, cursors, then submissions in rounds."""
        for channel in range(self.limits.channels):
            self.see_lease(channel, now_ns)
            self.see_log_read(channel)
        self.let_go()
        start, self.turn = self.turn, (self.turn + 1) % self.limits.channels
        if command != Command.RUN:
            return
        order = [(start + step) % self.limits.channels for step in range(self.limits.channels)]
        taken, before = 0, -1
        self.tokens_seen = 0
        while taken != before:
            before = taken
            for channel in order:
                more = taken < layout.MAX_INTAKE_PER_STEP and self.tokens_seen < self.limits.intake_tokens
                if more and self.channels[channel].live:
                    taken += self.take_submission(channel)

    def see_lease(self, channel: int, now_ns: int) -> None:
        """Takes leases, gives them back, lets them expire."""
        state = self.channels[channel]
        word = self.inbound.words[self.inbound.control_at(channel, "lease")]
        beat = self.inbound.words[self.inbound.control_at(channel, "heartbeat")]
        changed, state.lease_word = word != state.lease_word, word
        if word == state.lease + 1:
            self.drop_channel(channel)
            self.wipe_inbound(channel)
            state.lease, state.live, state.log_start = word, True, len(state.history)
            state.log_read = state.log_start
            state.heartbeat, state.heartbeat_ns = beat, now_ns
        elif word == 0:
            self.drop_channel(channel)
        elif word != state.lease and changed:
            state.protocol_errors += 1
        if beat != state.heartbeat:
            state.heartbeat, state.heartbeat_ns = beat, now_ns
        elif state.live and now_ns - state.heartbeat_ns >= self.limits.lease_timeout_ns:
            self.drop_channel(channel)

    def wipe_inbound(self, channel: int) -> None:
        """Nothing that was written before a lease is there under it: no record, no prompt."""
        layout = self.inbound.layout
        start = layout.channel_offset(channel)
        self.inbound.bytes[start + layout.channel_submit_offset : start + layout.channel_bytes] = 0

    def wipe_log(self, channel: int) -> None:
        """Nothing that was said under a lease is there after it."""
        start = self.outbound.log_at(channel, 0) * 8
        self.outbound.bytes[start : start + 16 * self.limits.log_slots] = 0

    def drop_channel(self, channel: int) -> None:
        """Ends all sequences of a channel without a record."""
        self.channels[channel].live = False
        self.wipe_log(channel)
        for sequence in [each for each in self.arrived if each.channel == channel]:
            if sequence.stage is not Stage.ENDING:
                self.end(sequence, Finish.CANCELLED)
            self.remove(sequence)

    def see_log_read(self, channel: int) -> None:
        """Takes the read cursor when it is possible."""
        state = self.channels[channel]
        if not state.live:
            return
        word = self.inbound.words[self.inbound.control_at(channel, "log_read")]
        changed, state.log_read_word = word != state.log_read_word, word
        if word > len(state.history):
            state.protocol_errors += changed
        elif word >= state.log_read:
            state.log_read = word

    def take_submission(self, channel: int) -> bool:
        """Takes one record, good or bad, when one is there and has a place."""
        state = self.channels[channel]
        at = self.inbound.submit_at(channel, state.submit_read)
        if not self.is_committed(at + 120, state.submit_read, self.limits.submit_slots, state.lease):
            return False
        if len(self.arrived) == self.limits.max_sequences or self.log_room(channel) <= 0:
            return False
        record = np.frombuffer(bytes(self.inbound.view[at : at + 128]), arena.SubmitRecord)[0]
        error = self.validate(channel, record)
        if error is ErrorCode.NONE or error >= ErrorCode.BAD_TOKEN:
            self.tokens_seen += int(record["prompt_tokens"])
        if error is ErrorCode.NONE:
            self.enter(self.new_sequence(channel, record))
        else:
            self.write_record(channel, state.submit_read, RecordKind.REJECT, Finish.ERROR, error, 0)
            state.rejected += 1
        state.submit_read += 1
        return True

    def enter(self, sequence: Sequence) -> None:
        """Puts a new sequence before the first one that waits in a later class."""
        later = [each.stage is Stage.WAITING and each.priority > sequence.priority for each in self.arrived]
        self.arrived.insert(later.index(True) if True in later else len(later), sequence)

    def is_committed(self, at: int, position: int, slots: int, lease: int) -> bool:
        """Whether the commit word at a byte offset is the one of that position under that lease."""
        return self.inbound.words[at // 8] == arena.pack_commit_word(1 + position // slots % LAP_32, lease)

    def prompt(self, channel: int, record: np.void) -> list[int]:
        """The prompt of a submission whose range is sound."""
        first = self.inbound.heap_at(channel) + int(record["prompt_offset"])
        return list(self.inbound.halves[first : first + int(record["prompt_tokens"])])

    def validate(self, channel: int, record: np.void) -> ErrorCode:
        """The first error of a submission, in the order of ErrorCode."""
        limits, prompt, asked = self.limits, int(record["prompt_tokens"]), int(record["max_tokens"])
        if int(record["flags"]) not in range(8):
            return ErrorCode.BAD_FLAGS
        if prompt == 0 or int(record["prompt_offset"]) + prompt > limits.heap_tokens:
            return ErrorCode.BAD_PROMPT_RANGE
        scores = bool(int(record["flags"]) & arena.SubmitFlag.PROMPT_LOGPROBS)
        if asked == 0 and (not scores or prompt == 1):
            return ErrorCode.BAD_MAX_TOKENS
        if prompt + asked > limits.max_model_tokens:
            return ErrorCode.CONTEXT_LENGTH
        if self.blocks_for(prompt + asked - 1) > min(limits.blocks - 1, limits.blocks_per_sequence):
            return ErrorCode.TOO_LARGE
        if not self.sampling_is_sound(record):
            return ErrorCode.BAD_SAMPLING
        count = int(record["stop_count"])
        if count > arena.MAX_STOP_TOKENS or (record["stop_tokens"][:count] >= limits.vocab_size).any():
            return ErrorCode.BAD_STOP
        if any(token >= limits.vocab_size for token in self.prompt(channel, record)):
            return ErrorCode.BAD_TOKEN
        if int(record["min_tokens"]) > asked:
            return ErrorCode.BAD_MIN_TOKENS
        if not self.logprobs_are_sound(int(record["logprobs"]), scores, end_apart=asked == 0):
            return ErrorCode.BAD_LOGPROBS
        if not self.bias_is_sound(channel, record):
            return ErrorCode.BAD_BIAS
        return ErrorCode.NONE if self.bans_are_sound(channel, record) else ErrorCode.BAD_BAN

    def sampling_is_sound(self, record: np.void) -> bool:
        """Whether all numbers are finite and in range."""
        ranges = {
            "temperature": (0, 100),
            "top_p": (0, 1),
            "min_p": (0, 1),
            "repetition_penalty": (0, 100),
            "presence_penalty": (-2, 2),
            "frequency_penalty": (-2, 2),
        }
        sound = all(isfinite(record[name]) and low <= record[name] <= high for name, (low, high) in ranges.items())
        return sound and bool(record["top_p"] > 0)

    def logprobs_are_sound(self, count: int, scores: bool, end_apart: bool) -> bool:
        """Whether so many log-probabilities exist, and fit into an empty log with their token and an END record."""
        if count == 0:
            return not scores
        exist = count - 1 <= min(arena.MAX_TOP_LOGPROBS, self.limits.vocab_size)
        return exist and 1 + count + end_apart <= self.limits.log_slots

    def bias_is_sound(self, channel: int, record: np.void) -> bool:
        """Whether the bias entries can be read and every one is good."""
        offset, count = int(record["bias_offset"]), int(record["bias_count"])
        if count == 0:
            return not int(record["flags"]) & arena.SubmitFlag.ALLOW_ONLY
        if count > 1024 or offset + 2 * count > self.limits.heap_tokens:
            return False
        entries = self.bias(channel, record)
        tokens = [token for token, _ in entries]
        ascending = all(low < high for low, high in itertools.pairwise(tokens))
        return ascending and tokens[-1] < self.limits.vocab_size and all(value < math.inf for _, value in entries)

    def bias(self, channel: int, record: np.void) -> list[tuple[int, float]]:
        """The bias entries of a submission whose range is sound."""
        first, count = self.inbound.heap_at(channel) + int(record["bias_offset"]), int(record["bias_count"])
        words = np.array(list(self.inbound.halves[first : first + 2 * count]), np.uint32)
        return list(zip(words[::2].tolist(), words[1::2].view(np.float32).tolist(), strict=True))

    def bans_are_sound(self, channel: int, record: np.void) -> bool:
        """Whether the banned sequences can be read and every one is good."""
        count = int(record["ban_words"])
        end = int(record["bias_offset"]) + 2 * int(record["bias_count"]) + count
        if count == 0:
            return True
        if count > 1024 or end > self.limits.heap_tokens:
            return False
        words = self.ban_words(channel, record)
        while words:
            length = words[0] - 2**31
            if length < 2 or len(words) < 1 + length or max(words[1 : 1 + length]) >= self.limits.vocab_size:
                return False
            words = words[1 + length :]
        return True

    def ban_words(self, channel: int, record: np.void) -> list[int]:
        """The words of the banned sequences of a submission whose range is sound."""
        first = self.inbound.heap_at(channel) + int(record["bias_offset"]) + 2 * int(record["bias_count"])
        return list(self.inbound.halves[first : first + int(record["ban_words"])])

    def bans(self, channel: int, record: np.void) -> list[list[int]]:
        """The banned sequences of a sound submission."""
        found: list[list[int]] = []
        for word in self.ban_words(channel, record) if int(record["ban_words"]) else []:
            if word >= 2**31:
                found.append([])
            else:
                found[-1].append(word)
        return found

    def new_sequence(self, channel: int, record: np.void) -> Sequence:
        """A waiting sequence."""
        prompt = self.prompt(channel, record)
        stops: NDArray[np.uint32] = record["stop_tokens"][: int(record["stop_count"])]
        return Sequence(
            channel,
            self.channels[channel].submit_read,
            prompt,
            len(prompt),
            int(record["max_tokens"]),
            bool(int(record["flags"]) & arena.SubmitFlag.IGNORE_EOS),
            [int(token) for token in stops],
            int(record["top_k"]),
            float(record["temperature"]),
            float(record["top_p"]),
            int(record["seed"]),
            int(record["logprobs"]),
            int(record["min_tokens"]),
            self.new_extras(channel, record),
            int(record["priority"]),
            bool(int(record["flags"]) & arena.SubmitFlag.PROMPT_LOGPROBS),
            int(record["cache_salt"]),
        )

    def new_extras(self, channel: int, record: np.void) -> Extras | None:
        """What the sequence needs beside temperature, top_k and top_p, if anything."""
        off = {"min_p": (0,), "repetition_penalty": (0, 1), "presence_penalty": (0,), "frequency_penalty": (0,)}
        wanted = any(float(record[name]) not in values for name, values in off.items())
        if not wanted and not any(int(record[name]) for name in ("bias_count", "ban_words", "min_tokens")):
            return None
        flags = int(record["flags"])
        eos = [] if flags & arena.SubmitFlag.IGNORE_EOS else list(self.limits.eos_tokens)
        return Extras(
            min_p=float(record["min_p"]),
            repetition_penalty=float(record["repetition_penalty"]) or 1.0,
            presence_penalty=float(record["presence_penalty"]),
            frequency_penalty=float(record["frequency_penalty"]),
            prompt_tokens=int(record["prompt_tokens"]),
            allow_only=bool(flags & arena.SubmitFlag.ALLOW_ONLY),
            stop_tokens=eos + [int(token) for token in record["stop_tokens"][: int(record["stop_count"])]],
            bias=self.bias(channel, record),
            bans=self.bans(channel, record),
        )

    def blocks_for(self, positions: int) -> int:
        """KV blocks that hold so many positions."""
        return -(-positions // self.limits.block_tokens)

    # cancel

    def cancel(self) -> None:
        """Cancel records in channel order."""
        taken, named = 0, False
        for channel, state in enumerate(self.channels):
            while state.live and taken < layout.MAX_CANCELS_PER_STEP:
                at = self.inbound.cancel_at(channel, state.cancel_read)
                if not self.is_committed(at + 8, state.cancel_read, self.limits.cancel_slots, state.lease):
                    break
                named |= self.cancel_target(channel, self.inbound.words[at // 8])
                state.cancel_read += 1
                taken += 1
        self.let_go()
        if named:
            self.publish_ending()

    def cancel_target(self, channel: int, target: int) -> bool:
        """Ends the target; False when it is no taken submission."""
        if target >= self.channels[channel].submit_read:
            self.channels[channel].protocol_errors += 1
            return False
        for sequence in self.arrived:
            if (sequence.channel, sequence.position) == (channel, target) and sequence.stage is not Stage.ENDING:
                self.end(sequence, Finish.CANCELLED)
        return True

    # plan

    def admit(self) -> list[Sequence]:
        """Admits waiting sequences; all running ones in order of arrival."""
        for sequence in [each for each in self.arrived if each.stage is Stage.WAITING][: layout.MAX_ADMITTED_PER_STEP]:
            if len(self.holding) == self.limits.max_running or not self.try_to_admit(sequence):
                break
        return [each for each in self.arrived if each.stage is Stage.RUNNING]

    def try_to_admit(self, sequence: Sequence) -> bool:
        """Admits a sequence if the pool can hold whatever all may come to need with it."""
        sequence.shared = self.look_up(sequence)
        sequence.found = len(sequence.shared)
        sequence.computed = sequence.found * self.limits.block_tokens
        self.holding.append(sequence)
        if self.needed_in_all() > self.limits.blocks - 1:
            self.holding.remove(sequence)
            sequence.shared, sequence.found, sequence.computed = [], 0, 0
            return False
        sequence.stage = Stage.RUNNING
        self.idle = [each for each in self.idle if each not in sequence.shared]
        if self.limits.prefix_cache and not sequence.prompt_logprobs:
            self.count["prefix_queries"] += sequence.prompt
            self.count["prefix_hits"] += sequence.computed
        return True

    def needed_in_all(self) -> int:
        """KV blocks that the sequences which hold some have or may come to have, a shared one counted once."""
        future = sum(self.reservation(each) - self.blocks_for(each.computed) for each in self.holding)
        return self.held() + future

    def held(self) -> int:
        """KV blocks that sequences hold now."""
        shared = {id(block) for each in self.holding for block in each.shared}
        return len(shared) + sum(self.blocks_for(each.computed) - len(each.shared) for each in self.holding)

    def reservation(self, sequence: Sequence) -> int:
        """KV blocks that a sequence may come to need."""
        return self.blocks_for(sequence.prompt + sequence.max_tokens - 1)

    # the prefix cache

    def look_up(self, sequence: Sequence) -> list[Block]:
        """The longest prefix of a prompt that is cached, but for the prompt's last token."""
        found: list[Block] = []
        if sequence.prompt_logprobs:
            return found
        for index in range((sequence.prompt - 1) // self.limits.block_tokens):
            block = self.cached(sequence, index, found[-1] if found else None)
            if block is None:
                break
            found.append(block)
        return found

    def cached(self, sequence: Sequence, index: int, parent: Block | None) -> Block | None:
        """The cache's block with a sequence's tokens behind a block of the cache."""
        tokens = self.block_tokens(sequence, index)
        for block in self.cache:
            if block.parent is parent and block.tokens == tokens and block.salt == sequence.salt:
                return block
        return None

    def block_tokens(self, sequence: Sequence, index: int) -> list[int]:
        """Tokens of one of a sequence's blocks."""
        size = self.limits.block_tokens
        return sequence.tokens[index * size : (index + 1) * size]

    def keep_prompts(self) -> None:
        """What is computed of prompts goes to the cache."""
        for sequence in self.holding:
            if sequence.finish is not Finish.ERROR:
                self.keep(sequence, min(sequence.computed, sequence.prompt) // self.limits.block_tokens)

    def keep(self, sequence: Sequence, blocks: int) -> None:
        """Gives a sequence's blocks to the cache; where it has one like it already, that one is taken instead."""
        for index in range(len(sequence.shared), blocks if self.limits.prefix_cache else 0):
            parent = sequence.shared[-1] if sequence.shared else None
            block = self.cached(sequence, index, parent)
            if block is None:
                block = Block(sequence.salt, parent, self.block_tokens(sequence, index))
                self.cache.append(block)
            self.idle = [each for each in self.idle if each is not block]
            sequence.shared.append(block)

    def let_go(self) -> None:
        """Those that have ended leave what they have computed to the cache, and hold nothing any more."""
        leaving = [each for each in self.holding if each.stage is not Stage.RUNNING]
        kept = 0
        for sequence in leaving:
            full = 0 if sequence.finish is Finish.ERROR else sequence.computed // self.limits.block_tokens
            if full > len(sequence.shared) and kept < layout.MAX_KEPT_PER_STEP:
                self.keep(sequence, full)
                kept += 1
        for sequence in leaving:
            self.holding.remove(sequence)
            self.idle += [block for block in reversed(sequence.shared) if not self.is_held(block)]
            sequence.shared = []

    def is_held(self, block: Block) -> bool:
        """Whether a sequence holds a block of the cache."""
        return any(block in each.shared for each in self.holding)

    def evict(self, plan: Plan) -> None:
        """Makes room for a plan's new blocks, and some more."""
        needed = self.new_blocks(plan)
        pool = self.limits.blocks - 1
        free = pool - self.held() - len(self.idle)
        least = max(needed, self.limits.max_running)
        if free < least:
            evicted = self.idle[: least - free + pool // 16]
            self.idle = self.idle[len(evicted) :]
            self.cache = [each for each in self.cache if each not in evicted]

    def share_out(self, running: list[Sequence]) -> tuple[list[Sequence], list[tuple[Sequence, int]]]:
        """(sequences that decode, (sequence, tokens) of the prompt chunks)."""
        capped = self.capped(running)
        decodes = [each for each in running if each.left == 1 and each not in capped and not each.scores]
        budget = self.limits.token_budget - len(decodes)
        chunks = []
        scored = self.scored(running, capped)
        for sequence in running:
            want = sequence.left - (sequence in capped)
            if sequence.scores:
                want = min(sequence.left, scored.get(id(sequence), 0))
            if want == 0:
                self.count["log_stalls"] += 1
            elif sequence not in decodes and budget > 0:
                chunks.append((sequence, min(want, budget)))
                budget -= min(want, budget)
        return decodes, chunks

    def capped(self, running: list[Sequence]) -> list[Sequence]:
        """Those that may not sample, for want of room in their log."""
        found = []
        for channel in range(self.limits.channels):
            due = 0
            for sequence in [each for each in running if each.channel == channel]:
                due += self.records_of(sequence)
                if due > self.log_room(channel):
                    found.append(sequence)
        return found

    def records_of(self, sequence: Sequence) -> int:
        """Records that a sequence needs to go on."""
        return 1 + sequence.logprobs + sequence.only_scored

    def scored(self, running: list[Sequence], capped: list[Sequence]) -> dict[int, int]:
        """Tokens that each sequence which scores its prompt may compute, by id: one for which there is room in any
        case, and an even share of the rows and the log's room that are left."""
        scoring = [each for each in running if each.scores and each not in capped]
        rows = self.limits.max_running - len(running)
        found = {}
        for sequence in scoring:
            kept = sum(self.records_of(each) for each in running if each.channel == sequence.channel)
            groups = max(0, self.log_room(sequence.channel) - kept) // (1 + sequence.logprobs)
            found[id(sequence)] = 1 + min(rows, groups) // len(scoring)
        return found

    # emit

    def emit(self, decodes: list[Sequence], chunks: list[tuple[Sequence, int]]) -> Plan:
        """Works in order, with their tokens."""
        plan = Plan(decode_works=len(decodes))
        for sequence, query in [(each, 1) for each in decodes] + chunks:
            start, at, rows = sequence.computed, len(plan.token_ids), len(plan.rows)
            for index in range(query):
                if self.has_row(sequence, start + index + 1):
                    plan.rows.append(self.sample_row(sequence, at + index, start + index + 1))
            plan.works.append(PlannedWork(sequence, start, at, query, rows if len(plan.rows) > rows else None))
            plan.token_ids += sequence.tokens[start : start + query]
            plan.positions += range(start, start + query)
        contexts = [work.start + 1 for work in plan.works[: plan.decode_works]]
        plan.decode_span = 64 * math.ceil(sum(contexts) / max(32, 2 * len(contexts)) / 64)
        plan.decode_tiles = tiles(0, contexts, plan.decode_span)
        plan.chunk_tiles = tiles(
            plan.decode_works, [work.query_tokens for work in plan.works[plan.decode_works :]], 128
        )
        self.evict(plan)
        return plan

    def has_row(self, sequence: Sequence, position: int) -> bool:
        """Whether the token at a position is to be sampled or scored when the one before it is computed."""
        return position == len(sequence.tokens) or (sequence.prompt_logprobs and position < sequence.prompt)

    def sample_row(self, sequence: Sequence, token_index: int, position: int) -> Row:
        """The row of a sequence's token at a position."""
        masked = len(sequence.tokens) - sequence.prompt < sequence.min_tokens
        flags = layout.RowFlag.EXTRAS * (sequence.extras is not None) + layout.RowFlag.MASK_STOPS * masked
        return Row(
            sequence,
            token_index,
            position,
            sequence.top_k,
            sequence.temperature,
            sequence.top_p,
            sequence.seed,
            int(layout.RowFlag.KNOWN) if position < len(sequence.tokens) else flags,
            sequence.logprobs,
        )

    # launch

    def launch(self, command: int) -> None:
        """Chooses the bucket, pads, and writes what front ends may see."""
        plan = self.plan
        plan.live = len(self.arrived)
        tokens = len(plan.token_ids)
        plan.bucket = next(size for size in self.limits.buckets if size >= tokens) if tokens else 0
        plan.token_ids += [0] * (plan.bucket - tokens)
        plan.positions += [0] * (plan.bucket - tokens)
        self.count["steps"] += tokens > 0
        plan.step = self.count["steps"]
        self.write_telemetry(command)
        self.write_cursors()

    def write_telemetry(self, command: int) -> None:
        """The telemetry page."""
        states = {
            Command.RUN: arena.DeviceState.RUNNING,
            Command.DRAIN: arena.DeviceState.DRAINING,
            Command.STOP: arena.DeviceState.STOPPED,
        }
        count = self.count
        count["heartbeat"] += 1
        count["state"] = states[Command(command)]
        count["running"] = sum(each.stage is Stage.RUNNING for each in self.arrived)
        count["waiting"] = sum(each.stage is Stage.WAITING for each in self.arrived)
        count["blocks_total"] = self.limits.blocks - 1
        count["blocks_used"] = self.held() + self.new_blocks(self.plan)
        count["blocks_cached"] = len(self.idle)
        count["rejected"] = sum(channel.rejected for channel in self.channels)
        count["protocol_errors"] = sum(channel.protocol_errors for channel in self.channels)
        count["step_tokens"] = self.plan.tokens
        for name, value in count.items():
            self.outbound.words[self.outbound.telemetry_at(name)] = value

    def new_blocks(self, plan: Plan) -> int:
        """KV blocks that a plan adds."""
        return sum(self.blocks_for(work.start + work.query_tokens) - self.blocks_for(work.start) for work in plan.works)

    def write_cursors(self) -> None:
        """What each channel's worker may see."""
        for index, state in enumerate(self.channels):
            values = {
                "lease": state.lease,
                "live": int(state.live),
                "log_start": state.log_start,
                "log_written": len(state.history),
                "submit_read": state.submit_read,
                "cancel_read": state.cancel_read,
                "rejected": state.rejected,
                "protocol_errors": state.protocol_errors,
            }
            for name, value in values.items():
                self.outbound.words[self.outbound.control_at(index, name)] = value
