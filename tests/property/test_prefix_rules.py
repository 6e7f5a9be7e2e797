"""The prefix cache's rules one by one, with expectations worked out by hand, for the twin and for the core.

Blocks are of two tokens. Works are (channel, submission, first token, tokens, whether it samples): a prompt of six
tokens of which two blocks are cached begins at its fifth token.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.property.bench import Bench, CoreEngine, TwinEngine

Engines = type[TwinEngine] | type[CoreEngine]
SYSTEM = [5, 6, 7, 8]


@pytest.fixture(params=[TwinEngine, CoreEngine], ids=["twin", "core"])
def engine(request: pytest.FixtureRequest) -> Any:
    return request.param


def bench_of(engine: Engines, **limits: Any) -> Bench:
    usual = {"block_tokens": 2, "eos_tokens": (), "blocks": 21, "blocks_per_sequence": 20, "max_running": 2}
    return Bench(engine, **usual | {"token_budget": 32, "buckets": (4, 32)} | limits)


def run_alone(bench: Bench, prompt: list[int], answer: list[int], **fields: Any) -> None:
    """A sequence from its submission to its end."""
    bench.submit(prompt, max_tokens=len(answer), **fields)
    bench.step()
    for token in answer:
        bench.step(token)
    bench.read()


def found_at(bench: Bench, prompt: list[int], **fields: Any) -> int:
    """First token that is computed of a prompt, in a sequence that is cancelled at once."""
    position = bench.workers[0].submit_position
    bench.submit(prompt, max_tokens=1, **fields)
    ((_, _, first, _, _),) = bench.step()
    bench.workers[0].cancel(position)
    bench.step(*[9] * len(bench.engine.row_flags()))
    bench.read()
    return first


def cached(bench: Bench) -> tuple[int, ...]:
    return bench.telemetry("blocks_used", "blocks_cached")


# finding


def test_a_prompt_is_shared_after_its_sequence_has_ended(engine: Engines) -> None:
    bench = bench_of(engine)
    run_alone(bench, [*SYSTEM, 9, 9], [1])
    assert cached(bench) == (0, 3)
    bench.submit([*SYSTEM, 1, 2], max_tokens=2)
    assert bench.step() == [(0, 1, 4, 2, True)]
    assert cached(bench) == (3, 1)
    assert bench.telemetry("prefix_queries", "prefix_hits", "prompt_tokens") == (12, 4, 6)
    bench.step(3)
    assert bench.telemetry("prompt_tokens") == (8,)


def test_a_prompt_is_shared_while_its_sequence_runs(engine: Engines) -> None:
    """Two blocks are the prompt's in common, one more belongs to each of the two."""
    bench = bench_of(engine)
    bench.submit(SYSTEM, max_tokens=5)
    bench.step()
    bench.submit([*SYSTEM, 1], max_tokens=5)
    assert bench.step(3) == [(0, 0, 4, 1, True), (0, 1, 4, 1, True)]
    assert cached(bench) == (4, 0)


def test_chunks_are_shared_as_they_are_computed(engine: Engines) -> None:
    bench = bench_of(engine, token_budget=4, buckets=(4,))
    bench.submit(list(range(10)), max_tokens=5)
    assert bench.step() == [(0, 0, 0, 4, False)]
    bench.submit(list(range(10)), max_tokens=5)
    assert bench.step() == [(0, 0, 4, 4, False)]
    assert bench.telemetry("prefix_hits") == (4,)


def test_the_last_token_of_a_prompt_is_always_computed(engine: Engines) -> None:
    bench = bench_of(engine)
    run_alone(bench, SYSTEM, [1])
    assert [found_at(bench, prompt) for prompt in (SYSTEM, [*SYSTEM, 1], SYSTEM[:3], SYSTEM[:2], SYSTEM[:1])] == [
        2,
        4,
        2,
        0,
        0,
    ]


