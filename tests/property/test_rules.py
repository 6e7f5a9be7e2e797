"""The scheduler's rules one by one, with expectations worked out by hand, for the twin and for the core."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from blink_proto import arena
from gpu_runtime.scheduler.layout import Command
from tests.property.bench import Bench, CoreEngine, TwinEngine

FAR = 2**32 - 1
Engines = type[TwinEngine] | type[CoreEngine]


@pytest.fixture(params=[TwinEngine, CoreEngine], ids=["twin", "core"])
def engine(request: pytest.FixtureRequest) -> Any:
    return request.param


def token(value: int, sequence: int = 0, finish: str = "NONE") -> tuple[str, str, str, int, int]:
    return ("TOKEN", finish, "NONE", sequence, value)


def end(sequence: int = 0, finish: str = "CANCELLED", error: str = "NONE") -> tuple[str, str, str, int, int]:
    return ("END", finish, error, sequence, 0)


# one sequence


def test_a_sequence_from_prompt_to_length(engine: Engines) -> None:
    bench = Bench(engine, block_tokens=2)
    bench.submit([9, 8, 7], max_tokens=2)
    assert bench.step() == [(0, 0, 0, 3, True)]
    assert bench.telemetry("running", "waiting", "blocks_used", "step_tokens", "steps") == (1, 0, 2, 3, 1)
    assert bench.step(5) == [(0, 0, 3, 1, True)]
    assert bench.telemetry("prompt_tokens", "generated_tokens", "blocks_used", "step_tokens") == (3, 1, 2, 1)
    assert bench.step(6) == []
    assert bench.records() == [token(5), token(6, finish="LENGTH")]
    assert bench.telemetry("running", "blocks_used", "finished_length", "steps", "heartbeat") == (0, 0, 1, 2, 4)


def test_a_long_prompt_comes_in_chunks_of_the_budget(engine: Engines) -> None:
    bench = Bench(engine, token_budget=4, buckets=(4,))
    bench.submit(list(range(10)), max_tokens=1)
    assert bench.step() == [(0, 0, 0, 4, False)]
    assert bench.step() == [(0, 0, 4, 4, False)]
    assert bench.step() == [(0, 0, 8, 2, True)]


def test_after_so_many_prompt_tokens_the_next_step_takes_the_rest(engine: Engines) -> None:
    """Those of refused tokens count, since they were looked at; those of a record that is refused as such do not."""
    bench = Bench(engine, intake_tokens=6, vocab_size=32)
    bench.submit([1, 1, 1], max_tokens=0, offset=0)
    bench.submit([1, 1, 99], max_tokens=1, offset=4)
    bench.submit([2, 2, 2], max_tokens=1, offset=8)
    bench.submit([3], max_tokens=1, offset=12)
    bench.step()
    assert bench.out("submit_read") == 3
    bench.step(5)
    assert bench.out("submit_read") == 4


def test_decodes_come_first_and_leave_the_rest_of_the_budget(engine: Engines) -> None:
    bench = Bench(engine, token_budget=4, buckets=(4,))
    bench.submit([1, 1, 1], max_tokens=4)
    assert bench.step() == [(0, 0, 0, 3, True)]
    bench.submit([2, 3, 4, 5, 6], max_tokens=4, offset=8)
    bench.submit([3], max_tokens=4, offset=20)
    assert bench.step(7) == [(0, 0, 3, 1, True), (0, 2, 0, 1, True), (0, 1, 0, 2, False)]


@pytest.mark.parametrize(
    ("fields", "sampled", "finish"),
    [
        ({}, 2, "STOP"),
        ({"flags": 1}, 2, "NONE"),
        ({"flags": 1, "stops": (2,)}, 2, "STOP"),
        ({"stops": (3, 31)}, 31, "STOP"),
        ({"stops": (3,), "stop_tokens": [3, 31] + [0] * 6}, 31, "NONE"),
        ({"stops": (3,)}, 4, "NONE"),
    ],
)
def test_stop_tokens(engine: Engines, fields: dict[str, Any], sampled: int, finish: str) -> None:
    bench = Bench(engine, eos_tokens=(2,))
    bench.submit([1], max_tokens=2, **fields)
    bench.step()
    bench.step(sampled)
    assert bench.records() == [token(sampled, finish=finish)]


def test_stop_wins_over_length(engine: Engines) -> None:
    bench = Bench(engine, eos_tokens=(2,))
    bench.submit([1], max_tokens=1)
    bench.step()
    bench.step(2)
    assert bench.records() == [token(2, finish="STOP")]


@pytest.mark.parametrize("sampled", [-1, 32, 2**31 - 1, -(2**31)])
def test_a_token_outside_the_vocabulary_ends_the_sequence(engine: Engines, sampled: int) -> None:
    bench = Bench(engine, vocab_size=32)
    bench.submit([1], max_tokens=9)
    bench.step()
    assert bench.step(sampled) == []
    assert bench.records() == [end(finish="ERROR", error="BAD_SAMPLE")]
    assert bench.telemetry("finished_error", "generated_tokens", "running") == (1, 0, 0)


# validation


VALID: dict[str, Any] = {"prompt_tokens": 4, "max_tokens": 4, "temperature": 1, "top_p": 1}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"flags": 8}, "BAD_FLAGS"),
    ({"flags": 1 << 31}, "BAD_FLAGS"),
    ({"prompt_tokens": 0}, "BAD_PROMPT_RANGE"),
    ({"prompt_offset": 61}, "BAD_PROMPT_RANGE"),
    ({"prompt_offset": FAR}, "BAD_PROMPT_RANGE"),
    ({"prompt_offset": FAR - 2}, "BAD_PROMPT_RANGE"),
    ({"max_tokens": 0}, "BAD_MAX_TOKENS"),
    ({"max_tokens": 0, "logprobs": 1}, "BAD_MAX_TOKENS"),
    ({"max_tokens": 0, "logprobs": 1, "flags": 4, "prompt_tokens": 1}, "BAD_MAX_TOKENS"),
    ({"max_tokens": 45}, "CONTEXT_LENGTH"),
    ({"max_tokens": FAR}, "CONTEXT_LENGTH"),
    ({"max_tokens": FAR - 3}, "CONTEXT_LENGTH"),
    ({"max_tokens": 38}, "TOO_LARGE"),
    ({"temperature": -0.001}, "BAD_SAMPLING"),
    ({"temperature": 100.001}, "BAD_SAMPLING"),
    ({"temperature": np.nan}, "BAD_SAMPLING"),
    ({"temperature": np.inf}, "BAD_SAMPLING"),
    ({"top_p": 0}, "BAD_SAMPLING"),
    ({"top_p": 1.0000002}, "BAD_SAMPLING"),
    ({"top_p": np.nan}, "BAD_SAMPLING"),
    ({"min_p": -1e-9}, "BAD_SAMPLING"),
    ({"min_p": 1.0000002}, "BAD_SAMPLING"),
    ({"min_p": np.nan}, "BAD_SAMPLING"),
    ({"repetition_penalty": -1}, "BAD_SAMPLING"),
    ({"repetition_penalty": 100.001}, "BAD_SAMPLING"),
    ({"presence_penalty": 2.0001}, "BAD_SAMPLING"),
    ({"presence_penalty": -np.inf}, "BAD_SAMPLING"),
    ({"frequency_penalty": -2.0001}, "BAD_SAMPLING"),
    ({"frequency_penalty": np.nan}, "BAD_SAMPLING"),
    ({"stop_count": 9}, "BAD_STOP"),
    ({"stop_count": FAR}, "BAD_STOP"),
    ({"stop_count": 8, "stop_tokens": [0] * 7 + [32]}, "BAD_STOP"),
    ({"prompt_offset": 3}, "BAD_TOKEN"),
    ({"min_tokens": 5}, "BAD_MIN_TOKENS"),
    ({"min_tokens": FAR}, "BAD_MIN_TOKENS"),
    ({"logprobs": 16}, "BAD_LOGPROBS"),
    ({"logprobs": FAR}, "BAD_LOGPROBS"),
    ({"flags": 4}, "BAD_LOGPROBS"),
    ({"flags": 4, "max_tokens": 0}, "BAD_LOGPROBS"),
    ({"flags": 4, "max_tokens": 0, "logprobs": 15}, "BAD_LOGPROBS"),
    ({"flags": 4, "max_tokens": 0, "logprobs": 1, "min_tokens": 1}, "BAD_MIN_TOKENS"),
    ({"flags": 2}, "BAD_BIAS"),
    ({"bias_count": 1025}, "BAD_BIAS"),
    ({"bias_count": 1 << 31}, "BAD_BIAS"),
    ({"bias_count": 2, "bias_offset": 61}, "BAD_BIAS"),
    ({"bias_count": 1, "bias_offset": FAR}, "BAD_BIAS"),
    ({"bias_count": 1, "bias_offset": 5}, "BAD_BIAS"),
    ({"bias_count": 2, "bias_offset": 8}, "BAD_BIAS"),
    ({"bias_count": 1, "bias_offset": 5, "ban_words": FAR}, "BAD_BIAS"),
    ({"ban_words": 1025}, "BAD_BAN"),
    ({"ban_words": FAR}, "BAD_BAN"),
    ({"ban_words": 3, "bias_offset": 62}, "BAD_BAN"),
    ({"ban_words": 3, "bias_offset": FAR - 2}, "BAD_BAN"),
    ({"ban_words": 3, "bias_offset": 60, "bias_count": 1}, "BAD_BAN"),
    ({"ban_words": 3}, "BAD_BAN"),
]
TAKEN: list[dict[str, Any]] = [
    {},
    {"prompt_offset": 60},
    {"max_tokens": 37},
    {"temperature": 100},
    {"temperature": -0.0},
    {"top_p": 1e-45},
    {"top_k": FAR, "seed": 2**64 - 1},
    {"stop_count": 8, "stop_tokens": [31] * 8},
    {"stop_count": 7, "stop_tokens": [0] * 7 + [FAR]},
    {"min_p": 1, "repetition_penalty": 100, "presence_penalty": -2, "frequency_penalty": 2},
    {"min_p": -0.0, "repetition_penalty": 1e-45, "presence_penalty": 2, "frequency_penalty": -2},
    {"min_tokens": 4},
    {"priority": -(2**31)},
    {"priority": 2**31 - 1},
    {"logprobs": 15},
    {"logprobs": 15, "flags": 4},
    {"logprobs": 14, "flags": 4, "max_tokens": 0},
    {"logprobs": 1, "flags": 4, "max_tokens": 0, "prompt_tokens": 2},
    {"logprobs": 1, "flags": 4, "prompt_tokens": 1},
    {"bias_count": 0, "bias_offset": FAR},
    {"bias_count": 1, "bias_offset": 62, "flags": 2},
    {"flags": 3, "bias_count": 1, "bias_offset": 6},
]


def submit_raw(engine: Engines, fields: dict[str, Any]) -> Bench:
    """One submission with these fields; the heap is zero but for one bad token at index 5."""
    bench = Bench(engine, heap_tokens=64, vocab_size=32, max_model_tokens=48, blocks=11, block_tokens=4)
    bench.workers[0].write_prompt(5, [32])
    bench.submit([], **(VALID | fields))
    bench.step()
    return bench


@pytest.mark.parametrize(("fields", "error"), REFUSED)
def test_a_bad_submission_costs_one_record(engine: Engines, fields: dict[str, Any], error: str) -> None:
    bench = submit_raw(engine, fields)
    assert bench.records() == [("REJECT", "ERROR", error, 0, 0)]
    assert (bench.out("submit_read"), bench.out("rejected"), *bench.telemetry("rejected", "waiting")) == (1, 1, 1, 0)


@pytest.mark.parametrize("fields", TAKEN)
def test_a_submission_at_the_limits_is_taken(engine: Engines, fields: dict[str, Any]) -> None:
    bench = submit_raw(engine, fields)
    assert (bench.out("submit_read"), bench.records(), *bench.telemetry("running")) == (1, [], 1)


def test_errors_are_found_in_the_order_of_their_codes(engine: Engines) -> None:
    """All faults at once, then the first one mended, and so on."""
    faults: dict[str, dict[str, Any]] = {
        "BAD_FLAGS": {"flags": 8},
        "BAD_PROMPT_RANGE": {"prompt_offset": 62},
        "BAD_MAX_TOKENS": {"max_tokens": 0},
        "CONTEXT_LENGTH": {"max_tokens": 45},
        "TOO_LARGE": {"max_tokens": 38},
        "BAD_SAMPLING": {"top_p": 2},
        "BAD_STOP": {"stop_count": 9},
        "BAD_TOKEN": {"prompt_offset": 4},
        "BAD_MIN_TOKENS": {"min_tokens": FAR},
        "BAD_LOGPROBS": {"logprobs": FAR},
        "BAD_BIAS": {"bias_count": FAR},
        "BAD_BAN": {"ban_words": FAR},
    }
    codes = list(faults)
    for index, code in enumerate(codes):
        fields: dict[str, Any] = {}
        for later in reversed(codes[index:]):
            fields |= faults[later]
        assert submit_raw(engine, fields).records() == [("REJECT", "ERROR", code, 0, 0)]


def bits(value: float) -> int:
    """Of a float32."""
    return int(np.float32(value).view(np.uint32))


@pytest.mark.parametrize(
    ("entries", "taken"),
    [
        ([(0, 1.0), (31, -np.inf)], True),
        ([(3, 1.0), (2, 1.0)], False),
        ([(3, 1.0), (3, 1.0)], False),
        ([(31, 1.0), (32, 1.0)], False),
        ([(1, np.inf)], False),
        ([(1, np.nan)], False),
        ([(1, -3e38)], True),
    ],
)
def test_bias_entries(engine: Engines, entries: list[tuple[int, float]], taken: bool) -> None:
    bench = Bench(engine, heap_tokens=64, vocab_size=32)
    bench.workers[0].write_bias(10, entries)
    bench.submit([1], max_tokens=1, bias_offset=10, bias_count=len(entries))
    bench.step()
    assert bench.records() == ([] if taken else [("REJECT", "ERROR", "BAD_BIAS", 0, 0)])


def test_stop_tokens_are_masked_until_min_tokens_are_generated(engine: Engines) -> None:
    bench = Bench(engine, eos_tokens=(2,))
    bench.submit([1, 1], max_tokens=4, min_tokens=2)
    flags = []
    for sampled in ([], [5], [6], [7]):
        bench.step(*sampled)
        flags += bench.engine.row_flags()
    assert flags == [3, 3, 1, 1]
    assert bench.step(2) == []
    assert bench.records()[3:] == [token(2, finish="STOP")]


# log-probabilities


def test_log_probabilities_follow_their_token(engine: Engines) -> None:
    """A sequence that wants its own and one more, between two that want none."""
    bench = Bench(engine, eos_tokens=(2,))
    for index, logprobs in enumerate((0, 2, 0)):
        bench.submit([1], max_tokens=4, offset=index, logprobs=logprobs)
    bench.step()
    found = [(9, bits(-1.5), 300), (8, bits(-0.25), 77), (3, bits(-9), 0)]
    bench.step(7, 2, 6, logprobs=[[], found, []])
    mine = [("LOGPROB", "-1.5", "", 300, 9), ("LOGPROB", "-0.25", "", 1, 8)]
    assert bench.records() == [token(7), token(2, 1, finish="STOP"), *mine, token(6, 2)]


def test_a_rank_beyond_24_bits_is_cut(engine: Engines) -> None:
    bench = Bench(engine)
    bench.submit([1], max_tokens=4, logprobs=1)
    bench.step()
    bench.step(7, logprobs=[[(7, bits(-2), 1 << 24)]])
    assert bench.records()[1:] == [("LOGPROB", "-2", "", (1 << 24) - 1, 7)]


def test_a_sequence_waits_for_room_for_all_its_records(engine: Engines) -> None:
    """Four free records, three for each token of the first: the second, of one, fits beside it and the third does not.
    With one record unread the first lacks room, and none passes it."""
    bench = Bench(engine, log_slots=4, eos_tokens=())
    for index, logprobs in enumerate((2, 0, 0)):
        bench.submit([3], max_tokens=9, offset=index, logprobs=logprobs)
    assert bench.step() == [(0, 0, 0, 1, True), (0, 1, 0, 1, True)]
    none = [(1, bits(-1), 1)] * 2
    assert bench.step(5, 6, logprobs=[none, []]) == []
    bench.workers[0].write_log_read(3)
    assert bench.step() == [(0, 0, 1, 1, True)]
    bench.step(5, logprobs=[none])
    bench.workers[0].write_log_read(5)
    assert bench.step() == []
    bench.workers[0].write_log_read(7)
    assert bench.step() == [(0, 0, 2, 1, True), (0, 1, 1, 1, True)]


def test_a_bad_sample_brings_no_log_probabilities(engine: Engines) -> None:
    bench = Bench(engine, vocab_size=32)
    bench.submit([1], max_tokens=9, logprobs=2)
    bench.submit([1], max_tokens=9, offset=1, logprobs=1)
    bench.step()
    bench.step(32, 4, logprobs=[[(1, 0, 1)] * 2, [(4, bits(-1), 1)]])
    mine = ("LOGPROB", "-1", "", 1, 4)
    assert bench.records() == [end(finish="ERROR", error="BAD_SAMPLE"), token(4, 1), mine]


# log-probabilities of prompts

SCORE = 4
"""The flag that asks for them."""


def scored(value: int, sequence: int = 0) -> list[tuple[str, str, str, int, int]]:
    """A token of a prompt and its own log-probability, as `own` gives it."""
    return [("PROMPT_TOKEN", "NONE", "NONE", sequence, value), ("LOGPROB", "-1", "", 3, value)]


def own(*values: int) -> list[list[tuple[int, int, int]]]:
    """The log-probability of each of these tokens."""
    return [[(value, bits(-1), 3)] for value in values]


def test_a_prompt_is_scored_from_its_second_token_on(engine: Engines) -> None:
    """As much at once as there are rows; the last row samples as it would without."""
    bench = Bench(engine, max_running=3)
    bench.submit([9, 8, 7, 6], max_tokens=2, logprobs=1, flags=SCORE, min_tokens=1)
    assert bench.step() == [(0, 0, 0, 3, True)]
    assert bench.engine.row_flags() == [4, 4, 4]
    assert bench.step(8, 7, 6, logprobs=own(8, 7, 6)) == [(0, 0, 3, 1, True)]
    assert bench.records() == scored(8) + scored(7) + scored(6)
    assert bench.engine.row_flags() == [3]
    assert bench.step(5, logprobs=own(5)) == [(0, 0, 4, 1, True)]
    assert bench.engine.row_flags() == [1]
    bench.step(4, logprobs=own(4))
    assert bench.records(start=6)[::2] == [token(5), token(4, finish="LENGTH")]
    assert bench.telemetry("prompt_tokens", "generated_tokens", "finished_length") == (4, 2, 1)


def test_a_chunk_that_scores_and_samples(engine: Engines) -> None:
    """The token that ends the sequence comes in the same step as those of the prompt, which end nothing."""
    bench = Bench(engine, eos_tokens=(2,))
    bench.submit([9, 8, 7], max_tokens=5, logprobs=1, flags=SCORE)
    assert bench.step() == [(0, 0, 0, 3, True)]
    assert bench.step(8, 7, 2, logprobs=own(8, 7, 2)) == []
    assert bench.records()[:5] == [*scored(8), *scored(7), token(2, finish="STOP")]


def test_a_prompt_that_is_only_scored(engine: Engines) -> None:
    """Its last token is not computed, and takes no block; the END record follows the last one's."""
    bench = Bench(engine, block_tokens=2, max_running=2)
    bench.submit([9, 8, 7, 6, 5], max_tokens=0, logprobs=1, flags=SCORE)
    assert bench.step() == [(0, 0, 0, 2, True)]
    assert bench.step(8, 7, logprobs=own(8, 7)) == [(0, 0, 2, 2, True)]
    assert bench.telemetry("blocks_used") == (2,)
    assert bench.step(6, 5, logprobs=own(6, 5)) == []
    expected = [scored(8), scored(7), scored(6), scored(5), [end(finish="LENGTH")]]
    assert bench.records() == [record for group in expected for record in group]
    names = ("prompt_tokens", "generated_tokens", "finished_length", "running", "blocks_used")
    assert bench.telemetry(*names) == (4, 0, 1, 0, 0)


