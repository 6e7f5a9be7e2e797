"""The choice among runtimes, against a naive version of its rule and in simulated traffic."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from hashlib import blake2b

import pytest

from dpu_service.routing.choice import Page, Reason, RoutingState, RuntimeState, begin, note_page, note_sent, rank
from dpu_service.routing.prefixes import MOST_BLOCKS, PrefixPage, RecentPrefixes, create, prefix_hashes, request_hashes

BLOCK = 16


@dataclass
class Naive:
    """A runtime by the rule's words: whole beginnings of prompts in a list, no hashes, loads added up anew."""

    beat: int = -1
    on_device: int = 0
    share: float = 0.0
    since_page: list[int] = field(default_factory=list)
    silent: float = 0.0
    beginnings: set[tuple[int, ...]] = field(default_factory=set)
    last: int = 0

    def load(self) -> float:
        return self.on_device + sum(self.since_page) + 16 * self.share

    def known(self, prompt: list[int]) -> int:
        blocks = 0
        while len(prompt) >= BLOCK * (blocks + 1) and tuple(prompt[: BLOCK * (blocks + 1)]) in self.beginnings:
            blocks += 1
        return blocks

    def remember(self, prompt: list[int]) -> None:
        self.beginnings |= {tuple(prompt[:end]) for end in range(BLOCK, len(prompt) + 1, BLOCK)}


def naive_choice(all_of_them: list[Naive], candidates: list[int], prompt: list[int]) -> int:
    beating = [one for one in candidates if all_of_them[one].silent <= 2] or candidates
    least = min(beating, key=lambda one: (all_of_them[one].load(), all_of_them[one].last))
    longest = max(all_of_them[one].known(prompt) for one in beating)
    if longest:
        having = [one for one in beating if all_of_them[one].known(prompt) == longest]
        best = min(having, key=lambda one: (all_of_them[one].load(), all_of_them[one].last))
        if all_of_them[best].load() - all_of_them[least].load() <= min(longest / 4, 16):
            return best
    return least


@pytest.mark.parametrize("seed", range(20))
def test_random_histories_against_the_naive_rule(seed: int) -> None:
    chance = random.Random(seed)
    count = chance.randint(1, 5)
    state, naive = fresh(count), [Naive() for _ in range(count)]
    stems = [[chance.randrange(9) for _ in range(chance.randint(0, 300))] for _ in range(6)]
    numbers: dict[tuple[int, ...], int] = {}
    for request in range(1, 400):
        candidates = chance.sample(range(count), chance.randint(1, count))
        for one in candidates:
            if chance.random() < 0.5:
                see_page(chance, state, naive, one)
        if chance.random() < 0.01:
            forgotten = chance.randrange(count)
            begin(state, forgotten, life=request)
            naive[forgotten] = Naive(last=naive[forgotten].last)
        prompt = chance.choice(stems)[: chance.randint(1, 300)] + [chance.randrange(9) for _ in range(5)]
        prompts = [numbered(prompt, numbers)]
        order = rank(state, candidates, prompts)
        assert sorted(one for one, _ in order) == sorted(candidates), "never one that may not be chosen"
        assert order[0][0] == naive_choice(naive, candidates, prompt)
        sequences = chance.randint(1, 4)
        note_sent(state, order[0][0], sequences, prompts)
        sent_to = naive[order[0][0]]
        sent_to.since_page.append(sequences)
        sent_to.last = request
        sent_to.remember(prompt)


def numbered(prompt: list[int], numbers: dict[tuple[int, ...], int]) -> list[int]:
    """Instead of hashes: each beginning has the next free number, so that none has another one's place."""
    beginnings = [tuple(prompt[:end]) for end in range(BLOCK, len(prompt) + 1, BLOCK)]
    return [numbers.setdefault(one, 1 + len(numbers)) for one in beginnings]


def see_page(chance: random.Random, state: RoutingState, naive: list[Naive], one: int) -> None:
    """A new page, or the same one again, which says nothing but how long it is that."""
    same = chance.random() < 0.3 and naive[one].beat >= 0
    beat = naive[one].beat if same else naive[one].beat + 1
    silent = chance.choice([0.0, 1.9, 2.1, 30.0])
    page = Page(beat, chance.randint(0, 20), chance.random(), chance.randint(0, 5), silent)
    note_page(state, one, page)
    naive[one].silent = silent
    if not same:
        naive[one].beat, naive[one].on_device, naive[one].share = beat, page.sequences, page.kv_share
        naive[one].since_page = [page.unsent]


