"""Banned sequences of tokens, from the heap to the slot's row: the twin, the core on the host, and the core on emulated
threads, as the GPU runs it."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest

from gpu_runtime.scheduler import host
from tests.emulation.build import build_emulated
from tests.property.bench import Bench, CoreEngine, TwinEngine

Engines = type[TwinEngine] | type[CoreEngine]
NO_TOKEN = 2**32 - 1


@pytest.fixture(scope="module", params=["twin", "host", "block"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """All of a module's tests on one of them, then on the next."""
    if request.param == "block":
        host.use_library(build_emulated("scheduler_block.cpp", tmp_path_factory.mktemp("emulated")))
    yield TwinEngine if request.param == "twin" else CoreEngine
    host.use_library(None)


def length(tokens: int) -> int:
    """The word before so many tokens of a banned sequence."""
    return 2**31 + tokens


@pytest.mark.parametrize(
    ("words", "taken"),
    [
        ([length(2), 0, 31], True),
        ([length(3), 4, 4, 4, length(2), 9, 0], True),
        ([length(2), 9, 0] * 6 + [length(29), *range(29)], True),
        ([length(2), 0, 32], False),
        ([length(2), 32, 0], False),
        ([length(2), 0, 2**31 - 1], False),
        ([length(1), 0], False),
        ([length(0), length(2), 0, 0], False),
        ([0, 0, 0], False),
        ([0, length(2), 0, 0], False),
        ([2, 0, 0], False),
        ([length(3), 0, 0], False),
        ([length(2), 0, 0, 0], False),
        ([length(2), 0, 0, length(2), 0], False),
        ([length(2), 0, 0, length(2)], False),
        ([length(5), 0, 0, length(2), 0, 0], False),
        ([length(2), length(2), 0], False),
        ([length(2**31 - 1), 0, 0], False),
    ],
)
@pytest.mark.parametrize("bias", [[], [(3, 1.0), (4, -1.0)]])
def test_banned_sequences(engine: Engines, bias: list[tuple[int, float]], words: list[int], taken: bool) -> None:
    bench = Bench(engine, heap_tokens=64, vocab_size=32)
    bench.workers[0].write_bias(1, bias)
    bench.workers[0].write_prompt(1 + 2 * len(bias), words)
    bench.submit([1], max_tokens=1, bias_offset=1, bias_count=len(bias), ban_words=len(words))
    bench.step()
    assert bench.records() == ([] if taken else [("REJECT", "ERROR", "BAD_BAN", 0, 0)])


@pytest.mark.parametrize(("last", "taken"), [(3, True), (4, False)])
def test_as_many_banned_words_as_there_may_be(engine: Engines, last: int, taken: bool) -> None:
    """340 sequences of two tokens and one of three make 1,024 words."""
    bench = Bench(engine, heap_tokens=2048, vocab_size=32)
    words = [*[length(2), 1, 2] * 340, length(last), *range(last)]
    bench.workers[0].write_prompt(0, words)
    bench.submit([1], max_tokens=1, offset=2047, bias_offset=0, ban_words=len(words))
    bench.step()
    assert bench.records() == ([] if taken else [("REJECT", "ERROR", "BAD_BAN", 0, 0)])


def words_of(bans: list[list[int]]) -> list[int]:
    """As they stand in the heap."""
    return [word for tokens in bans for word in (length(len(tokens)), *tokens)]


def rows_of(bans: list[list[int]]) -> list[tuple[int, int]]:
    """As they stand in the slot's row."""
    rows = []
    for tokens in bans:
        rows += [(NO_TOKEN, 0), *((token, len(tokens) - at) for at, token in enumerate(tokens, 1))]
    return rows


def random_bans(rng: Random, words: int) -> list[list[int]]:
    """Exactly so many words."""
    bans: list[list[int]] = []
    while words:
        tokens = rng.choice([2, 3, 4, 5, 300])
        tokens = tokens if words - 1 - tokens >= 3 else words - 1
        bans.append([rng.randrange(32) for _ in range(tokens)])
        words -= 1 + tokens
    return bans


@pytest.mark.parametrize("words", [3, 255, 256, 320, 321, 640, 1000, 1024])
def test_any_number_of_words(engine: Engines, words: int) -> None:
    """More than the block has threads, too; and any of the words spoilt."""
    rng = Random(words)
    bans = random_bans(rng, words)
    good = words_of(bans)
    bench = Bench(engine, heap_tokens=2048, vocab_size=32)
    bench.workers[0].write_prompt(7, good)
    bench.submit([1], max_tokens=1, offset=2047, bias_offset=7, ban_words=words)
    bench.step()
    assert bench.records() == []
    if isinstance(bench.engine, CoreEngine):
        plan = bench.engine.core.plan()
        slot = int(plan.rows[0]["slot"])
        assert plan.extras[slot]["ban_words"] == words
        assert plan.bans[slot, :words].tolist() == rows_of(bans)
    for at in rng.sample(range(words), min(words, 8)):
        bad = Bench(engine, heap_tokens=2048, vocab_size=32)
        changed = length(2) if good[at] < 32 else rng.choice([good[at] + 1, good[at] - 1, 5])
        bad.workers[0].write_prompt(7, [*good[:at], changed, *good[at + 1 :]])
        bad.submit([1], max_tokens=1, offset=2047, bias_offset=7, ban_words=words)
        bad.step()
        assert bad.records() == [("REJECT", "ERROR", "BAD_BAN", 0, 0)], (at, good[at], changed)