def test_rows_that_are_left_are_shared_evenly(engine: Engines) -> None:
    """Of eight rows five belong to the running sequences; two that score get one more each, and the third is not
    used. A decode goes first, and a prompt that is not scored is not held up."""
    bench = Bench(engine, max_running=8, max_sequences=8, token_budget=16, log_slots=64, heap_tokens=64, submit_slots=8)
    bench.submit([1], max_tokens=9)
    bench.step()
    for index, flags in enumerate((SCORE, 0, SCORE, 0)):
        bench.submit([9, 8, 7, 6, 5], max_tokens=3, logprobs=1, flags=flags, offset=8 + 8 * index)
    works = [(0, 0, 1, 1, True), (0, 1, 0, 2, True), (0, 2, 0, 5, True), (0, 3, 0, 2, True), (0, 4, 0, 5, True)]
    assert bench.step(3) == works
    assert bench.engine.row_flags() == [0, 4, 4, 0, 4, 4, 0]


def test_scored_tokens_wait_for_room_in_the_log(engine: Engines) -> None:
    """Of seven records three are kept for a next token and the END, and two for the other sequence's next token: one
    group more fits. With four unread the other one, which came later, waits."""
    bench = Bench(engine, log_slots=8, max_running=8, max_sequences=8, eos_tokens=())
    bench.submit([3], max_tokens=0)
    bench.submit([9, 8, 7, 6, 5, 4], max_tokens=0, logprobs=1, flags=SCORE)
    bench.submit([3], max_tokens=9, logprobs=1, offset=10)
    assert bench.step() == [(0, 2, 0, 1, True), (0, 1, 0, 2, True)]
    assert bench.step(1, 8, 7, logprobs=own(1, 8, 7)) == []
    assert bench.telemetry("log_stalls") == (2,)
    bench.workers[0].write_log_read(3)
    assert bench.step() == [(0, 1, 2, 1, True)]
    assert bench.step(6, logprobs=own(6)) == []
    bench.read()
    assert bench.step() == [(0, 2, 1, 1, True), (0, 1, 3, 2, True)]
    bench.step(1, 5, 4, logprobs=own(1, 5, 4))
    assert bench.records(start=11) == [*scored(5, 1), *scored(4, 1), end(1, finish="LENGTH")]


