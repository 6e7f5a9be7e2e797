"""A small front end for tests and measurements: one channel of an arena, without HTTP, text or asyncio.

It needs nothing but numpy and the arena's contract, so that a chain can be driven where the front end's own packages
are not installed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blink_proto import arena
from blink_proto.arena import ErrorCode, Finish, RecordKind
from dpu_service.channel.heap import PromptHeap
from dpu_service.transport.native import shm_library
from gpu_runtime.shared_arena import SharedArena

BEAT_SECONDS = 0.2
LOOK_SECONDS = 0.1
"""Between two looks whether the chain still runs."""
PAUSE_SECONDS = 0.0002
"""Between two looks of a front end that waits."""
_COMMIT_LAPS = (1 << 32) - 1
_LOG_LAPS = (1 << 16) - 1
_NAME_MASK = (1 << 32) - 1


class LogRecords(NamedTuple):
    """Token records, an array of each field."""

    sequence: NDArray[np.uint64]
    kind: NDArray[np.uint64]
    finish: NDArray[np.uint64]
    detail: NDArray[np.uint64]
    token: NDArray[np.uint64]


@dataclass(eq=False)
class Generation:
    """One sequence: what was asked, and what has come."""

    position: int
    prompt: Sequence[int]
    heap_start: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[list[tuple[int, float, int]]] = field(default_factory=list)
    """For each token (token id, log-probability, rank): its own, then the most likely ones."""
    prompt_logprobs: list[list[tuple[int, float, int]]] = field(default_factory=list)
    """The same for the tokens of the prompt, from the second one on."""
    finish: Finish = Finish.NONE
    kind: RecordKind = RecordKind.TOKEN
    error: ErrorCode = ErrorCode.NONE

    @property
    def ended(self) -> bool:
        """Its last record has come."""
        return self.finish is not Finish.NONE


class ChainOver(RuntimeError):
    """The chain has ended while something was waited for."""


class Front:
    """Holds a channel. Every wait is bounded and ends in TimeoutError, or in ChainOver as soon as `over` is true."""

    def __init__(self, shared: SharedArena, channel: int = 0, over: Callable[[], bool] = lambda: False) -> None:
        self.sizes = shared.sizes
        self.generations: dict[int, Generation] = {}
        self.unknown = 0
        self.lease = 0
        self.log_position = 0
        self._shared = shared
        self._over = over
        self._library = shm_library()
        self._bell = shared.inbound.ctypes.data + arena.BELL_OFFSETS["rings"]
        inbound, outbound = shared.inbound_layout, shared.outbound_layout
        base, theirs = inbound.channel_offset(channel), outbound.channel_offset(channel)
        self.control_offset = base + inbound.channel_control_offset
        self.submit_offset = base + inbound.channel_submit_offset
        self.cancel_offset = base + inbound.channel_cancel_offset
        self.heap_offset = base + inbound.channel_heap_offset
        self._out_offset = theirs + outbound.channel_control_offset
        self._log_offset = theirs + outbound.channel_log_offset
        self._words = np.zeros(1, arena.ChannelOut)
        self._log = np.zeros(self.sizes.log_slots, arena.TokenRecord)
        self._heap = PromptHeap(self.sizes.heap_tokens)
        self._newest: list[list[tuple[int, float, int]]] = [[]]
        self._submits = self._cancels = 0
        self._beats = 0
        self._beat_at = 0.0

    @property
    def submit_position(self) -> int:
        """Where the next submission goes."""
        return self._submits

    def words(self) -> np.void:
        """ChannelOut as it is now."""
        self._copy(self._words, self._shared.outbound, self._out_offset)
        return self._words[0]

    def telemetry(self) -> dict[str, int]:
        """The device's telemetry page."""
        page = np.zeros(1, arena.Telemetry)
        self._copy(page, self._shared.outbound, self._shared.outbound_layout.telemetry_offset)
        return {name: int(page[0][name]) for name in arena.TELEMETRY_OFFSETS if not name.startswith("pad")}

    def take(self, seconds: float = 20.0) -> None:
        """Takes the channel's next lease; what an earlier one had is forgotten."""
        self.lease = int(self.words()["lease"]) + 1
        self.beat()
        self.commit(self.control_offset + arena.CHANNEL_IN_OFFSETS["lease"], self.lease)
        self.wait(lambda: int(self.words()["lease"]) == self.lease and self._is_live(), seconds, "no lease")
        words = self.words()
        self._submits, self._cancels = int(words["submit_read"]), int(words["cancel_read"])
        self.log_position = int(words["log_start"])
        self.generations.clear()
        self._heap = PromptHeap(self.sizes.heap_tokens)
        self._publish_log_read()

    def give_back(self) -> None:
        """Ends the lease in order."""
        self.commit(self.control_offset + arena.CHANNEL_IN_OFFSETS["lease"], 0)

    def beat(self) -> None:
        """Shows that this front end lives."""
        self._beats += 1
        self._beat_at = time.monotonic()
        self.commit(self.control_offset + arena.CHANNEL_IN_OFFSETS["heartbeat"], self._beats)

    def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        seconds: float = 20.0,
        bias: dict[int, float] | None = None,
        bans: Sequence[Sequence[int]] = (),
        **sampling: Any,
    ) -> Generation:
        """Writes a submission; waits, polling, while ring or heap have no room."""
        entries = np.array(sorted((bias or {}).items()), np.dtype([("token", "<u4"), ("value", "<f4")]))
        words = np.array([word for one in bans for word in (arena.BAN_LENGTH + len(one), *one)], "<u4")
        size = len(prompt) + 2 * len(entries) + len(words)
        start = self._heap.allocate(size)
        while start is None:
            self._wait_for_records(seconds)
            start = self._heap.allocate(size)
        self.wait(self._has_room, seconds, "no room in the submit ring", poll=True)
        payload = np.asarray(prompt, "<u4").tobytes() + entries.tobytes() + words.tobytes()
        self.write(self.heap_offset + 4 * start, payload)
        record = submission(start, len(prompt), max_tokens, **sampling)
        record["bias_offset"] = start + len(prompt)
        record["bias_count"], record["ban_words"] = len(entries), len(words)
        made = Generation(self.append(record), prompt, start)
        self.generations[made.position & _NAME_MASK] = made
        return made

    def append(self, record: NDArray[np.void]) -> int:
        """Writes any submission at all, valid or not; its position. The caller sees to the room."""
        position, slots = self._submits, self.sizes.submit_slots
        at = self.submit_offset + position % slots * arena.SubmitRecord.itemsize
        end = arena.SUBMIT_RECORD_OFFSETS["commit"]
        self.write(at, record.tobytes()[:end])
        self.commit(at + end, arena.pack_commit_word(1 + position // slots % _COMMIT_LAPS, self.lease))
        self._submits += 1
        return position

    def cancel(self, generation: Generation, seconds: float = 20.0) -> None:
        """Asks for the end of a sequence; its last record still comes."""
        self.wait(lambda: int(self.words()["submit_read"]) > generation.position, seconds, "not taken", poll=True)
        self.append_cancel(generation.position)

    def append_cancel(self, target: int, seconds: float = 20.0) -> None:
        """Writes a cancel record for any target."""
        slots = self.sizes.cancel_slots
        self.wait(lambda: self._cancels - int(self.words()["cancel_read"]) < slots, seconds, "no room", poll=True)
        at = self.cancel_offset + self._cancels % slots * arena.CancelRecord.itemsize
        self.write(at, int(target).to_bytes(8, "little"))
        self.commit(at + 8, arena.pack_commit_word(1 + self._cancels // slots % _COMMIT_LAPS, self.lease))
        self._cancels += 1

    def leave_for(self, lease: int) -> None:
        """Fills both rings under another lease, as one may that loses the channel to whoever takes that lease."""
        self.lease = lease
        for _ in range(self.sizes.submit_slots):
            self.append(submission(0, 2, 100))
        for target in range(self.sizes.cancel_slots):
            self.append_cancel(target)

    def read(self) -> LogRecords:
        """Every complete record that has come since the last call; says so to the device."""
        if time.monotonic() - self._beat_at > BEAT_SECONDS:
            self.beat()
        records = self._new_records(int(self.words()["log_written"]))
        _, kind, finish, sequence = arena.unpack_token_head(records["head"])
        _, detail, token = arena.unpack_token_body(records["body"])
        self.log_position += len(records)
        if len(records):
            self._publish_log_read()
        return LogRecords(sequence, kind, finish, detail, token)

    def poll(self) -> int:
        """Reads, and gives each record to its generation; how many came."""
        records = self.read()
        for fields in zip(*(column.tolist() for column in records), strict=True):
            self._give(*fields)
        return len(records.sequence)

    def run(self, generations: Iterable[Generation], seconds: float = 60.0) -> None:
        """Polls until all of them have ended."""
        waiting = list(generations)
        self.wait(lambda: all(one.ended for one in waiting), seconds, "sequences did not end", poll=True)

    def wait(self, condition: Callable[[], bool], seconds: float, what: str, poll: bool = False) -> None:
        """Waits until a condition holds, polling meanwhile if wanted, and beating in any case."""
        began = looked = time.monotonic()
        while not condition():
            if (now := time.monotonic()) > began + seconds:
                raise TimeoutError(f"{what} within {seconds:g} s")
            if now > looked + LOOK_SECONDS:
                looked = now
                if self._over():
                    raise ChainOver(f"{what}: the chain has ended")
            if poll:
                self.poll()
            elif time.monotonic() - self._beat_at > BEAT_SECONDS:
                self.beat()
            time.sleep(PAUSE_SECONDS)

    def forget(self, generation: Generation) -> None:
        """Frees what an ended sequence holds here; `poll` does so by itself."""
        self._heap.free(generation.heap_start)
        del self.generations[generation.position & _NAME_MASK]

    def write(self, offset: int, payload: bytes) -> None:
        """Bytes into the inbound region."""
        assert 0 <= offset <= self._shared.inbound.nbytes - len(payload)
        self._library.blink_shm_write(self._shared.inbound.ctypes.data + offset, payload, len(payload))

    def commit(self, offset: int, word: int) -> None:
        """A word into the inbound region, after everything written before; rings the bell."""
        assert 0 <= offset <= self._shared.inbound.nbytes - 8
        self._library.blink_shm_commit(self._shared.inbound.ctypes.data + offset, word, self._bell)

    def _copy(self, into: NDArray[np.void], region: NDArray[np.uint8], offset: int) -> None:
        self._library.blink_shm_read(into.ctypes.data, region.ctypes.data + offset, into.nbytes // 8)

    def _is_live(self) -> bool:
        return int(self.words()["live"]) == 1

    def _has_room(self) -> bool:
        return self._submits - int(self.words()["submit_read"]) < self.sizes.submit_slots

    def _wait_for_records(self, seconds: float) -> None:
        self.wait(lambda: self.poll() > 0, seconds, "no room in the prompt heap")

    def _publish_log_read(self) -> None:
        self.commit(self.control_offset + arena.CHANNEL_IN_OFFSETS["log_read"], self.log_position)

    def _new_records(self, written: int) -> NDArray[np.void]:
        slots, count = self.sizes.log_slots, written - self.log_position
        assert 0 <= count <= slots, f"the token log moved by {count} of {slots} records"
        first = self.log_position % slots
        before_wrap = min(count, slots - first)
        self._copy(self._log[:before_wrap], self._shared.outbound, self._log_offset + 16 * first)
        self._copy(self._log[before_wrap:count], self._shared.outbound, self._log_offset)
        records = self._log[:count]
        laps = np.arange(self.log_position, written, dtype=np.uint64) // np.uint64(slots) % np.uint64(_LOG_LAPS)
        right = (records["head"] & 0xFFFF == laps + 1) & (records["body"] & 0xFFFF == laps + 1)
        return records if right.all() else records[: int(right.argmin())]

    def _give(self, sequence: int, kind: int, finish: int, detail: int, token: int) -> None:
        if kind == RecordKind.LOGPROB:  # the fields stand where those of its own words do
            value = float(np.array([sequence], np.uint32).view(np.float32)[0])
            self._newest[-1].append((token, value, detail << 8 | finish))
            return
        generation = self.generations.get(sequence)
        if generation is None:
            self.unknown += 1
            return
        if kind == RecordKind.TOKEN:
            generation.tokens.append(token)
            self._newest = generation.logprobs
            self._newest.append([])
        elif kind == RecordKind.PROMPT_TOKEN:
            assert token == generation.prompt[1 + len(generation.prompt_logprobs)]
            self._newest = generation.prompt_logprobs
            self._newest.append([])
        if finish != Finish.NONE:
            generation.kind, generation.finish = RecordKind(kind), Finish(finish)
            generation.error = ErrorCode(detail)
            self.forget(generation)


def submission(
    prompt_offset: int,
    prompt_tokens: int,
    max_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    ignore_eos: bool = True,
    allow_only: bool = False,
    prompt_logprobs: bool = False,
    **others: float,
) -> NDArray[np.void]:
    """A SubmitRecord without its commit word; `others` are fields by their names."""
    record = np.zeros((), arena.SubmitRecord)
    record["prompt_offset"], record["prompt_tokens"], record["max_tokens"] = prompt_offset, prompt_tokens, max_tokens
    record["temperature"], record["top_p"], record["top_k"], record["seed"] = temperature, top_p, top_k, seed
    flags = ignore_eos * arena.SubmitFlag.IGNORE_EOS | allow_only * arena.SubmitFlag.ALLOW_ONLY
    record["flags"] = flags | prompt_logprobs * arena.SubmitFlag.PROMPT_LOGPROBS
    for name, value in others.items():
        record[name] = value
    return record
