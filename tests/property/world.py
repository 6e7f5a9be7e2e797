"""One history: workers that act on a shared inbound region, the core and the twin side by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import numpy as np

from blink_proto.arena import RecordKind
from gpu_runtime.scheduler import host
from gpu_runtime.scheduler.host import HostScheduler
from gpu_runtime.scheduler.layout import Command, RowFlag
from tests.property.compare import assert_same_outbound, assert_same_plan
from tests.property.kv_model import KvModel, Owner
from tests.property.limits import Inbound, Limits, Outbound
from tests.property.twin import Logprob, SchedulerTwin, Stage
from tests.property.worker import Worker, next_in_text

MILLISECOND = 1_000_000


def as_read(groups: list[list[Logprob]]) -> list[list[Logprob]]:
    """Log-probabilities as a front end reads them: of ranks 1, 2, … after the token's own."""
    return [
        [(token, bits, min(at or rank, 2**24 - 1)) for at, (token, bits, rank) in enumerate(logprobs)]
        for logprobs in groups
    ]


@dataclass(frozen=True)
class Action:
    """Something that happens: `a` and `b` are small numbers that the action makes sense of."""

    kind: str
    channel: int = 0
    a: int = 0
    b: int = 0


class World:
    """Applies actions; `step` compares everything."""

    def __init__(
        self, limits: Limits, twin_type: type[SchedulerTwin] = SchedulerTwin, check_polls: bool = False
    ) -> None:
        self.limits = limits
        self.check_polls = check_polls
        self.inbound, self.outbound = Inbound(limits.sizes), Outbound(limits.sizes)
        self.core = HostScheduler(limits.record(), self.inbound.bytes, self.outbound.bytes)
        self.twin_inbound = Inbound(limits.sizes)
        """As the core found it: both wipe it."""
        self.twin = twin_type(limits, self.twin_inbound)
        self.workers = [Worker(limits, self.inbound, self.outbound, channel) for channel in range(limits.channels)]
        self.kv = KvModel(limits, self._salt_of)
        self.now_ns = 1_000 * MILLISECOND
        self.command = Command.RUN
        self.last_command = Command.RUN
        self.started = False
        self.was_live = [False] * limits.channels
        self.sampled: list[int] = []
        self.sampling: list[tuple[Owner, bool]] = []
        """Whose the planned rows are, and whether their tokens are known."""
        self.logprobs: list[list[Logprob]] = []
        self.given: dict[Owner, list[tuple[int, list[Logprob]]]] = {}
        self.scored: dict[Owner, list[list[Logprob]]] = {}
        self.ran_before: set[Owner] = set()
        self.first_seen: dict[tuple[int, int], int] = {}

    def apply(self, action: Action) -> None:
        """Does it."""
        does: Callable[[Worker, int, int], None] = getattr(self, f"do_{action.kind}")
        does(self.workers[action.channel % self.limits.channels], action.a, action.b)

    # what workers do

    def do_ask(self, worker: Worker, a: int, b: int) -> None:
        """Asks for a lease where there is none, sometimes in any case."""
        if not worker.live or a % 4 == 0:
            worker.ask()

    def do_wrong_lease(self, worker: Worker, a: int, b: int) -> None:
        """Any lease word."""
        worker.write_lease([worker.lease - 1, worker.lease + 2, worker.lease, 2**64 - 1, 2**32 + worker.lease][a % 5])

    def do_give_back(self, worker: Worker, a: int, b: int) -> None:
        """Gives the channel back."""
        worker.write_lease(0)

    def do_mute(self, worker: Worker, a: int, b: int) -> None:
        """Stops or resumes the heartbeat."""
        worker.muted = a % 3 != 0

    def do_submit(self, worker: Worker, a: int, b: int) -> None:
        """A valid submission."""
        worker.submit(worker.good_record(Random(a), b % 3 == 0))

    def do_submit_bad(self, worker: Worker, a: int, b: int) -> None:
        """A bad submission."""
        worker.submit(worker.bad_record(Random(a), b))

    def do_submit_bytes(self, worker: Worker, a: int, b: int) -> None:
        """Random bytes with the right commit word."""
        rng = Random(a)
        record = worker.good_record(rng, long=True)
        raw = bytearray(record.tobytes())
        for _ in range(1 + b % 16):
            raw[rng.randrange(120)] = rng.choice([0, 1, 255, rng.randrange(256)])
        worker.submit(np.frombuffer(bytes(raw), record.dtype)[0])

    def do_submit_torn(self, worker: Worker, a: int, b: int) -> None:
        """A record with a wrong commit word; the worker may complete it by its next submission."""
        worker.write_record(worker.good_record(Random(a), long=False), worker.submit_position)
        lap_shift, lease_shift = [(-1, 0), (1, 0), (0, -1), (0, 1)][b % 4]
        worker.commit(worker.submit_position, lap_shift, lease_shift)

    def do_overrun(self, worker: Worker, a: int, b: int) -> None:
        """Writes over records that the scheduler may not have taken, ahead of its position."""
        position = worker.submit_position + b % (2 * self.limits.submit_slots)
        worker.write_record(worker.good_record(Random(a), long=False), position)
        worker.commit(position)

    def do_plant(self, worker: Worker, a: int, b: int) -> None:
        """Leaves records for whoever gets one of the next leases."""
        rng = Random(a)
        count = 1 + a % min(self.limits.submit_slots, self.limits.cancel_slots)
        worker.plant([worker.good_record(rng, long=False) for _ in range(count)], 1 + b % 2)

    def do_cancel(self, worker: Worker, a: int, b: int) -> None:
        """Cancels a submission of this lease: early, late, again."""
        first, end = worker.first_position, worker.submit_position
        worker.cancel(first + a % max(1, end - first) if b % 2 else max(0, end - 1 - a % 4))

    def do_cancel_bad(self, worker: Worker, a: int, b: int) -> None:
        """Cancels what is not there."""
        targets = [worker.submit_position + a % 3, 2**64 - 1, 2**32 + worker.first_position, a, worker.first_position]
        worker.cancel(targets[b % 5], lap_shift=(a % 5 == 0) * (1 - 2 * (b % 2)))

    def do_read(self, worker: Worker, a: int, b: int) -> None:
        """Reads some of the log."""
        start, expected = worker.read_position, self.twin.channels[worker.channel].history
        found = worker.read(1 + a % 8 if b % 4 else 1 << 30)
        assert found == expected[start : start + len(found)]

    def do_wrong_read(self, worker: Worker, a: int, b: int) -> None:
        """Any read cursor; one within the unread records gives those away."""
        written = worker.out("log_written")
        worker.write_log_read([written + 1 + a % 4, 2**64 - 1, max(0, worker.read_position - a % 4), 0][b % 4])

    def do_scribble(self, worker: Worker, a: int, b: int) -> None:
        """Changes the whole prompt heap."""
        worker.scribble(Random(a))

    def do_noise(self, worker: Worker, a: int, b: int) -> None:
        """Random words into control words and rings."""
        worker.noise(Random(a))

    def do_command(self, worker: Worker, a: int, b: int) -> None:
        """Drains or runs."""
        self.command = Command.DRAIN if a % 3 == 0 else Command.RUN

    def do_step(self, worker: Worker, a: int, b: int) -> None:
        """One step, usually soon after the last one."""
        timeout = self.limits.lease_timeout_ns
        self.now_ns += [MILLISECOND, timeout // 2, timeout, 0][b % 4 if b % 11 == 0 else 0]
        self.step(Random(a))

    # a step

    def step(self, rng: Random, faults: bool = True) -> host.Plan:
        """Steps both, compares, checks the invariants, samples for the next step."""
        for worker in self.workers:
            worker.before_step()
        self._note_given()
        quiet = self.check_polls and self._quiet()
        before = self.outbound.bytes.tobytes() if quiet else b""
        self.twin_inbound.bytes[:] = self.inbound.bytes
        plan = self.core.step(np.array(self.sampled, np.int32), self.now_ns, self.command)
        expected = self.twin.step(self.sampled, self.now_ns, self.command, self.logprobs)
        assert_same_plan(plan, expected)
        assert_same_outbound(self.outbound, self.twin.outbound)
        assert np.array_equal(self.inbound.bytes, self.twin_inbound.bytes), "the inbound regions differ"
        self.core.audit()
        assert not quiet or self._nothing_happened(plan, before), "the poll missed news"
        self._check(plan)
        for worker in self.workers:
            worker.after_step()
        self.started, self.last_command = True, self.command
        self.was_live = [worker.out("live") == 1 for worker in self.workers]
        self.sampled = [self._sample(rng, faults, row.sequence.tokens) for row in self.twin.plan.rows]
        self.logprobs = [self._find_logprobs(rng, plan, row) for row in range(len(plan.rows))]
        owners = {int(work["slot"]): (int(work["channel"]), int(work["position"])) for work in plan.works}
        self.sampling = [(owners[int(row["slot"])], bool(row["flags"] & RowFlag.KNOWN)) for row in plan.rows]
        return plan

    def _quiet(self) -> bool:
        """Whether the core, with nothing to compute, says that a step now would do nothing."""
        idle = self.started and self.core.plan().tokens == 0 and self.command == self.last_command
        return idle and not self._cursor_ahead() and not self.core.poll(0)

    def _cursor_ahead(self) -> bool:
        """An impossible cursor may become possible by a record that the scheduler wrote since; nobody waits for it."""
        return any(state.log_read_word > state.log_read for state in self.twin.channels)

    def _nothing_happened(self, plan: host.Plan, before: bytes) -> bool:
        """Nothing but counters and leases that ran out, of which a poll knows nothing."""
        if any(self.was_live[worker.channel] and not worker.out("live") for worker in self.workers):
            return True
        if plan.tokens:
            return False
        now, then = self.outbound.bytes.view(np.uint64).copy(), np.frombuffer(before, np.uint64)
        ignored = [self.outbound.telemetry_at(name) for name in ("heartbeat", "log_stalls", "protocol_errors")]
        ignored += [self.outbound.control_at(channel, "protocol_errors") for channel in range(len(self.workers))]
        now[ignored] = then[ignored]
        return now.tobytes() == before

    def _sample(self, rng: Random, faults: bool, before: list[int]) -> int:
        """Often what makes of a common prompt a longer one, so that answers come back as prompts."""
        if faults and rng.random() < 0.01:
            return rng.choice([-1, self.limits.vocab_size, 2**31 - 1, -(2**31)])
        if rng.random() < 0.8 and (token := next_in_text(before, self.limits)) is not None:
            return token
        return rng.randrange(self.limits.vocab_size)

    def _salt_of(self, owner: Owner) -> int:
        (salt,) = [each.salt for each in self.twin.holding if (each.channel, each.position) == owner]
        return salt

    def _find_logprobs(self, rng: Random, plan: host.Plan, row: int) -> list[Logprob]:
        """Anything at all: the scheduler only passes it on."""
        count = int(plan.rows[row]["logprobs"])
        found = plan.logprobs[row]
        found["tokens"] = [rng.getrandbits(32) for _ in range(21)]
        found["logprobs"].view(np.uint32)[:] = [rng.getrandbits(32) for _ in range(21)]
        found["rank"] = rng.choice([1, 2, 300, 2**24 - 2, 2**24, 2**32 - 1])
        bits = found["logprobs"].view(np.uint32).tolist()
        return list(zip(found["tokens"].tolist(), bits, [int(found["rank"])] * count, strict=False))

    def _note_given(self) -> None:
        rows = list(zip(self.sampling, self.sampled, self.logprobs, strict=True))
        spoilt = {owner for (owner, _), token, _ in rows if not 0 <= token < self.limits.vocab_size}
        for (owner, known), token, logprobs in rows:
            if known and owner not in spoilt:
                self.scored.setdefault(owner, []).append(logprobs)
            elif owner not in spoilt:
                self.given.setdefault(owner, []).append((token, logprobs))

    def _check(self, plan: host.Plan) -> None:
        limits = self.limits
        assert plan.tokens <= limits.token_budget
        assert len(plan.works) <= limits.max_running
        assert plan.tokens == 0 or plan.header["bucket"] == min(size for size in limits.buckets if size >= plan.tokens)
        self.kv.keep_only({(each.channel, each.position) for each in self.twin.holding})
        self.kv.run(plan)
        held = {block for row in self.kv.rows.values() for block in row}
        assert len(held) <= self.outbound.telemetry("blocks_used") <= limits.blocks - 1
        if self.outbound.telemetry("log_stalls") == 0:
            self._check_order(plan)

    def _check_order(self, plan: host.Plan) -> None:
        """Without stalls, prompts of more than one token start by class, and within one in the order in which they
        were submitted; what waits is in no class before theirs."""
        running = {(each.channel, each.position): each for each in self.twin.arrived if each.stage is Stage.RUNNING}
        waiting = [each.priority for each in self.twin.arrived if each.stage is Stage.WAITING]
        for work in plan.works[int(plan.header["decode_works"]) :]:
            channel, position = int(work["channel"]), int(work["position"])
            sequence = running[channel, position]
            if work["context_tokens"] - work["query_tokens"] == sequence.found * self.limits.block_tokens:
                priority = sequence.priority
                assert position > self.first_seen.get((channel, priority), -1), "not first come, first served"
                self.first_seen[channel, priority] = position
                new = (channel, position) not in self.ran_before
                assert not new or priority <= min(waiting, default=priority), "a later class goes first"
        self.ran_before = set(running)

    # the end of a history

    def finish(self) -> None:
        """All workers behave: whatever a history did, everything ends and all blocks come back."""
        for worker in self.workers:
            worker.muted = False
            if not worker.live:
                worker.ask()
        self.command = Command.DRAIN
        rng = Random(1)
        self.step(rng, faults=False)
        stuck = 0
        for _ in range(self._steps_needed()):
            live, moved = self._finish_step(rng)
            stuck = 0 if moved else stuck + 1
            assert stuck < 2, "no progress"
            if live == 0:
                break
        assert self.outbound.telemetry("blocks_used") == 0
        assert self.outbound.telemetry("running") == self.outbound.telemetry("waiting") == 0
        for worker in self.workers:
            self._check_ledgers(worker)

    def _finish_step(self, rng: Random) -> tuple[int, bool]:
        """One step with everything read: sequences left, and whether anything happened."""
        for worker in self.workers:
            self.do_read(worker, 0, 0)
        before = self._situation()
        self.now_ns += MILLISECOND
        plan = self.step(rng, faults=False)
        return int(plan.header["live"]), plan.tokens > 0 or self._situation() != before

    def _situation(self) -> tuple[int, list[int]]:
        return len(self.twin.arrived), [worker.out("log_written") for worker in self.workers]

    def _steps_needed(self) -> int:
        """A token in two steps would do (the reader comes in between when a log has one record), and the ends."""
        left = sum(max(1, each.prompt + each.max_tokens - each.computed) for each in self.twin.arrived)
        return 2 * left + 2 * len(self.twin.arrived) + 2

    def _check_ledgers(self, worker: Worker) -> None:
        """Every submission taken under the lease has exactly one last record, and its own tokens."""
        self.do_read(worker, 0, 0)
        if not worker.live or worker.skipped:
            return
        taken = range(worker.first_position, worker.out("submit_read"))
        assert set(worker.ledgers) <= set(taken)
        for position in taken:
            ledger = worker.ledgers.get(position)
            assert ledger is not None, f"submission {position} got no record"
            assert ledger.last is not None, f"submission {position} never ended"
            given = self.given.get((worker.channel, position), [])
            assert ledger.tokens == [token for token, _ in given]
            assert ledger.logprobs == as_read([logprobs for _, logprobs in given])
            assert ledger.prompt_logprobs == as_read(self.scored.get((worker.channel, position), []))
            assert ledger.last[0] != RecordKind.REJECT or not given