def test_a_chunk_with_a_row_that_came_to_nothing_ends_its_sequence(engine: Engines) -> None:
    """With one record, whichever row it was and whatever the others say; the next sequence is none the worse."""
    bench = Bench(engine, max_running=16, max_sequences=16, log_slots=64, eos_tokens=(2,))
    for index, max_tokens in enumerate((5, 0, 5)):
        bench.submit([9, 8, 7, 6], max_tokens=max_tokens, logprobs=1, flags=SCORE, offset=4 * index)
    bench.submit([9, 8], max_tokens=0, logprobs=1, flags=SCORE, offset=12)
    bench.step()
    sampled = (8, -1, 6, 2, 8, 7, 32, 8, 7, 6, -1, 8)
    bench.step(*sampled, logprobs=own(*(value % 64 for value in sampled)))
    bad = [end(position, finish="ERROR", error="BAD_SAMPLE") for position in (0, 1, 2)]
    assert bench.records() == [*bad, *scored(8, 3), end(3, finish="LENGTH")]
    names = ("finished_error", "finished_length", "finished_stop", "generated_tokens", "blocks_used")
    assert bench.telemetry(*names) == (3, 1, 0, 0, 0)


def test_a_sequence_is_cancelled_while_its_prompt_is_scored(engine: Engines) -> None:
    bench = Bench(engine, max_running=2)
    bench.submit([9, 8, 7, 6, 5], max_tokens=0, logprobs=1, flags=SCORE)
    bench.step()
    bench.workers[0].cancel(0)
    assert bench.step(8, 7, logprobs=own(8, 7)) == []
    assert bench.records() == [*scored(8), *scored(7), end()]


