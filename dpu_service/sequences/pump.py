"""The asyncio side of a channel: queues what does not fit yet, polls while sequences run, delivers the news."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from functools import partial

from blink_proto.arena import ErrorCode, Finish, RecordKind
from dpu_service.channel.client import ChannelClient, LeaseState
from dpu_service.channel.errors import ChannelError, LeaseLostError
from dpu_service.channel.news import News
from dpu_service.channel.prompt import SharedPrompt
from dpu_service.channel.rings import Sampling
from dpu_service.sequences.alarm import Alarm
from dpu_service.sequences.errors import (
    DeviceUnavailableError,
    QueueFullError,
    SequenceLostError,
    SequencesError,
)
from dpu_service.sequences.health import DeviceHealth, HeartbeatWatch
from dpu_service.sequences.inbox import Inbox, Listener
from dpu_service.sequences.rhythm import Rhythm
from dpu_service.transport.base import TransportError

log = logging.getLogger(__name__)

BEAT_SECONDS = 0.5
ASK_AGAIN_SECONDS = 2.0
TOGETHER = 32
"""Requests that take their news before the first of them sends (see `Listener`); more would only let it wait longer."""
_SOUND = (Finish.NONE, Finish.STOP, Finish.LENGTH)


@dataclass(frozen=True)
class Wanted:
    """One prompt and the sequences that it should start, one for each entry of `samplings`, all with one bias and the
    same banned sequences of tokens."""

    prompt: Items[int]
    samplings: list[Sampling]
    bias: Items[tuple[int, float]] = ()
    bans: Items[Items[int]] = ()


@dataclass(eq=False, slots=True)
class Running:
    """A sequence from its request to its last record."""

    number: int
    prompt: SharedPrompt
    sampling: Sampling
    inbox: Inbox
    position: int | None = None
    started: bool = False
    over: bool = False
    cached: int | None = None
    """Tokens of the prompt that the device had in its prefix cache; None before the first token."""
    abandoned: bool = field(default=False, repr=False)


class Pump:
    """Owns a channel client.

    Args:
        client: with no lease yet.
        queue_depth: sequences that may wait for their first token.
        device_timeout: seconds without a heartbeat of the device.
        on_change: called when `ready` may have changed.
        on_broken: called once when the connection to the arena has failed; the pump has ended then.
    """

    def __init__(
        self,
        client: ChannelClient,
        queue_depth: int,
        device_timeout: float,
        on_change: Callable[[], None] = lambda: None,
        on_broken: Callable[[], None] = lambda: None,
    ) -> None:
        self.client = client
        self.queue_depth = queue_depth
        self.health = DeviceHealth.STARTING
        self._heartbeats = HeartbeatWatch(device_timeout, time.monotonic())
        self._queue: deque[Running] = deque()
        self._by_position: dict[int, Running] = {}
        self._not_started = 0
        self._wakeup = asyncio.Event()
        self._rhythm = Rhythm()
        self._last_beat = 0.0
        self._asked = 0.0
        self._on_change = on_change
        self._on_broken = on_broken
        self._closed = False
        self.faults = 0
        self.leases = 0

    @property
    def ready(self) -> bool:
        """Whether a submission would be taken."""
        return self.client.state is LeaseState.LIVE and self.health is DeviceHealth.READY

    @property
    def waiting(self) -> int:
        """Sequences without a first token, here and on the device."""
        return self._not_started

    @property
    def unsent(self) -> int:
        """Sequences that the device has not taken: in the queue or in the submit ring."""
        return len(self._queue) + self.client.untaken

    @property
    def full(self) -> bool:
        """Whether not even one more sequence may wait."""
        return not self.has_room(1)

    def has_room(self, count: int) -> bool:
        """Whether so many more sequences may wait."""
        return self._not_started + count <= self.queue_depth

    @property
    def in_flight(self) -> int:
        """Sequences that have not ended."""
        return len(self._queue) + len(self._by_position)

    @property
    def seconds_silent(self) -> float:
        """Since the device's last heartbeat, as of the worker's own last beat."""
        return self._heartbeats.seconds_silent

    def request(self, wanted: list[Wanted], inbox: Inbox) -> list[Running]:
        """Starts sequences, numbered from 0 in order of `wanted`; all or none.

        Raises:
            DeviceUnavailableError: no device takes submissions.
            QueueFullError: they do not fit into the queue.
        """
        if not self.ready:
            raise DeviceUnavailableError(f"the device is not ready ({self.describe()})")
        count = sum(len(one.samplings) for one in wanted)
        if not self.has_room(count):
            raise QueueFullError("too many requests are waiting; try again later")
        made: list[Running] = []
        for one in wanted:
            prompt = SharedPrompt(one.prompt, len(one.samplings), bias=one.bias, bans=one.bans)
            made += [Running(len(made) + i, prompt, sampling, inbox) for i, sampling in enumerate(one.samplings)]
        self._queue.extend(made)
        self._not_started += count
        self._guarded(self._submit_queued)
        self._rhythm.start(time.monotonic())
        self._wakeup.set()
        return made

    def abandon(self, sequences: list[Running]) -> None:
        """Nobody wants these any more: those that have not ended are cancelled."""
        for sequence in sequences:
            if sequence.over or sequence.abandoned:
                continue
            sequence.abandoned = True
            if sequence.position is None:
                self._queue.remove(sequence)
                self._end(sequence)
                self.client.release(sequence.prompt)
            else:
                self._guarded(partial(self.client.cancel, sequence.position))
        self._wakeup.set()

    def describe(self) -> str:
        """Why the device is or is not ready, in words for people."""
        if self.client.state is not LeaseState.LIVE and not self.health.is_lost:
            return "waiting for the channel"
        return self.health.value

    async def run(self) -> None:
        """Polls until closed, or the connection has failed."""
        descriptor = self.client.descriptor
        if descriptor is not None:
            asyncio.get_running_loop().add_reader(descriptor, self._take_arrivals)
        with Alarm() as alarm:
            while not self._closed:
                self._guarded(self._turn)
                if not self._closed:
                    await self._pause(alarm)

    def close(self, failure: SequencesError) -> None:
        """Ends every sequence with `failure` and lets the channel go."""
        if self._closed:
            return
        self._fail_all(failure)
        try:
            self.client.give_back()
        except TransportError:
            log.info("could not give the channel back: the connection has failed")
        self._end_pumping()

    def _end_pumping(self) -> None:
        self._closed = True
        self._wakeup.set()
        descriptor = self.client.descriptor
        if descriptor is not None:
            asyncio.get_running_loop().remove_reader(descriptor)
        self.client.close()

    def _take_arrivals(self) -> None:
        """What was fetched has come, in the middle of a pause."""
        if self.client.state is LeaseState.LIVE:
            self._guarded(lambda: self._take_news(time.monotonic()))
        elif self.client.state is LeaseState.ASKED:
            self._guarded(lambda: self._take_lease(time.monotonic()))
        else:  # the lease was lost meanwhile; what stays in the descriptor would be told again and again
            self._guarded(self.client.take_in)

    def _guarded(self, step: Callable[[], None]) -> None:
        try:
            step()
        except (LeaseLostError, ChannelError) as error:
            self._guarded(partial(self._lose, str(error)))
        except TransportError as error:
            self._break(str(error))

    def fail_all(self, failure: SequencesError) -> None:
        """Ends every request with `failure`; their sequences are cancelled on the device."""
        for sequence in [*self._queue, *self._by_position.values()]:
            sequence.inbox.fail(failure)
        self.abandon([*self._queue, *self._by_position.values()])

    def _turn(self) -> None:
        now = time.monotonic()
        if now - self._last_beat >= BEAT_SECONDS:
            self._beat(now)
        if self.client.state is LeaseState.VACANT:
            self.client.ask_lease(time.monotonic_ns())
            self._asked = now
        elif self.client.state is LeaseState.ASKED:
            self._take_lease(now)
        else:
            self._take_news(now)
            self._submit_queued()
        self.client.fetch()

    def _take_news(self, now: float) -> None:
        news = self.client.poll()
        if news:
            self._rhythm.news(now)
            self._deliver(news)

    def _take_lease(self, now: float) -> None:
        if self.client.take_lease():
            self.leases += 1
            self._on_change()
        elif now - self._asked >= ASK_AGAIN_SECONDS:  # it may have been accepted and lost again unseen
            self.client.ask_lease(time.monotonic_ns())
            self._asked = now

    def _beat(self, now: float) -> None:
        self._last_beat = now
        self.client.beat(time.monotonic_ns())
        health = self._heartbeats.judge(self.client.telemetry(), now)
        if health is self.health:
            return
        log.info("device health", extra={"fields": {"from": self.health.value, "to": health.value}})
        self.health = health
        if health.is_lost:
            if self.client.state is LeaseState.LIVE:
                self._take_news(now)  # what the device wrote before it ended counts
            self.fail_all(DeviceUnavailableError(f"the device is gone ({health.value})"))
        self._on_change()

    async def _pause(self, alarm: Alarm) -> None:
        if self.client.state is LeaseState.VACANT:  # lost just now: do not fight over it
            await asyncio.sleep(BEAT_SECONDS)
            return
        busy = self.in_flight or self.client.cancels_held
        if busy or self.client.state is not LeaseState.LIVE:
            if self.health.is_lost:
                await asyncio.sleep(BEAT_SECONDS / 5)
                return
            await alarm.sleep(self._rhythm.wait(time.monotonic()))
            return
        self._wakeup.clear()
        try:
            async with asyncio.timeout(BEAT_SECONDS):
                await self._wakeup.wait()
        except TimeoutError:
            return

    def _submit_queued(self) -> None:
        while self._queue:
            sequence = self._queue[0]
            position = self.client.submit(sequence.prompt, sequence.sampling)
            if position is None:
                return
            self._queue.popleft()
            sequence.position = position
            self._by_position[position] = sequence

    def _deliver(self, news: list[News]) -> None:
        speakers: dict[Listener, None] = {}
        for item in news:
            sequence = self._by_position.get(item.position)
            if sequence is None:
                continue
            if not sequence.started and item.tokens:
                sequence.cached = item.cached
            if item.finish is not Finish.NONE:
                del self._by_position[item.position]
                self._end(sequence)
            elif not sequence.started:
                self._start(sequence)
            if sequence.abandoned:
                continue
            if item.finish in _SOUND:
                listener = sequence.inbox.put(sequence.number, item)
            else:
                listener = self._fail(sequence, item)
            if listener is not None:
                speakers[listener] = None
                if len(speakers) == TOGETHER:
                    _let_send(speakers)
        _let_send(speakers)

    def _fail(self, sequence: Running, item: News) -> Listener | None:
        """Tokens before an error count; who took them."""
        listener = None
        if item.tokens or item.prompt_logprobs:
            sound = News(item.position, item.tokens, logprobs=item.logprobs, prompt_logprobs=item.prompt_logprobs)
            listener = sequence.inbox.put(sequence.number, sound)
        sequence.inbox.fail(self._failure_of(item))
        return listener

    def _failure_of(self, item: News) -> SequencesError:
        if item.fault:
            self.faults += 1
            log.error("the device wrote an impossible record", extra={"fields": {"fault": item.fault}})
            return SequenceLostError("the device answered with an impossible record")
        if item.finish is Finish.CANCELLED:
            return SequenceLostError("the device cancelled the sequence")
        name = ErrorCode(item.detail).name if item.detail in ErrorCode._value2member_map_ else str(item.detail)
        verb = "refused" if item.kind is RecordKind.REJECT else "ended"
        log.error("the device %s a sequence", verb, extra={"fields": {"code": name}})
        return SequenceLostError(f"the device {verb} the sequence ({name})")

    def _start(self, sequence: Running) -> None:
        sequence.started = True
        self._not_started -= 1
        sequence.inbox.on_start()

    def _end(self, sequence: Running) -> None:
        if not sequence.started:
            self._start(sequence)
        sequence.over = True

    def _break(self, reason: str) -> None:
        if self._closed:
            return
        log.error("lost the connection to the arena", extra={"fields": {"reason": reason}})
        self._fail_all(DeviceUnavailableError("the connection to the device was lost"))
        self.client.state = LeaseState.VACANT
        self._end_pumping()
        self._on_change()
        self._on_broken()

    def _lose(self, reason: str) -> None:
        log.error("lost the channel", extra={"fields": {"reason": reason}})
        self.client.give_back()
        self._fail_all(DeviceUnavailableError("the device lost the sequence"))
        self._on_change()

    def _fail_all(self, failure: SequencesError) -> None:
        sequences = [*self._queue, *self._by_position.values()]
        self._queue.clear()
        self._by_position.clear()
        for sequence in sequences:
            self._end(sequence)
            sequence.inbox.fail(failure)


def _let_send(speakers: dict[Listener, None]) -> None:
    for listener in speakers:
        listener.send()
    speakers.clear()
