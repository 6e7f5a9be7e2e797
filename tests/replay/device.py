"""A scripted device: plays the scheduler's side of the arena, in a thread.

It follows the arena's contract, not the scheduler's code, so that the front end can be tested without a model: what a
sequence says, how fast, and how it ends is up to the test.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from blink_proto import arena
from blink_proto.arena import DeviceState, ErrorCode, Finish, RecordKind
from tests.replay.script import Playing, Script, Submission, logprobs_of

SHM = Path("/dev/shm")
TURN_SECONDS = 0.0005
BLOCK_TOKENS = 16


@dataclass
class Channel:
    """The device's own view of a channel."""

    lease: int = 0
    live: bool = False
    heartbeat: int = -1
    heartbeat_at: float = 0.0
    log_start: int = 0
    log_next: int = 0
    log_read: int = 0
    submit_next: int = 0
    cancel_next: int = 0
    protocol_errors: int = 0
    playing: dict[int, Playing] = field(default_factory=dict)


class ReplayDevice:
    """See the module. Attributes may be changed by the test at any time.

    Attributes:
        script: from a submission to what is said.
        frozen: nothing happens any more, heartbeat included.
        taking: whether submissions are taken.
    """

    def __init__(self, sizes: arena.Sizes, vocab_size: int, window: int, epoch: int = 1) -> None:
        self.sizes, self.vocab_size, self.window, self.epoch = sizes, vocab_size, window, epoch
        self.nonce = secrets.randbits(64)
        self.script: Callable[[Submission], Script] = lambda submission: Script([0])
        self.frozen = False
        self.taking = True
        self.state = DeviceState.RUNNING
        self.lease_timeout = 5.0
        self.submissions: list[Submission] = []
        self.cancelled: list[tuple[int, int]] = []
        self.finished = dict.fromkeys(Finish, 0)
        self.channels = [Channel() for _ in range(sizes.channels)]
        self._in, self._out = arena.InboundLayout(sizes), arena.OutboundLayout(sizes)
        token = secrets.token_hex(8)
        self.names = (f"blink-replay-{token}-in", f"blink-replay-{token}-out")
        self.inbound = _create(self.names[0], self._in.total_bytes)
        self.outbound = _create(self.names[1], self._out.total_bytes)
        self._write_header()
        self._telemetry = self._view(self.outbound, self._out.telemetry_offset, arena.Telemetry)
        self._steps = self._beats = 0
        self._generated = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def playing(self) -> int:
        """Sequences under way."""
        return sum(len(channel.playing) for channel in self.channels)

    def blob(self) -> bytes:
        """The shm transport's blob."""
        return json.dumps({"inbound": f"/{self.names[0]}", "outbound": f"/{self.names[1]}"}).encode()

    def start(self) -> None:
        """Begins to play."""
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and removes the arena's names."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()
        for name in self.names:
            (SHM / name).unlink(missing_ok=True)

    def turn(self) -> None:
        """One step, for tests without the thread."""
        if self.frozen:
            return
        now = time.monotonic()
        for index, channel in enumerate(self.channels):
            self._watch(index, channel, now)
            if channel.live:
                self._take_submissions(index, channel, now)
                self._take_cancels(index, channel)
                self._speak(index, channel, now)
            self._write_words(index, channel)
        self._write_telemetry()

    def write_record(self, index: int, head: int, body: int) -> None:
        """Any record at all at the next place of a channel's log; the words get their laps."""
        channel = self.channels[index]
        lap = 1 + channel.log_next // self.sizes.log_slots % 0xFFFF
        offset = self._out.channel_offset(index) + self._out.channel_log_offset
        record = self._view(self.outbound, offset + channel.log_next % self.sizes.log_slots * 16, arena.TokenRecord)
        record["body"] = body | lap
        record["head"] = head | lap
        channel.log_next += 1

    def _run(self) -> None:
        while not self._stopped.wait(TURN_SECONDS):
            self.turn()

    def _watch(self, index: int, channel: Channel, now: float) -> None:
        words = self._view(self.inbound, self._in.channel_offset(index), arena.ChannelIn)
        lease, beat, read = (int(words[name]) for name in ("lease", "heartbeat", "log_read"))
        if lease == channel.lease + 1:
            self._wipe(index, inbound=True)
            channel.lease, channel.live = lease, True
            channel.log_start = channel.log_read = channel.log_next
            channel.playing.clear()
            channel.heartbeat, channel.heartbeat_at = beat, now
        elif lease == 0 and channel.live:
            self._end_lease(index, channel)
        if not channel.live:
            return
        if beat != channel.heartbeat:
            channel.heartbeat, channel.heartbeat_at = beat, now
        elif now - channel.heartbeat_at > self.lease_timeout:
            self._end_lease(index, channel)
        if channel.log_read <= read <= channel.log_next:
            channel.log_read = read
        elif read > channel.log_next:
            channel.protocol_errors += 1

    def _wipe(self, index: int, inbound: bool = False) -> None:
        """The log of a lease that has ended; rings and heap for one that begins."""
        log = self._out.channel_offset(index) + self._out.channel_log_offset
        np.frombuffer(self.outbound, np.uint8, 16 * self.sizes.log_slots, log)[:] = 0
        if inbound:
            start, end = self._in.channel_submit_offset, self._in.channel_bytes
            np.frombuffer(self.inbound, np.uint8, end - start, self._in.channel_offset(index) + start)[:] = 0

    def _end_lease(self, index: int, channel: Channel) -> None:
        self._wipe(index)
        channel.live = False
        channel.playing.clear()

    def _take_submissions(self, index: int, channel: Channel, now: float) -> None:
        while self.taking and self.state is DeviceState.RUNNING:
            slots = self.sizes.submit_slots
            at = self._in.channel_offset(index) + self._in.channel_submit_offset
            record = self._view(self.inbound, at + channel.submit_next % slots * 128, arena.SubmitRecord)
            if int(record["commit"]) != self._commit(channel, channel.submit_next, slots):
                return
            submission = self._submission(index, channel.submit_next, record)
            script = self.script(submission)
            channel.playing[channel.submit_next] = Playing(submission, script, now + script.delay)
            self.submissions.append(submission)
            channel.submit_next += 1

    def _submission(self, index: int, position: int, record: Any) -> Submission:
        start, count = int(record["prompt_offset"]), int(record["prompt_tokens"])
        assert count >= 1
        assert start + count <= self.sizes.heap_tokens
        heap = self._in.channel_offset(index) + self._in.channel_heap_offset + 4 * start
        prompt = tuple(np.frombuffer(self.inbound, "<u4", count, heap).tolist())
        integers = ("max_tokens", "top_k", "seed", "flags", "min_tokens", "logprobs", "priority", "cache_salt")
        numbers = {name: int(record[name]) for name in integers}
        penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
        floats = {name: float(record[name]) for name in ("temperature", "top_p", "min_p", *penalties)}
        stops = tuple(record["stop_tokens"][: int(record["stop_count"])].tolist())
        start, count = int(record["bias_offset"]), int(record["bias_count"])
        bans = self._bans(index, start + 2 * count, int(record["ban_words"]))
        lists = {"prompt": prompt, "stop_tokens": stops, "bias": self._bias(index, start, count), "bans": bans}
        return Submission(channel=index, position=position, **lists, **numbers, **floats)

    def _bias(self, index: int, start: int, count: int) -> tuple[tuple[int, float], ...]:
        assert start + 2 * count <= self.sizes.heap_tokens
        heap = self._in.channel_offset(index) + self._in.channel_heap_offset + 4 * start
        words = np.frombuffer(self.inbound, "<u4", 2 * count, heap)
        return tuple(zip(words[::2].tolist(), words[1::2].view("<f4").tolist(), strict=True))

    def _bans(self, index: int, start: int, count: int) -> tuple[tuple[int, ...], ...]:
        assert start + count <= self.sizes.heap_tokens
        heap = self._in.channel_offset(index) + self._in.channel_heap_offset + 4 * start
        words, bans = np.frombuffer(self.inbound, "<u4", count, heap).tolist(), []
        while words:
            length = words[0] - arena.BAN_LENGTH
            assert 2 <= length < len(words)
            bans.append(tuple(words[1 : 1 + length]))
            words = words[1 + length :]
        return tuple(bans)

    def _take_cancels(self, index: int, channel: Channel) -> None:
        slots = self.sizes.cancel_slots
        at = self._in.channel_offset(index) + self._in.channel_cancel_offset
        while True:
            record = self._view(self.inbound, at + channel.cancel_next % slots * 16, arena.CancelRecord)
            if int(record["commit"]) != self._commit(channel, channel.cancel_next, slots):
                return
            channel.cancel_next += 1
            target = int(record["target"])
            if target >= channel.submit_next:
                channel.protocol_errors += 1
                continue
            self.cancelled.append((index, target))
            if channel.playing.pop(target, None):
                self._say(index, target, RecordKind.END, Finish.CANCELLED, 0)

    def _speak(self, index: int, channel: Channel, now: float) -> None:
        for position, playing in list(channel.playing.items()):
            needed = 1 + playing.submission.logprobs + (playing.submission.max_tokens == 0)
            while now >= playing.due and channel.log_next - channel.log_read + needed <= self.sizes.log_slots:
                if playing.scores and not playing.script.reject:
                    self._score(index, position, playing)
                    continue
                if not self._next(index, position, playing):
                    break
                playing.due = playing.due + playing.script.every
                if position not in channel.playing or playing.script.every:
                    break

    def _score(self, index: int, position: int, playing: Playing) -> None:
        submission, place = playing.submission, playing.scored
        playing.scored += 1
        self._say(index, position, RecordKind.PROMPT_TOKEN, Finish.NONE, submission.prompt[place])
        scripted, tokens = playing.script.prompt_logprobs, submission.prompt[1:]
        self._say_logprobs(index, logprobs_of(scripted, tokens, place - 1, submission.logprobs))

    def _next(self, index: int, position: int, playing: Playing) -> bool:
        script, wanted = playing.script, playing.submission.max_tokens
        if script.reject:
            self._over(index, position, RecordKind.REJECT, Finish.ERROR, 0, script.error)
        elif wanted == 0:
            self._over(index, position, RecordKind.END, Finish.LENGTH, 0, ErrorCode.NONE)
        elif playing.said < len(script.tokens):
            token = script.tokens[playing.said]
            playing.said += 1
            last = playing.said == len(script.tokens) and not script.end_apart
            finish = script.finish if last else Finish.NONE
            if finish is Finish.NONE and playing.said == wanted:
                finish = Finish.LENGTH
            found = script.found if playing.said == 1 else 0
            if finish is Finish.NONE:
                self._say(index, position, RecordKind.TOKEN, finish, token, found)
            else:
                self._over(index, position, RecordKind.TOKEN, finish, token, found)
            count = playing.submission.logprobs
            self._say_logprobs(index, logprobs_of(script.logprobs, script.tokens, playing.said - 1, count))
            self._generated += 1
        elif script.end_apart and script.finish is not Finish.NONE:
            self._over(index, position, RecordKind.END, script.finish, 0, script.error)
        else:
            return False
        self._steps += 1
        return True

    def _say_logprobs(self, index: int, logprobs: list[tuple[int, float]]) -> None:
        for k, (token, logprob) in enumerate(logprobs):
            bits = int(np.float32(logprob).view(np.uint32))
            head = arena.pack_logprob_head(0, RecordKind.LOGPROB, k or 3, bits)
            self.write_record(index, head, arena.pack_logprob_body(0, 0, token))

    def _over(self, index: int, position: int, kind: RecordKind, finish: Finish, token: int, detail: int) -> None:
        del self.channels[index].playing[position]
        self._say(index, position, kind, finish, token, detail)

    def _say(self, index: int, position: int, kind: int, finish: int, token: int, detail: int = 0) -> None:
        head = arena.pack_token_head(0, kind, finish, position)
        self.write_record(index, head, arena.pack_token_body(0, detail, token))
        self.finished[Finish(finish)] += 1

    def _commit(self, channel: Channel, position: int, slots: int) -> int:
        return arena.pack_commit_word(1 + position // slots % 0xFFFFFFFF, channel.lease)

    def _write_words(self, index: int, channel: Channel) -> None:
        words = self._view(self.outbound, self._out.channel_offset(index), arena.ChannelOut)
        words["log_start"] = channel.log_start
        words["log_written"] = channel.log_next
        words["submit_read"] = channel.submit_next
        words["cancel_read"] = channel.cancel_next
        words["protocol_errors"] = channel.protocol_errors
        words["lease"] = channel.lease
        words["live"] = int(channel.live)

    def _write_telemetry(self) -> None:
        page = self._telemetry
        page["state"] = int(self.state)
        page["steps"] = self._steps
        page["running"] = self.playing
        page["blocks_total"] = 100
        page["blocks_used"] = self.playing
        page["generated_tokens"] = self._generated
        for finish in (Finish.STOP, Finish.LENGTH, Finish.CANCELLED, Finish.ERROR):
            page[f"finished_{finish.name.lower()}"] = self.finished[finish]
        self._beats += 1
        page["heartbeat"] = self._beats

    def _write_header(self) -> None:
        header = self._view(self.outbound, self._out.header_offset, arena.ArenaHeader)
        header["version"], header["byte_order"] = arena.VERSION, arena.BYTE_ORDER_MARK
        header["layout_hash"], header["nonce"], header["epoch"] = arena.LAYOUT_HASH, self.nonce, self.epoch
        for name in ("channels", "submit_slots", "cancel_slots", "log_slots", "heap_tokens"):
            header[name] = getattr(self.sizes, name)
        header["vocab_size"] = self.vocab_size
        header["max_model_tokens"] = header["max_sequence_tokens"] = self.window
        header["block_tokens"] = BLOCK_TOKENS
        header["inbound_bytes"], header["outbound_bytes"] = self._in.total_bytes, self._out.total_bytes
        header["magic"] = arena.MAGIC

    @staticmethod
    def _view(region: mmap.mmap, offset: int, kind: np.dtype[np.void]) -> Any:
        return np.frombuffer(region, kind, 1, offset).reshape(())


def _create(name: str, size: int) -> mmap.mmap:
    descriptor = os.open(SHM / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.ftruncate(descriptor, size)
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)