# admission


def test_admission_is_strictly_first_come_first_served(engine: Engines) -> None:
    """Pool of 4 blocks of 4: 9 positions reserve 3; 8 more do not fit, and 1 that would fit must wait too."""
    bench = Bench(engine, blocks=5, block_tokens=4, eos_tokens=())
    bench.submit([1] * 5, max_tokens=5)
    bench.submit([2] * 5, max_tokens=4, offset=8)
    bench.submit([3], max_tokens=1, offset=16)
    assert bench.step() == [(0, 0, 0, 5, True)]
    assert bench.telemetry("running", "waiting", "blocks_used") == (1, 2, 2)
    assert bench.step(9) == [(0, 0, 5, 1, True)]
    assert [bench.step(9) for _ in range(3)] == [[(0, 0, at, 1, True)] for at in (6, 7, 8)]
    assert bench.step(9) == [(0, 2, 0, 1, True), (0, 1, 0, 5, True)]


def test_what_waits_is_admitted_by_class(engine: Engines) -> None:
    """The lowest one first, across channels, first come, first served within one; what runs is left alone."""
    bench = Bench(engine, channels=2, max_running=1, max_sequences=8, submit_slots=8, eos_tokens=())
    bench.submit([1], max_tokens=1, priority=7)
    assert bench.step() == [(0, 0, 0, 1, True)]
    for channel, priority in ((0, 1), (0, 0), (1, 0), (1, -3), (0, 1), (1, 2), (1, -3)):
        bench.submit([1], max_tokens=1, channel=channel, priority=priority)
    order = []
    while works := bench.step(5):
        order += [work[:2] for work in works]
        for channel in range(2):
            bench.read(channel)
    taken = {0: [1, 0, 1], 1: [0, -3, 2, -3]}
    classes = [taken[channel][position - (1 - channel)] for channel, position in order]
    assert classes == sorted(classes)
    assert [each for each in order if each[0] == 0] == [(0, 2), (0, 1), (0, 3)]
    assert [each for each in order if each[0] == 1] == [(1, 1), (1, 3), (1, 0), (1, 2)]


