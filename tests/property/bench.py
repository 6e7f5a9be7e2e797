"""Hand-written histories: the twin or the core alone, driven step by step with everything spelled out."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from blink_proto import arena
from gpu_runtime.scheduler import layout
from gpu_runtime.scheduler.host import HostScheduler
from tests.property.limits import Inbound, Limits, Outbound
from tests.property.twin import Logprob, SchedulerTwin
from tests.property.worker import Worker

Share = tuple[int, int, int, int, bool]
"""A work: channel, position of the submission, first token's position, tokens, whether it samples."""

Record = tuple[str, str, str, int, int]
"""A token record: kind, finish, error, sequence, token; of a LOGPROB record: kind, logprob, "", rank, token."""


class Engine(Protocol):
    """What both have in common."""

    outbound: Outbound

    def step(self, sampled: list[int], now_ns: int, command: int, logprobs: list[list[Logprob]] | None) -> list[Share]:
        """One step."""
        ...

    def row_flags(self) -> list[int]:
        """`SampleRow.flags` of the planned rows."""
        ...


class TwinEngine:
    """The twin."""

    def __init__(self, limits: Limits, inbound: Inbound) -> None:
        self.twin = SchedulerTwin(limits, inbound)
        self.outbound = self.twin.outbound

    def step(self, sampled: list[int], now_ns: int, command: int, logprobs: list[list[Logprob]] | None) -> list[Share]:
        """One step."""
        plan = self.twin.step(sampled, now_ns, command, logprobs)
        return [
            (work.sequence.channel, work.sequence.position, work.start, work.query_tokens, work.row is not None)
            for work in plan.works
        ]

    def row_flags(self) -> list[int]:
        """`SampleRow.flags` of the planned rows."""
        return [row.flags for row in self.twin.plan.rows]


class CoreEngine:
    """The C++ core."""

    def __init__(self, limits: Limits, inbound: Inbound) -> None:
        self.outbound = Outbound(limits.sizes)
        self.core = HostScheduler(limits.record(), inbound.bytes, self.outbound.bytes)

    def step(self, sampled: list[int], now_ns: int, command: int, logprobs: list[list[Logprob]] | None) -> list[Share]:
        """One step."""
        for row, entries in zip(self.core.plan().logprobs, logprobs or [], strict=False):
            row["rank"] = entries[0][2] if entries else 0
            for at, (token, bits, _) in enumerate(entries):
                row["tokens"][at], row["logprobs"].view(np.uint32)[at] = token, bits
        plan = self.core.step(sampled, now_ns, command)
        self.core.audit()
        return [
            (channel, position, context - query, query, row != 2**32 - 1)
            for _, _, query, context, row, channel, position in plan.works.tolist()
        ]

    def row_flags(self) -> list[int]:
        """`SampleRow.flags` of the planned rows."""
        return [int(flags) for flags in self.core.plan().rows["flags"]]


class Bench:
    """One engine, its workers (all leases taken), a clock in nanoseconds."""

    def __init__(self, engine: type[TwinEngine] | type[CoreEngine], leased: bool = True, **limits: Any) -> None:
        self.limits = Limits(**limits)
        self.inbound = Inbound(self.limits.sizes)
        self.engine = engine(self.limits, self.inbound)
        self.now_ns = 5_000
        self.command: int = layout.Command.RUN
        channels = range(self.limits.channels)
        self.workers = [Worker(self.limits, self.inbound, self.engine.outbound, each) for each in channels]
        if leased:
            for worker in self.workers:
                worker.ask()
            self.step()
            for worker in self.workers:
                worker.after_step()

    def step(self, *sampled: int, logprobs: list[list[Logprob]] | None = None) -> list[Share]:
        """One step; the tokens that the last one sampled, and their log-probabilities."""
        return self.engine.step(list(sampled), self.now_ns, self.command, logprobs)

    def submit(self, prompt: list[int], max_tokens: int, channel: int = 0, offset: int = 0, **fields: Any) -> None:
        """Submits; `stops` and any field of SubmitRecord may be given."""
        worker = self.workers[channel]
        worker.write_prompt(offset, prompt)
        record = np.zeros((), arena.SubmitRecord)
        record["prompt_offset"], record["prompt_tokens"], record["max_tokens"] = offset, len(prompt), max_tokens
        record["top_p"] = 1
        stops = fields.pop("stops", ())
        record["stop_count"], record["stop_tokens"][: len(stops)] = len(stops), stops
        for name, value in fields.items():
            record[name] = value
        worker.submit(record)

    def records(self, channel: int = 0, start: int = 0) -> list[Record]:
        """The log's records from a position on."""
        return [self._record(channel, at) for at in range(start, self.out("log_written", channel))]

    def _record(self, channel: int, position: int) -> Record:
        head, body = self.engine.outbound.token_record(channel, position)
        lap, kind, finish, sequence = arena.unpack_token_head(head)
        body_lap, detail, token = arena.unpack_token_body(body)
        assert lap == body_lap == 1 + position // self.limits.log_slots % 65535
        if kind == arena.RecordKind.LOGPROB:
            _, _, rank_low, bits = arena.unpack_logprob_head(head)
            return ("LOGPROB", f"{np.uint32(bits).view(np.float32):g}", "", detail * 256 + rank_low, token)
        names = arena.RecordKind(kind).name, arena.Finish(finish).name, arena.ErrorCode(detail).name
        return (*names, sequence, token)

    def read(self, channel: int = 0) -> None:
        """Publishes that all records were read."""
        self.workers[channel].write_log_read(self.out("log_written", channel))

    def out(self, name: str, channel: int = 0) -> int:
        """A field of ChannelOut."""
        return self.engine.outbound.control(channel, name)

    def telemetry(self, *names: str) -> tuple[int, ...]:
        """Fields of the telemetry page."""
        return tuple(self.engine.outbound.telemetry(name) for name in names)
