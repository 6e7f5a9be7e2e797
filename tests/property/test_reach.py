"""What the random histories reach, and what they cannot: the wrap of the 16-bit lap."""

from __future__ import annotations

from collections import Counter
from random import Random

from blink_proto import arena
from blink_proto.arena import ErrorCode, Finish, RecordKind
from tests.property.bench import Bench, CoreEngine
from tests.property.histories import MIXES, draw_history, draw_limits
from tests.property.limits import Inbound, Limits
from tests.property.twin import Block, Plan, SchedulerTwin, Sequence
from tests.property.world import World

EXPECTED = {
    *((RecordKind.TOKEN, finish, ErrorCode.NONE) for finish in (Finish.NONE, Finish.STOP, Finish.LENGTH)),
    (RecordKind.END, Finish.CANCELLED, ErrorCode.NONE),
    (RecordKind.END, Finish.ERROR, ErrorCode.BAD_SAMPLE),
    *(
        (RecordKind.REJECT, Finish.ERROR, code)
        for code in ErrorCode
        if code not in (ErrorCode.NONE, ErrorCode.BAD_SAMPLE)
    ),
    (RecordKind.END, Finish.LENGTH, ErrorCode.NONE),
    (RecordKind.PROMPT_TOKEN, Finish.NONE, ErrorCode.NONE),
    RecordKind.LOGPROB,
}


def news_of(head: int, body: int) -> object:
    """(kind, finish, detail) of a record, or just its kind where it has no more."""
    if (head >> 16) & 0xFF == RecordKind.LOGPROB:
        return RecordKind.LOGPROB
    _, kind, finish, _ = arena.unpack_token_head(head)
    return kind, finish, 0 if kind == RecordKind.TOKEN else arena.unpack_token_body(body)[1]


def planned(plan: Plan) -> set[str]:
    """What a plan has in it of what is worth meeting."""
    found = set()
    for work in plan.works:
        extras, rows = work.sequence.extras, [row for row in plan.rows if row.sequence is work.sequence]
        known = sum(row.known for row in rows)
        found |= {"several bias entries"} if extras is not None and len(extras.bias) > 1 else set()
        found |= {"several banned sequences"} if extras is not None and len(extras.bans) > 1 else set()
        found |= {"masked stop tokens"} if rows and rows[-1].flags == 3 else set()
        found |= {"several scored tokens"} if known > 1 else set()
        found |= {"scored tokens and a sampled one"} if 0 < known < len(rows) else set()
        found |= {"scored tokens beside a decode"} if known and plan.decode_works else set()
    return found


class Watched(SchedulerTwin):
    """Notes what happens to its prefix cache."""

    def __init__(self, limits: Limits, inbound: Inbound) -> None:
        super().__init__(limits, inbound)
        self.met = set[str]()
        self.answers: list[Block] = []

    def try_to_admit(self, sequence: Sequence) -> bool:
        held = [block for each in self.holding for block in each.shared]
        admitted = super().try_to_admit(sequence)
        found = set(sequence.shared) if admitted else set()
        self.met |= {"several blocks found"} if len(found) > 1 else set()
        self.met |= {"blocks found that others hold"} if found & set(held) else set()
        self.met |= {"idle blocks found"} if found - set(held) else set()
        self.met |= {"an answer found"} if found & set(self.answers) else set()
        self.met |= (
            {"no room for a sequence whose prompt is found"} if not admitted and self.look_up(sequence) else set()
        )
        return admitted

    def wipe_inbound(self, channel: int) -> None:
        state, limits, words = self.channels[channel], self.limits, self.inbound.words
        rings = {
            "submission": (limits.submit_slots, state.submit_read, self.inbound.submit_commit_at),
            "cancel": (limits.cancel_slots, state.cancel_read, self.inbound.cancel_commit_at),
        }
        for what, (slots, position, commit_at) in rings.items():
            expected = arena.pack_commit_word(1 + position // slots, state.lease + 1)
            self.met |= {f"planted {what}"} if words[commit_at(channel, position)] == expected else set()
        super().wipe_inbound(channel)

    def keep(self, sequence: Sequence, blocks: int) -> None:
        known, had = len(self.cache), len(sequence.shared)
        super().keep(sequence, blocks)
        prompt = sequence.prompt // self.limits.block_tokens
        self.answers += [each for each in self.cache[known:] if each in sequence.shared[prompt:]]
        self.met |= (
            {"blocks taken instead of its own"} if len(sequence.shared) - had > len(self.cache) - known else set()
        )

    def evict(self, plan: Plan) -> None:
        idle = len(self.idle)
        super().evict(plan)
        self.met |= {"some idle blocks evicted"} if 0 < len(self.idle) < idle else set()
        self.met |= {"all idle blocks evicted"} if 0 == len(self.idle) < idle else set()


CACHED = {
    "several blocks found",
    "blocks found that others hold",
    "idle blocks found",
    "an answer found",
    "no room for a sequence whose prompt is found",
    "blocks taken instead of its own",
    "some idle blocks evicted",
    "all idle blocks evicted",
}


def test_random_histories_reach_every_record_and_counter() -> None:
    """Counts how many histories show each; all must be common enough to be met by chance."""
    seen: Counter[object] = Counter()
    for seed in range(360):
        rng = Random(seed)
        world, here = World(draw_limits(rng.randint), Watched), set[str]()
        for action in draw_history(rng.randint, world.limits, 120, MIXES[seed % len(MIXES)]):
            world.apply(action)
            here |= planned(world.twin.plan)
        assert isinstance(world.twin, Watched)
        seen.update(here | world.twin.met)
        for channel in world.twin.channels:
            seen.update({news_of(head, body) for head, body in channel.history})
            seen["wrapped log"] += len(channel.history) > world.limits.log_slots
            seen["wrapped submit ring"] += channel.submit_read > world.limits.submit_slots
            seen["wrapped cancel ring"] += channel.cancel_read > world.limits.cancel_slots
            seen["several leases"] += channel.lease > 1
        seen["stalls"] += world.outbound.telemetry("log_stalls") > 0
        seen["protocol errors"] += world.outbound.telemetry("protocol_errors") > 0
    assert set(seen) >= EXPECTED | CACHED | {"planted submission", "planted cancel"}
    assert {what: count for what, count in seen.items() if count < 10} == {}


def test_the_lap_of_the_token_log_wraps_without_a_zero() -> None:
    """65535 laps of a log of one record, by rejects."""
    bench = Bench(CoreEngine, log_slots=1, submit_slots=1)
    worker = bench.workers[0]
    laps = []
    for position in range(65537):
        worker.commit(position)
        bench.step()
        head, body = bench.engine.outbound.token_record(0, position)
        assert head & 0xFFFF == body & 0xFFFF
        assert head >> 32 == position
        laps.append(head & 0xFFFF)
        worker.write_log_read(position + 1)
    assert laps == [*range(1, 65536), 1, 2]