def test_the_last_token_needs_no_block(engine: Engines) -> None:
    bench = Bench(engine, blocks=2, block_tokens=4)
    bench.submit([1, 1, 1], max_tokens=2)
    assert bench.step() == [(0, 0, 0, 3, True)]
    bench.submit([1, 1, 1], max_tokens=3, offset=8)
    bench.step(1)
    assert bench.records() == [token(1), ("REJECT", "ERROR", "TOO_LARGE", 1, 0)]


def test_max_running(engine: Engines) -> None:
    bench = Bench(engine, max_running=1)
    bench.submit([1, 1], max_tokens=1)
    bench.submit([2, 2, 2], max_tokens=1, offset=8)
    assert bench.step() == [(0, 0, 0, 2, True)]
    assert bench.step(9) == [(0, 1, 0, 3, True)]


def test_the_table_bounds_what_is_taken(engine: Engines) -> None:
    bench = Bench(engine, max_sequences=2, max_running=1, submit_slots=4)
    for index in range(3):
        bench.submit([index], max_tokens=1, offset=index)
    bench.step()
    assert bench.out("submit_read") == 2
    bench.step(9)
    assert bench.out("submit_read") == 3


# log room


def test_sequences_beyond_the_logs_room_are_held_one_token_back(engine: Engines) -> None:
    """Two free records: the third may compute its prompt but for the last token."""
    bench = Bench(engine, log_slots=2, eos_tokens=())
    for index in range(3):
        bench.submit([index] * 3, max_tokens=3, offset=4 * index)
    assert bench.step() == [(0, 0, 0, 3, True), (0, 1, 0, 3, True), (0, 2, 0, 2, False)]
    assert bench.step(5, 6) == []
    assert bench.telemetry("log_stalls") == (3,)
    bench.workers[0].write_log_read(1)
    assert bench.step() == [(0, 0, 3, 1, True)]
    assert bench.telemetry("log_stalls") == (5,)
    assert bench.records(start=0) == [token(5, 0), token(6, 1)]


