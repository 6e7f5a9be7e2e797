"""One worker's side of a channel: takes the lease, submits, cancels, and reads what the device says.

Free of clocks and of asyncio; whoever owns it calls `poll` and `beat` often enough.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum

from blink_proto import arena
from dpu_service.channel.errors import ChannelError, LeaseLostError
from dpu_service.channel.faults import fault_of, fault_of_cached, fault_of_prompt
from dpu_service.channel.geometry import Geometry, check_header
from dpu_service.channel.heap import PromptHeap
from dpu_service.channel.log import Record, TokenLog
from dpu_service.channel.logprobs import Group, fault_of_logprobs, grouped
from dpu_service.channel.news import News
from dpu_service.channel.prompt import SharedPrompt
from dpu_service.channel.rings import Ring, Sampling, cancel_payload, submit_payload
from dpu_service.channel.words import CHANNEL_OUT_BYTES, ChannelOutWords, read_channel_out, read_telemetry
from dpu_service.transport.base import Range, Transport

_NAME_MASK = (1 << 32) - 1
_TOKEN, _GOES_ON = int(arena.RecordKind.TOKEN), int(arena.Finish.NONE)  # compared faster than enumerations
_WITH_LOGPROBS = (arena.RecordKind.TOKEN, arena.RecordKind.PROMPT_TOKEN)


class LeaseState(Enum):
    """How far the worker is in taking its channel."""

    VACANT = "vacant"
    ASKED = "asked"
    LIVE = "live"


@dataclass(slots=True)
class Tracked:
    """A submission that is in the ring or on the device."""

    position: int
    prompt: SharedPrompt
    tokens_left: int
    logprobs: int = 0
    prompt_left: int = 0
    """Tokens of the prompt whose log-probabilities have not come yet; 0 when nobody wants them."""
    cancel_wanted: bool = False

    @property
    def is_described(self) -> bool:
        """Whether log-probabilities come with its tokens."""
        return self.logprobs > 0


class ChannelClient:
    """See the module. All methods are cheap and never wait.

    Raises:
        ChannelError: the arena is not the session's.
    """

    def __init__(self, transport: Transport, geometry: Geometry, channel: int) -> None:
        geometry.check()
        if not 0 <= channel < geometry.channels:
            raise ChannelError("the session names a channel that the arena does not have")
        self.block_tokens = check_header(transport, geometry)
        self.geometry = geometry
        self._transport = transport
        self._outbound = arena.OutboundLayout(geometry.sizes)
        self._out = self._outbound.channel_offset(channel) + self._outbound.channel_control_offset
        self._log_offset = self._outbound.channel_offset(channel) + self._outbound.channel_log_offset
        inbound = arena.InboundLayout(geometry.sizes)
        base = inbound.channel_offset(channel)
        self._in = base + inbound.channel_control_offset
        self._heap_offset = base + inbound.channel_heap_offset
        self._submits = Ring(
            transport, base + inbound.channel_submit_offset, geometry.submit_slots, arena.SubmitRecord.itemsize
        )
        self._cancels = Ring(
            transport, base + inbound.channel_cancel_offset, geometry.cancel_slots, arena.CancelRecord.itemsize
        )
        self._vocab_size = geometry.vocab_size
        self._telemetry = Range(self._outbound.telemetry_offset, arena.Telemetry.itemsize)
        self.state = LeaseState.VACANT
        self.unknown_records = 0
        self._lease = 0
        self._accepted: int | None = None
        self._reset(0)

    @property
    def tracked(self) -> int:
        """Submissions whose last record has not come."""
        return len(self._sequences)

    @property
    def untaken(self) -> int:
        """Submissions in the ring that the device has not taken, as of the last `poll`."""
        return self._submits.position - self._submit_read if self.state is LeaseState.LIVE else 0

    @property
    def heap(self) -> PromptHeap:
        """The prompt heap's book-keeping."""
        return self._heap

    @property
    def cancels_held(self) -> int:
        """Cancels that wait for the device to take their submission, or for room."""
        return len(self._held_cancels)

    def telemetry(self) -> dict[str, int]:
        """The device's telemetry page."""
        return read_telemetry(self._transport, self._outbound)

    @property
    def descriptor(self) -> int | None:
        """Readable when what was fetched may have arrived; see `Transport`."""
        return self._transport.descriptor

    def take_in(self) -> None:
        """Takes in what was fetched and has come, for nobody to look at yet: the descriptor is readable no more."""
        self._transport.fetched(0)

    def fetch(self) -> None:
        """Asks for what the next `poll` or `take_lease` looks at: the cursors, and then the log behind the last record
        read. Only where the device's memory is far away does this do anything."""
        self._fetch()

    def beat(self, heartbeat: int) -> None:
        """Shows the device that the worker lives; the value must grow from call to call."""
        self._commit("heartbeat", heartbeat)
        self._transport.fetch(self._telemetry)

    def ask_lease(self, heartbeat: int) -> None:
        """Asks for the channel's next lease. The sequences of an earlier one are forgotten."""
        self._lease = self._words().lease + 1
        if self._lease > _NAME_MASK:
            raise ChannelError("the channel has no leases left in this epoch")
        self.beat(heartbeat)
        self._commit("lease", self._lease)
        self.state = LeaseState.ASKED
        self._accepted = None

    def take_lease(self) -> bool:
        """Whether the device has accepted the lease; from then on submissions are possible."""
        words = self._words()
        if words.lease != self._lease or words.live != 1:
            return False
        if self._accepted is None or not self._transport.fetched(self._accepted):
            self._accepted = self._fetch()
            if not self._transport.fetched(self._accepted):
                return False
        words = self._words()  # the other words are at least as new as the lease only in a later read
        self._reset(words.log_start)
        self._submits.start(words.submit_read, self._lease)
        self._cancels.start(words.cancel_read, self._lease)
        self._submit_read = words.submit_read
        self._cancel_read = words.cancel_read
        self._commit("log_read", words.log_start)
        self.state = LeaseState.LIVE
        return True

    def give_back(self) -> None:
        """Ends the lease in order."""
        if self.state is not LeaseState.VACANT:
            self._commit("lease", 0)
            self.state = LeaseState.VACANT

    def close(self) -> None:
        """Lets the arena go. Nothing may be called afterwards."""
        self._transport.close()

    def submit(self, prompt: SharedPrompt, sampling: Sampling) -> int | None:
        """Writes one submission; its position, or None while ring or heap have no room or no lease has been taken."""
        if self.state is not LeaseState.LIVE:
            return None
        if not self._submits.has_room(self._submit_read) or not self._place(prompt):
            return None
        assert prompt.offset is not None
        counts = len(prompt.bias), prompt.ban_words
        payload = submit_payload(prompt.offset, len(prompt.tokens), sampling, *counts)
        position = self._submits.append(payload)
        scored = len(prompt.tokens) - 1 if sampling.prompt_logprobs else 0
        tracked = Tracked(position, prompt, sampling.max_tokens, sampling.logprobs, scored)
        self._sequences[position & _NAME_MASK] = tracked
        self._described += tracked.is_described
        return position

    def cancel(self, position: int) -> None:
        """Asks for the end of a sequence; its last record still comes. Does nothing for one that has ended."""
        tracked = self._sequences.get(position & _NAME_MASK)
        if tracked is None or tracked.position != position or tracked.cancel_wanted:
            return
        tracked.cancel_wanted = True
        self._held_cancels.append(tracked)
        self._send_cancels()

    def poll(self) -> list[News]:
        """What the device said since the last call, one item for each sequence, in order of first record.

        Raises:
            LeaseLostError: the lease is over; nothing of it will be heard again.
            ChannelError: the device's cursors are impossible.
        """
        words = self._words()
        if words.lease != self._lease or words.live != 1:
            self.state = LeaseState.VACANT
            raise LeaseLostError("the device ended this worker's lease")
        self._take_cursors(words)
        before = self._log.position
        plain = None if self._described else self._log.read_plain(words.log_written)
        if plain is not None:
            news = self._sort_plain(*plain)
        else:
            news = self._sort(self._whole(self._log.read(words.log_written)))
        if self._log.position != before:
            self._commit("log_read", self._log.position)
        if self._held_cancels:
            self._send_cancels()
        return news

    def _reset(self, log_start: int) -> None:
        self._sequences: dict[int, Tracked] = {}
        self._described = 0
        self._held_cancels: deque[Tracked] = deque()
        self._heap = PromptHeap(self.geometry.heap_tokens)
        self._submit_read = self._cancel_read = 0
        self._log = TokenLog(self._transport, self._log_offset, self.geometry.log_slots, log_start)

    def _fetch(self) -> int:
        return self._transport.fetch(Range(self._out, CHANNEL_OUT_BYTES), *self._log.ahead())

    def _words(self) -> ChannelOutWords:
        return read_channel_out(self._transport, self._out)

    def _commit(self, field_name: str, word: int) -> None:
        self._transport.commit(self._in + arena.CHANNEL_IN_OFFSETS[field_name], word)

    def _place(self, prompt: SharedPrompt) -> bool:
        if prompt.offset is not None:
            return True
        words = prompt.heap_words()
        offset = self._heap.allocate(len(words) // 4)
        if offset is None:
            return False
        self._transport.write(self._heap_offset + 4 * offset, words)
        prompt.offset = offset
        return True

    def _take_cursors(self, words: ChannelOutWords) -> None:
        if not self._submit_read <= words.submit_read <= self._submits.position:
            raise ChannelError("the device took submissions that were not written")
        if not self._cancel_read <= words.cancel_read <= self._cancels.position:
            raise ChannelError("the device took cancel records that were not written")
        self._submit_read, self._cancel_read = words.submit_read, words.cancel_read

    def _send_cancels(self) -> None:
        if self.state is not LeaseState.LIVE:
            return
        for _ in range(len(self._held_cancels)):
            tracked = self._held_cancels.popleft()
            if self._sequences.get(tracked.position & _NAME_MASK) is not tracked:
                continue
            ready = tracked.position < self._submit_read and self._cancels.has_room(self._cancel_read)
            if ready:
                self._cancels.append(cancel_payload(tracked.position))
            else:
                self._held_cancels.append(tracked)

    def _whole(self, records: list[Record]) -> list[Record]:
        """All but a last token whose log-probabilities are not all there; it is read again in the next call."""
        behind = 0
        while behind < len(records) and records[-1 - behind].kind == arena.RecordKind.LOGPROB:
            behind += 1
        if behind == len(records):
            return records
        last = records[-1 - behind]
        tracked = self._sequences.get(last.sequence) if last.kind in _WITH_LOGPROBS else None
        if tracked is None or behind >= tracked.logprobs:
            return records
        self._log.unread(behind + 1)
        return records[: -1 - behind]

    def _sort_plain(self, sequences: list[int], tokens: list[int]) -> list[News]:
        """Of tokens of which there is nothing else to say, while nobody wants log-probabilities."""
        news: dict[int, News] = {}
        for sequence, token in zip(sequences, tokens, strict=True):
            if not self._took_plain(sequence, token, news):
                self._take(Group(Record(sequence, _TOKEN, _GOES_ON, 0, token), []), news)
        return list(news.values())

    def _sort(self, records: list[Record]) -> list[News]:
        news: dict[int, News] = {}
        groups, orphans = grouped(records)
        self.unknown_records += orphans
        for group in groups:
            sequence, kind, finish, detail, token = group.record
            quick = kind == _TOKEN and finish == _GOES_ON and not detail and not group.logprobs
            if not (quick and self._took_plain(sequence, token, news)):
                self._take(group, news)
        return list(news.values())

    def _took_plain(self, sequence: int, token: int, news: dict[int, News]) -> bool:
        """The quick way for what nearly all records are: a token that is in order and not the last one."""
        tracked = self._sequences.get(sequence)
        if tracked is None or tracked.logprobs or tracked.tokens_left < 1 or token >= self._vocab_size:
            return False
        earlier = news.get(sequence)
        if earlier is None:
            news[sequence] = News(tracked.position, [token])
        elif earlier.finish is arena.Finish.NONE:
            earlier.tokens.append(token)
        else:
            return False
        tracked.tokens_left -= 1
        return True

    def _take(self, group: Group, news: dict[int, News]) -> None:
        sequence = group.record.sequence
        tracked = self._sequences.get(sequence)
        earlier = news.get(sequence)
        if tracked is None or (earlier is not None and earlier.finish is not arena.Finish.NONE):
            self.unknown_records += 1
            return
        merged = news[sequence] = self._judge(tracked, group, earlier or News(tracked.position, []))
        if merged.finish is not arena.Finish.NONE:
            self._ended(tracked)

    def _judge(self, tracked: Tracked, group: Group, earlier: News) -> News:
        record, tokens, logprobs, scored = group.record, earlier.tokens, earlier.logprobs, earlier.prompt_logprobs
        cached = earlier.cached
        fault = self._fault(tracked, group)
        if fault:
            return News(tracked.position, tokens, arena.Finish.ERROR, fault=fault, logprobs=logprobs)
        if record.kind == arena.RecordKind.TOKEN:
            tokens.append(record.token)
            cached = cached or record.detail * self.block_tokens
            if tracked.logprobs:
                logprobs.append(group.logprobs)
            tracked.tokens_left -= 1
        elif record.kind == arena.RecordKind.PROMPT_TOKEN:
            scored.append(group.logprobs)
            tracked.prompt_left -= 1
        finish, kind = arena.Finish(record.finish), arena.RecordKind(record.kind)
        return News(tracked.position, tokens, finish, kind, record.detail, "", logprobs, scored, cached)

    def _fault(self, tracked: Tracked, group: Group) -> str:
        """What about a record and the log-probabilities behind it cannot be, or an empty string."""
        vocab_size = self.geometry.vocab_size
        wanted = tracked.logprobs if group.record.kind in _WITH_LOGPROBS else 0
        return (
            fault_of(group.record, vocab_size, tracked.tokens_left)
            or fault_of_cached(group.record, len(tracked.prompt.tokens), self.block_tokens)
            or fault_of_prompt(group.record, tracked.prompt.tokens, tracked.prompt_left)
            or fault_of_logprobs(group.logprobs, wanted, vocab_size)
        )

    def _ended(self, tracked: Tracked) -> None:
        del self._sequences[tracked.position & _NAME_MASK]
        self._described -= tracked.is_described
        self.release(tracked.prompt)

    def release(self, prompt: SharedPrompt) -> None:
        """One user of the prompt is done with it."""
        prompt.users -= 1
        if prompt.users == 0 and prompt.offset is not None:
            self._heap.free(prompt.offset)
            prompt.offset = None