def fresh(count: int) -> RoutingState:
    return RoutingState([RuntimeState(RecentPrefixes.alone()) for _ in range(count)])


@dataclass
class Traffic:
    """Devices that finish every sequence after some requests more, seen by pages that come now and then."""

    state: RoutingState
    lasting: int
    every: int
    running: list[list[int]] = field(default_factory=list)
    now: int = 0
    most_apart: int = 0

    def send(self, prompt: list[int]) -> int:
        self.running = self.running or [[] for _ in self.state.runtimes]
        self.now += 1
        self.running = [[end for end in one if end > self.now] for one in self.running]
        if self.now % self.every == 0:
            for index, one in enumerate(self.running):
                note_page(self.state, index, Page(self.now, len(one), len(one) / 1000, 0))
        prompts = request_hashes([prompt], b"")
        chosen = rank(self.state, range(len(self.running)), prompts)[0][0]
        note_sent(self.state, chosen, 1, prompts)
        self.running[chosen].append(self.now + self.lasting)
        counts = [len(one) for one in self.running]
        self.most_apart = max(self.most_apart, max(counts) - min(counts))
        return chosen


@pytest.mark.parametrize("count", [2, 3, 8])
def test_balanced_under_distinct_prompts(count: int) -> None:
    chance = random.Random(count)
    traffic = Traffic(fresh(count), lasting=64, every=5)
    sent = Counter(traffic.send([chance.randrange(1 << 20) for _ in range(200)]) for _ in range(800))
    assert min(sent.values()) >= 0.9 * 800 / count
    assert traffic.most_apart <= 5 + 2, "no more than what comes between two pages, and the one that is placed"


def test_one_at_a_time_goes_round() -> None:
    state = fresh(3)
    chosen = []
    for beat in range(6):
        for runtime in range(3):
            note_page(state, runtime, Page(beat, 0, 0.0, 0))
        chosen.append(rank(state, [0, 1, 2], [])[0][0])
        note_sent(state, chosen[-1], 1, [])
    assert chosen == [0, 1, 2, 0, 1, 2]


def test_sticky_under_shared_prefixes() -> None:
    """Conversations of four tenants with long system prompts, each a few at a time."""
    chance = random.Random(1)
    stems = [[chance.randrange(1 << 20) for _ in range(1024)] for _ in range(4)]
    traffic = Traffic(fresh(4), lasting=16, every=4)
    homes: dict[int, Counter[int]] = {index: Counter() for index in range(4)}
    for _ in range(800):
        index = chance.randrange(4)
        homes[index][traffic.send(stems[index] + [chance.randrange(1 << 20) for _ in range(64)])] += 1
    for sent in homes.values():
        assert sent.most_common(1)[0][1] >= 0.95 * sum(sent.values())
    assert traffic.most_apart <= 16 + 4


def test_a_prefix_that_all_share_overflows_to_the_others() -> None:
    chance = random.Random(2)
    stem = [chance.randrange(1 << 20) for _ in range(1024)]
    traffic = Traffic(fresh(4), lasting=200, every=4)
    sent = Counter(traffic.send(stem + [chance.randrange(1 << 20) for _ in range(64)]) for _ in range(2000))
    assert len(sent) == 4
    assert traffic.most_apart <= 16 + 4


@pytest.mark.parametrize(("blocks", "apart", "sticks"), [(1, 0, True), (1, 1, False), (40, 10, True), (40, 11, False),
                                                         (400, 16, True), (400, 17, False)])  # fmt: skip
def test_what_a_known_prefix_is_worth(blocks: int, apart: int, sticks: bool) -> None:
    state = fresh(2)
    prompts = [list(range(1, 1 + blocks))]
    note_sent(state, 1, 1, prompts)
    note_page(state, 0, Page(0, 3, 0.0, 0))
    note_page(state, 1, Page(0, 3 + apart, 0.0, 0))
    runtime, reason = rank(state, [0, 1], prompts)[0]
    assert (runtime, reason) == ((1, Reason.PREFIX) if sticks else (0, Reason.LOAD))