def test_an_ending_sequence_keeps_its_record(engine: Engines) -> None:
    """With the log full, the END of a cancelled sequence waits, and the next free record is its own."""
    bench = Bench(engine, log_slots=1, eos_tokens=())
    bench.submit([1], max_tokens=9)
    bench.submit([2], max_tokens=9, offset=4)
    assert bench.step() == [(0, 0, 0, 1, True)]
    bench.workers[0].cancel(0)
    assert bench.step(7) == []
    assert (bench.out("log_written"), *bench.telemetry("running", "finished_cancelled")) == (1, 1, 1)
    bench.read()
    assert bench.step() == []
    assert bench.step() == []
    assert bench.records(start=1) == [end(0)]
    bench.read()
    assert bench.step() == [(0, 1, 0, 1, True)]


def test_waiting_counts_only_what_is_not_admitted(engine: Engines) -> None:
    """A sequence that has ended and waits for room in its log is neither running nor waiting."""
    bench = Bench(engine, log_slots=1, eos_tokens=())
    bench.submit([1], max_tokens=9)
    bench.step()
    bench.workers[0].cancel(0)
    bench.step(7)
    assert bench.telemetry("running", "waiting", "blocks_used") == (0, 0, 0)


def test_no_submission_is_taken_without_a_record_to_refuse_it(engine: Engines) -> None:
    bench = Bench(engine, log_slots=1)
    bench.submit([1], max_tokens=0)
    bench.submit([1], max_tokens=0)
    bench.step()
    assert (bench.out("submit_read"), len(bench.records())) == (1, 1)
    bench.step()
    assert bench.out("submit_read") == 1
    bench.read()
    bench.step()
    assert bench.out("submit_read") == 2


# cancels


def test_cancels_of_waiting_running_and_ended_sequences(engine: Engines) -> None:
    bench = Bench(engine, max_running=1, eos_tokens=())
    bench.submit([1, 1], max_tokens=5)
    bench.submit([2, 2], max_tokens=5, offset=4)
    bench.step()
    worker = bench.workers[0]
    worker.cancel(1)
    assert bench.step(7) == [(0, 0, 2, 1, True)]
    assert bench.records() == [token(7), end(1)]
    worker.cancel(0)
    worker.cancel(0)
    assert bench.step(8) == []
    worker.cancel(1)
    bench.step()
    assert bench.records()[2:] == [token(8), end(0)]
    assert (bench.out("cancel_read"), bench.out("protocol_errors")) == (4, 0)
    assert bench.telemetry("finished_cancelled", "blocks_used") == (2, 0)


@pytest.mark.parametrize("target", [1, 2, 2**32, 2**64 - 1])
def test_a_cancel_of_what_was_never_taken_is_a_protocol_error(engine: Engines, target: int) -> None:
    bench = Bench(engine)
    bench.submit([1, 1], max_tokens=5)
    bench.step()
    bench.workers[0].cancel(target)
    assert bench.step(7) == [(0, 0, 2, 1, True)]
    assert (bench.out("cancel_read"), bench.out("protocol_errors"), *bench.telemetry("protocol_errors")) == (1, 1, 1)