def test_an_answer_is_shared_as_part_of_the_next_prompt(engine: Engines) -> None:
    """The last token of an answer is not computed: of the eight tokens the first seven are, three blocks."""
    bench = bench_of(engine)
    run_alone(bench, SYSTEM, [1, 2, 3, 4])
    assert cached(bench) == (0, 3)
    assert found_at(bench, [*SYSTEM, 1, 2, 3, 4, 9]) == 6
    assert found_at(bench, [*SYSTEM, 1, 3, 3, 4, 9]) == 4


def test_an_answer_that_was_cancelled_is_shared_too(engine: Engines) -> None:
    bench = bench_of(engine)
    bench.submit(SYSTEM, max_tokens=9)
    bench.step()
    for token in (1, 2, 3):
        bench.step(token)
    bench.workers[0].cancel(0)
    bench.step(4)
    assert found_at(bench, [*SYSTEM, 1, 2, 3, 4, 9]) == 6


def test_a_sequence_that_failed_leaves_only_what_was_there_before(engine: Engines) -> None:
    bench = bench_of(engine, vocab_size=32)
    bench.submit(SYSTEM, max_tokens=9)
    bench.step()
    bench.step(1)
    bench.step(2)
    bench.step(-1)
    assert cached(bench) == (0, 2)
    assert found_at(bench, [*SYSTEM, 1, 2, 9]) == 4


def test_the_same_tokens_elsewhere_are_not_the_same_block(engine: Engines) -> None:
    bench = bench_of(engine)
    run_alone(bench, [5, 6, 5, 6, 7, 7], [1])
    assert found_at(bench, [7, 7, 5, 6, 1]) == 0
    assert found_at(bench, [5, 6, 7, 7, 1]) == 2
    assert found_at(bench, [5, 6, 5, 6, 5, 6, 1]) == 4


def test_only_the_same_salt_shares(engine: Engines) -> None:
    bench = bench_of(engine)
    run_alone(bench, SYSTEM, [1], cache_salt=7)
    assert found_at(bench, [*SYSTEM, 1]) == 0
    assert found_at(bench, [*SYSTEM, 1], cache_salt=2**64 - 7) == 0
    assert found_at(bench, [*SYSTEM, 1], cache_salt=7) == 4


def test_a_prompt_whose_logprobs_are_wanted_is_computed(engine: Engines) -> None:
    bench = bench_of(engine, log_slots=64)
    run_alone(bench, SYSTEM, [1])
    assert found_at(bench, [*SYSTEM, 1, 2, 3], flags=4, logprobs=1) == 0
    assert bench.telemetry("prefix_queries", "prefix_hits") == (4, 0)


def test_without_a_cache_nothing_is_shared(engine: Engines) -> None:
    bench = bench_of(engine, prefix_cache=False)
    run_alone(bench, SYSTEM, [1])
    assert found_at(bench, [*SYSTEM, 1]) == 0
    assert bench.telemetry("blocks_cached", "prefix_queries", "prefix_hits") == (0, 0, 0)


def test_the_first_token_says_what_was_found(engine: Engines) -> None:
    bench = bench_of(engine)
    run_alone(bench, SYSTEM, [1])
    run_alone(bench, [*SYSTEM, 1], [2, 3])
    details = [bench.engine.outbound.token_record(0, at)[1] >> 16 & 0xFFFF for at in range(3)]
    assert details == [0, 2, 0]


# sharing


def test_equal_prompts_that_start_together_come_to_share(engine: Engines) -> None:
    """Each computes its own; then the second takes the first one's blocks and gives its own back."""
    bench = bench_of(engine)
    bench.submit(SYSTEM, max_tokens=5)
    bench.submit(SYSTEM, max_tokens=5)
    assert bench.step() == [(0, 0, 0, 4, True), (0, 1, 0, 4, True)]
    assert cached(bench) == (4, 0)
    assert bench.step(1, 2) == [(0, 0, 4, 1, True), (0, 1, 4, 1, True)]
    assert cached(bench) == (4, 0)
    bench.workers[0].cancel(0)
    bench.step(1, 2)
    assert cached(bench) == (3, 0)
    bench.workers[0].cancel(1)
    bench.step(2)
    assert cached(bench) == (0, 3)