def test_a_silent_runtime_comes_last_whatever_it_knows() -> None:
    state = fresh(2)
    prompts = [list(range(1, 51))]
    note_sent(state, 1, 1, prompts)
    note_page(state, 0, Page(0, 9, 0.9, 0))
    note_page(state, 1, Page(0, 0, 0.0, 0, silent=2.5))
    assert [one for one, _ in rank(state, [0, 1], prompts)] == [0, 1]
    note_page(state, 0, Page(0, 9, 0.9, 0, silent=2.5))
    assert rank(state, [0, 1], prompts)[0] == (1, Reason.PREFIX), "where all are silent the rule is the usual one"


def test_a_runtime_that_began_anew_knows_nothing() -> None:
    state = fresh(2)
    prompts = [list(range(1, 51))]
    note_sent(state, 1, 1, prompts)
    begin(state, 1, life=7)
    assert rank(state, [0, 1], prompts)[0] == (0, Reason.LOAD)


def test_hashes_are_chained_by_tenant_and_bounded() -> None:
    prompt = list(range(1000))
    hashes = prefix_hashes(prompt, b"a")
    assert len(hashes) == 1000 // BLOCK
    assert all(0 <= one < 1 << 64 for one in hashes)
    first = blake2b((1).to_bytes(8, "little") + b"a", digest_size=8)
    for token in prompt[:BLOCK]:
        first.update(token.to_bytes(4, "little"))
    assert hashes[0] == int.from_bytes(first.digest(), "little")
    assert prefix_hashes(prompt[:100], b"a") == hashes[: 100 // BLOCK]
    changed = prefix_hashes([*prompt[:40], 7, *prompt[41:]], b"a")
    assert [one == other for one, other in zip(hashes, changed, strict=True)] == [True] * 2 + [False] * 60
    assert not set(hashes) & set(prefix_hashes(prompt, b"b"))
    assert prefix_hashes(prompt[:15], b"a") == []
    many = request_hashes([prompt] * 100, b"a")
    assert sum(map(len, many)) == MOST_BLOCKS == 512
    assert many[:8] == [hashes] * 8


def test_what_is_remembered_is_bounded_and_the_old_is_overwritten() -> None:
    recent = RecentPrefixes.alone(places=8)
    recent.add([1, 2, 3, 4])
    assert [recent.matching(one) for one in ([1, 2, 3, 4, 5, 6], [1, 2], [5, 6, 7], [])] == [4, 2, 0, 0]
    recent.add([9, 10])  # have the places of 1 and 2
    assert recent.matching([9, 10]) == 2
    assert recent.matching([1, 2, 3, 4]) == 4, "a hash is of all before it"
    assert recent.matching([1, 2]) == 0
    recent.add(range(100, 150))
    assert recent.matching([1, 2, 3, 4]) == recent.matching([9, 10]) == 0
    assert recent.matching(range(142, 150)) == 8
    for places in (0, 3, 12):
        with pytest.raises(ValueError, match="power of two"):
            RecentPrefixes.alone(places)


def test_most_of_what_was_sent_lately_is_known() -> None:
    """As long as a KV cache of a million tokens may keep it: 65,536 blocks of other prompts later."""
    chance = random.Random(3)
    recent = RecentPrefixes.alone()
    sent = [[chance.getrandbits(64) for _ in range(64)] for _ in range(200)]
    for prompt in sent:
        recent.add(prompt)
    recent.add([chance.getrandbits(64) for _ in range(65_536)])
    known = [recent.matching(prompt) for prompt in sent]
    assert min(known) > 48
    assert sum(known) / len(known) > 62


def test_workers_share_what_they_know_and_a_new_life_begins_once() -> None:
    descriptor = create(3)
    one, other = (PrefixPage(descriptor, 3).runtimes for _ in range(2))
    for worker in (one, other):
        worker[1].begin(5)
    one[1].add([1, 2, 3])
    assert [runtime.matching([1, 2, 3]) for runtime in other] == [0, 3, 0]
    other[1].begin(5)  # a worker that was started later
    assert one[1].matching([1, 2, 3]) == 3
    one[2].add([4])
    other[1].begin(6)
    assert [runtime.matching([1, 2, 3]) for runtime in one] == [0, 0, 0]
    assert other[2].matching([4]) == 1