def test_a_cancel_in_the_step_that_takes_its_target(engine: Engines) -> None:
    bench = Bench(engine)
    bench.submit([1], max_tokens=5)
    bench.workers[0].cancel(0)
    assert bench.step() == []
    assert bench.records() == [end(0)]


def test_a_cancel_reaches_only_its_own_channel(engine: Engines) -> None:
    bench = Bench(engine, channels=2, eos_tokens=())
    bench.submit([1], max_tokens=5, channel=0)
    bench.submit([2], max_tokens=5, channel=1)
    bench.step()
    bench.workers[1].cancel(0)
    assert bench.step(7, 8) == [(0, 0, 1, 1, True)]
    assert bench.records(1) == [token(7), end(0)]


def test_cancels_of_a_step_are_bounded(engine: Engines) -> None:
    bench = Bench(engine, cancel_slots=64, channels=2)
    for channel in range(2):
        for _ in range(20):
            bench.workers[channel].cancel(5)
    bench.step()
    assert (bench.out("cancel_read", 0), bench.out("cancel_read", 1)) == (20, 12)
    bench.step()
    assert (bench.out("cancel_read", 0), bench.out("cancel_read", 1)) == (20, 20)


# intake


def test_channels_take_turns(engine: Engines) -> None:
    """The first step began with channel 0, so this one begins with 1: 1.0, 0.0, 0.1, 0.2."""
    bench = Bench(engine, channels=2)
    for index in range(3):
        bench.submit([1, 1], max_tokens=1, channel=0, offset=2 * index)
    bench.submit([1, 1], max_tokens=1, channel=1)
    assert [work[:2] for work in bench.step()] == [(1, 0), (0, 0), (0, 1), (0, 2)]


def test_submissions_of_a_step_are_bounded(engine: Engines) -> None:
    bench = Bench(engine, channels=2, submit_slots=32, max_sequences=64)
    for channel in range(2):
        for _ in range(20):
            bench.submit([1], max_tokens=1, channel=channel)
    bench.step()
    assert (bench.out("submit_read", 0), bench.out("submit_read", 1)) == (16, 16)


def test_the_prompt_is_copied_when_it_is_taken(engine: Engines) -> None:
    bench = Bench(engine, token_budget=4, buckets=(4,))
    bench.submit([1, 2, 3, 4, 5], max_tokens=1)
    bench.step()
    bench.workers[0].write_prompt(0, [FAR] * 64)
    assert bench.step() == [(0, 0, 4, 1, True)]
    assert bench.records() == []


@pytest.mark.parametrize(("lap_shift", "lease_shift"), [(-1, 0), (1, 0), (0, -1), (0, 1)])
def test_a_record_of_another_lap_or_lease_is_not_there(engine: Engines, lap_shift: int, lease_shift: int) -> None:
    bench = Bench(engine)
    bench.submit([1], max_tokens=1)
    bench.workers[0].commit(0, lap_shift, lease_shift)
    assert bench.step() == []
    assert bench.out("submit_read") == 0
    bench.workers[0].commit(0)
    assert bench.step() == [(0, 0, 0, 1, True)]


def test_the_ring_wraps_and_old_records_are_not_taken_again(engine: Engines) -> None:
    bench = Bench(engine, submit_slots=2, eos_tokens=())
    for index in range(7):
        bench.submit([3], max_tokens=1)
        assert bench.step() == [(0, index, 0, 1, True)]
        assert bench.step(index) == []
        bench.read()
    assert bench.out("submit_read") == 7


# leases and cursors


def test_leases_are_taken_in_order_only(engine: Engines) -> None:
    bench = Bench(engine, leased=False)
    for word, lease, errors in [(2, 0, 1), (2, 0, 1), (0, 0, 1), (1, 1, 1), (1, 1, 1), (3, 1, 2), (1, 1, 2), (2, 2, 2)]:
        bench.workers[0].write_lease(word)
        bench.step()
        assert (bench.out("lease"), bench.out("live"), bench.out("protocol_errors")) == (lease, int(lease > 0), errors)


def test_a_channel_given_back_ends_its_sequences_without_a_record(engine: Engines) -> None:
    bench = Bench(engine)
    bench.submit([1, 1], max_tokens=9)
    bench.step()
    bench.workers[0].write_lease(0)
    assert bench.step(7) == []
    assert (bench.out("lease"), bench.out("live"), bench.out("log_written")) == (1, 0, 1), "the token's alone"
    assert bench.telemetry("finished_cancelled", "blocks_used", "running") == (1, 0, 0)
    bench.workers[0].write_lease(1)
    bench.step()
    assert bench.out("live") == 0


def test_a_new_lease_starts_at_the_logs_end(engine: Engines) -> None:
    bench = Bench(engine, log_slots=4)
    bench.submit([1, 1], max_tokens=9)
    bench.step()
    bench.workers[0].ask()
    assert bench.step(7) == []
    assert (bench.out("lease"), bench.out("live"), bench.out("log_start")) == (2, 1, 1)
    bench.submit([1, 1], max_tokens=9)
    assert bench.step() == [(0, 1, 0, 2, True)]


def test_a_new_lease_has_the_whole_log(engine: Engines) -> None:
    """What the former worker did not read is of no interest any more."""
    bench = Bench(engine, log_slots=1)
    bench.submit([1, 1], max_tokens=9)
    bench.step()
    bench.workers[0].ask()
    bench.step(7)
    bench.submit([1, 1], max_tokens=9)
    assert bench.step() == [(0, 1, 0, 2, True)]