def test_what_is_shared_counts_once_for_admission(engine: Engines) -> None:
    """Ten blocks: the first sequence needs seven in all, of which its prompt has four. The second one needs eight, five
    of them are there (its prompt's first four, shared, count once), and so it fits, where it would not by itself."""
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    for together in (True, False):
        bench = bench_of(engine, blocks=11, prefix_cache=together)
        bench.submit(prompt, max_tokens=7)
        bench.step()
        bench.submit([*prompt, 1], max_tokens=6)
        assert len(bench.step(3)) == (2 if together else 1)


def test_what_is_idle_does_not_make_others_wait(engine: Engines) -> None:
    """Ten blocks, of which two are kept free: eight hold an earlier prompt, and the whole pool is another one's."""
    bench = bench_of(engine, blocks=11)
    run_alone(bench, list(range(1, 17)), [1])
    assert cached(bench) == (0, 8)
    bench.submit([31] * 19, max_tokens=2)
    assert bench.step() == [(0, 1, 0, 19, True)]
    assert cached(bench) == (10, 0)


def test_what_is_found_is_not_evicted_for_its_finder(engine: Engines) -> None:
    """Ten blocks, eight of them idle: a sequence finds four of those and needs six more."""
    bench = bench_of(engine, blocks=11)
    run_alone(bench, list(range(1, 17)), [1])
    bench.submit([*range(1, 9), *[31] * 12], max_tokens=1)
    assert bench.step() == [(0, 1, 8, 12, True)]
    assert cached(bench) == (10, 0)


# evicting


def test_what_was_used_last_is_evicted_last(engine: Engines) -> None:
    """Eleven blocks: nine idle ones of three prompts, two free. The fourth prompt takes three, so one is evicted before
    it, and two when it has ended. The first prompt was used again meanwhile, hence they are the second one's."""
    bench = bench_of(engine, blocks=12)
    for first in (1, 2, 3):
        run_alone(bench, [first] * 6, [1])
    assert cached(bench) == (0, 9)
    assert found_at(bench, [1] * 6) == 4
    run_alone(bench, [4] * 6, [1])
    assert cached(bench) == (0, 9)
    assert [found_at(bench, [first] * 6 + [9]) for first in (1, 3, 4)] == [6, 6, 6]
    assert found_at(bench, [2] * 6 + [9]) == 0


def test_the_end_of_a_prompt_is_evicted_before_its_beginning(engine: Engines) -> None:
    """Ten blocks, eight idle; a prompt of one block leaves one free where two should be: the last idle block goes."""
    bench = bench_of(engine, blocks=11)
    run_alone(bench, list(range(1, 17)), [1])
    run_alone(bench, [30, 30], [1])
    assert cached(bench) == (0, 8)
    assert found_at(bench, list(range(1, 18))) == 14


def test_many_are_evicted_at_once(engine: Engines) -> None:
    """Of forty blocks a sixteenth more than what is needed: two."""
    bench = bench_of(engine, blocks=41)
    for first in range(1, 13):
        run_alone(bench, [first] * 6, [1])
    assert cached(bench) == (0, 36)
    run_alone(bench, [20] * 6, [1])
    assert cached(bench) == (0, 36 + 3 - 1 - 2)


def test_a_place_in_the_queue_is_never_lost(engine: Engines) -> None:
    """The same prompt again and again leaves gaps in the queue of idle blocks, which has room for eight entries."""
    bench = bench_of(engine, blocks=4, max_running=1, blocks_per_sequence=3)
    for _ in range(30):
        run_alone(bench, [5, 6, 7], [1])
        assert cached(bench) == (0, 1)
    assert bench.telemetry("prefix_hits") == (58,)


def test_a_block_that_is_used_again_knows_nothing_of_its_past(engine: Engines) -> None:
    bench = bench_of(engine, blocks=4, max_running=1, blocks_per_sequence=3)
    run_alone(bench, [1, 2, 3, 4], [1])
    run_alone(bench, [5, 6, 7, 8], [1])
    assert found_at(bench, [1, 2, 9]) == 0
    assert found_at(bench, [5, 6, 9]) == 2
