"""Whoever gets a lease finds nothing of an earlier holder's prompts and answers, in what it may read or make use of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from blink_proto import arena
from blink_proto.arena import ErrorCode, SubmitFlag
from tests.property.bench import Bench, CoreEngine, TwinEngine

Engines = type[TwinEngine] | type[CoreEngine]
ENDS = ("given back", "expired", "replaced")
TIMEOUT = 100


@pytest.fixture(params=[TwinEngine, CoreEngine], ids=["twin", "core"])
def engine(request: pytest.FixtureRequest) -> Any:
    return request.param


def end_lease(bench: Bench, ends: str, *sampled: int) -> None:
    """Of channel 0, while a worker of another channel lives."""
    if ends == "given back":
        bench.workers[0].write_lease(0)
    elif ends == "replaced":
        bench.workers[0].ask()
    else:
        bench.now_ns += TIMEOUT
        for worker in bench.workers[1:]:
            worker.before_step()
    bench.step(*sampled)


def log_words(bench: Bench, channel: int) -> list[int]:
    """All of a channel's log."""
    start = bench.engine.outbound.log_at(channel, 0)
    return list(bench.engine.outbound.words[start : start + 2 * bench.limits.log_slots])


@pytest.mark.parametrize("ends", ENDS)
def test_a_lease_leaves_no_answers(engine: Engines, ends: str) -> None:
    """Not after the very step that tells of its end, in which another record of it would have come."""
    bench = Bench(engine, channels=2, log_slots=4, lease_timeout_ns=TIMEOUT, eos_tokens=())
    bench.submit([1, 1], max_tokens=9)
    bench.submit([1, 1], max_tokens=9, channel=1)
    bench.step()
    for value in range(21, 26):
        bench.step(value, value)
        bench.read(0)
        bench.read(1)
    assert all(log_words(bench, 0))
    others = log_words(bench, 1)
    end_lease(bench, ends, 26, 26)
    assert (bench.out("lease"), bench.out("live")) == ((2, 1) if ends == "replaced" else (1, 0))
    assert log_words(bench, 0) == [0] * 8
    assert bench.out("log_written") == 6
    assert bench.out("live", 1) == 1
    assert [before == after for before, after in zip(others, log_words(bench, 1), strict=True)].count(False) == 2


@pytest.mark.parametrize("ends", ENDS)
def test_records_go_on_behind_what_was_wiped(engine: Engines, ends: str) -> None:
    bench = Bench(engine, log_slots=4, lease_timeout_ns=TIMEOUT, eos_tokens=())
    bench.submit([1, 1], max_tokens=9)
    for sampled in ((), (21,), (22,), (23,)):
        bench.step(*sampled)
    end_lease(bench, ends, 24)
    if ends != "replaced":
        bench.workers[0].ask()
        bench.step()
    bench.workers[0].after_step()
    bench.submit([1, 1], max_tokens=2)
    for sampled in ((), (5,), (6,)):
        bench.step(*sampled)
    assert (bench.out("log_start"), bench.out("log_written")) == (4, 6)
    assert [record[-1] for record in bench.records(start=4)] == [5, 6]
    assert log_words(bench, 0)[4:] == [0] * 4


@pytest.mark.parametrize("written", ["under the lease", "behind its end"])
@pytest.mark.parametrize("ends", ENDS)
def test_an_old_prompt_cannot_be_told(engine: Engines, ends: str, written: str) -> None:
    """Neither that which was submitted, nor what came when the lease was over already."""
    bench = Bench(engine, lease_timeout_ns=TIMEOUT)
    bench.submit([21, 22, 23], max_tokens=9, offset=5)
    bench.step()
    if ends == "replaced" and written != "under the lease":
        bench.workers[0].write_prompt(5, [24, 25, 26])
    end_lease(bench, ends, 7)
    if ends != "replaced":
        if written != "under the lease":
            bench.workers[0].write_prompt(5, [24, 25, 26])
        bench.workers[0].ask()
        bench.step()
    bench.workers[0].after_step()
    bench.workers[0].submit(score(offset=5, tokens=3))
    assert bench.step() == [(0, 1, 0, 2, True)]
    bench.step(0, 0, logprobs=[[(0, 0, 1)], [(0, 0, 1)]])
    told = [record for record in bench.records(start=bench.out("log_start")) if record[0] == "PROMPT_TOKEN"]
    assert told == [("PROMPT_TOKEN", "NONE", "NONE", 1, 0)] * 2


def score(offset: int, tokens: int) -> np.ndarray:
    """A submission that has the tokens of its prompt told."""
    record = np.zeros((), arena.SubmitRecord)
    record["prompt_offset"], record["prompt_tokens"], record["top_p"] = offset, tokens, 1
    record["flags"], record["logprobs"] = SubmitFlag.PROMPT_LOGPROBS, 1
    return record


def test_an_old_submission_cannot_be_committed_again(engine: Engines) -> None:
    """It would look its prompt up under a salt that the new holder does not know."""
    bench = Bench(engine, submit_slots=2)
    for _ in range(2):
        bench.submit([1, 1], max_tokens=1, cache_salt=99)
        bench.step()
        bench.step(7)
    bench.workers[0].ask()
    bench.step()
    bench.workers[0].after_step()
    bench.workers[0].commit(2)
    bench.step()
    (record,) = bench.records(start=bench.out("log_start"))
    assert record == ("REJECT", "ERROR", ErrorCode.BAD_PROMPT_RANGE.name, 2, 0)


def test_a_lease_begins_with_nothing_but_control_words(engine: Engines) -> None:
    """And changes nothing of other channels. Sizes by hand: 256 bytes of words, 2 submissions, 8 cancels, 63 tokens,
    up to a page."""
    bench = Bench(engine, submit_slots=2, cancel_slots=8, heap_tokens=63, channels=3)
    words = bench.inbound.words
    for at in range(len(words)):
        words[at] = 2**64 - 1 - at
    for channel in range(3):
        words[bench.inbound.control_at(channel, "lease")] = 2 if channel == 1 else 1
    before = list(words)
    bench.step()
    assert bench.out("lease", 1) == 2
    changed = [at for at, word in enumerate(words) if word != before[at]]
    channel_1 = 4096 + 4096
    assert changed == list(range((channel_1 + 256) // 8, (channel_1 + 4096) // 8))
    assert not any(words[at] for at in changed)


@pytest.mark.parametrize("word", [1, 3, 2**32 + 1])
def test_a_word_that_begins_nothing_wipes_nothing(engine: Engines, word: int) -> None:
    bench = Bench(engine)
    bench.submit([3, 3], max_tokens=9)
    bench.step()
    bench.step(7)
    log, inbound = log_words(bench, 0), bench.inbound.bytes.copy()
    bench.workers[0].write_lease(word)
    inbound.view(np.uint64)[bench.inbound.control_at(0, "lease")] = word
    bench.step(8)
    assert log_words(bench, 0)[:2] == log[:2]
    assert np.array_equal(bench.inbound.bytes, inbound)