def leave_for(bench: Bench, ahead: int, count: int = 4) -> None:
    """Submissions and cancels of channel 0 under a lease to come, in the order in which they would be taken."""
    worker = bench.workers[0]
    worker.write_prompt(0, [3, 3])
    record = np.zeros((), arena.SubmitRecord)
    record["prompt_tokens"], record["max_tokens"], record["top_p"] = 2, 9, 1
    worker.plant([record] * count, ahead)


@pytest.mark.parametrize("ends", ["given back", "expired", "replaced"])
def test_records_that_were_left_for_a_lease_are_not_taken_under_it(engine: Engines, ends: str) -> None:
    bench = Bench(engine, lease_timeout_ns=100, submit_slots=4, cancel_slots=4)
    leave_for(bench, ahead=1)
    if ends == "given back":
        bench.workers[0].write_lease(0)
        bench.step()
    elif ends == "expired":
        bench.now_ns += 100
        bench.step()
    assert bench.out("live") == (ends == "replaced")
    bench.workers[0].ask()
    for _ in range(3):
        assert bench.step() == []
    assert (bench.out("lease"), bench.out("live"), bench.out("submit_read"), bench.out("cancel_read")) == (2, 1, 0, 0)
    bench.workers[0].after_step()
    bench.submit([7, 7], max_tokens=2, offset=8)
    assert bench.step() == [(0, 0, 0, 2, True)]
    bench.workers[0].cancel(0)
    assert bench.step(5) == []
    assert bench.records() == [token(5), end()]
    assert (bench.out("submit_read"), bench.out("cancel_read"), bench.out("protocol_errors")) == (1, 1, 0)


def test_what_was_left_for_the_lease_after_the_next_is_not_taken_either(engine: Engines) -> None:
    bench = Bench(engine)
    leave_for(bench, ahead=2)
    for lease in (2, 3):
        bench.workers[0].ask()
        assert bench.step() == bench.step() == []
        assert (bench.out("lease"), bench.out("submit_read"), bench.out("cancel_read")) == (lease, 0, 0)


def test_a_holder_that_asks_for_the_next_lease_itself_leaves_nothing(engine: Engines) -> None:
    """Too early with its records, it loses them, and those that it left for later."""
    bench = Bench(engine)
    worker = bench.workers[0]
    worker.ask()
    bench.submit([1, 1], max_tokens=2)
    bench.step()
    leave_for(bench, ahead=1)
    worker.ask()
    assert bench.step() == bench.step() == []
    assert (bench.out("lease"), bench.out("submit_read")) == (3, 0)


def test_a_lease_clears_no_rings_but_its_own(engine: Engines) -> None:
    bench = Bench(engine, channels=2)
    bench.submit([1, 1], max_tokens=2, channel=1)
    bench.workers[0].ask()
    assert bench.step() == [(1, 0, 0, 2, True)]


def test_a_lease_without_heartbeat_expires(engine: Engines) -> None:
    bench = Bench(engine, lease_timeout_ns=100)
    bench.submit([1, 1], max_tokens=9)
    bench.step()
    bench.now_ns += 99
    assert bench.step(7) == [(0, 0, 2, 1, True)]
    bench.workers[0].before_step()
    bench.now_ns += 1
    assert bench.step(8) == [(0, 0, 3, 1, True)]
    bench.now_ns += 99
    assert bench.step(9) == [(0, 0, 4, 1, True)]
    bench.now_ns += 1
    assert bench.step(10) == []
    assert (bench.out("lease"), bench.out("live"), bench.out("protocol_errors")) == (1, 0, 0)


def test_read_cursors(engine: Engines) -> None:
    """Three records are written; a cursor beyond is an error once, one that goes back is ignored."""
    bench = Bench(engine, log_slots=4, eos_tokens=())
    bench.submit([1], max_tokens=9)
    bench.step()
    for _ in range(3):
        bench.step(5)
    assert bench.out("log_written") == 3
    worker, expected = bench.workers[0], []
    for word in (5, 5, 2**64 - 1, 4, 2, 0):
        worker.write_log_read(word)
        written = bench.out("log_written")
        bench.step(*[5] * bench.telemetry("step_tokens")[0])
        expected.append((written, bench.out("log_written"), bench.out("protocol_errors")))
    assert expected == [(3, 4, 1), (4, 4, 1), (4, 4, 2), (4, 4, 2), (4, 5, 2), (5, 6, 2)]


# commands


def test_draining_finishes_and_takes_nothing(engine: Engines) -> None:
    bench = Bench(engine)
    bench.submit([1], max_tokens=2)
    bench.step()
    bench.command = Command.DRAIN
    bench.submit([1], max_tokens=2)
    assert bench.step(7) == [(0, 0, 1, 1, True)]
    assert bench.step(8) == []
    assert (bench.out("submit_read"), *bench.telemetry("state")) == (1, 2)
    bench.command = Command.RUN
    assert bench.step() == [(0, 1, 0, 1, True)]


def test_stop_plans_nothing(engine: Engines) -> None:
    bench = Bench(engine)
    bench.submit([1], max_tokens=9)
    bench.step()
    bench.command = Command.STOP
    assert bench.step(7) == []
    assert (bench.records(), *bench.telemetry("state")) == ([token(7)], 3)
