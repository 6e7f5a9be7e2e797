"""Sampling on the host against plain torch in float64, published vectors and probability theory."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from gpu_runtime.kernels import sampling
from gpu_runtime.kernels.sampling import (
    GREEDY_BELOW,
    philox,
    reference_adjusted,
    reference_probabilities,
    sample,
    uniform,
)
from gpu_runtime.scheduler import layout
from tests.sampling_cases import WAYS, Cases, cases, empty_slots, spread, write_bans


# Known answers of Philox4x32-10 from the Random123 distribution (kat_vectors).
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter: tuple, key: tuple, expected: tuple) -> None:
    assert philox(counter, key) == expected


def test_uniform_is_the_top_53_bits() -> None:
    word0, word1, *_ = philox((7, 0, 0, 0), (0x89ABCDEF, 0x01234567))
    assert uniform(0x0123456789ABCDEF, 7) == ((word0 << 32 | word1) >> 11) / 2**53


def rows_of(count: int, **fields) -> np.ndarray:
    rows = np.zeros(count, layout.SampleRow)
    rows["top_p"] = 1.0
    for name, value in fields.items():
        rows[name] = value
    return rows


@pytest.mark.parametrize("temperature", [0.0, 1e-4])
def test_greedy(temperature: float) -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, -1.0], [float("nan"), float("-inf"), -5.0, float("nan")]])
    assert sample(logits, rows_of(2, temperature=temperature)).tolist() == [1, 2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers(temperature: float) -> None:
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([[nan] * 9, [-inf] * 9, [0.0] * 8 + [inf]])
    assert sample(logits, rows_of(3, temperature=temperature)).tolist() == [-1, -1, 8]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.5, 0, 1.0), (2.0, 0, 1.0), (1.0, 5, 1.0), (1.0, 0, 0.7), (1.3, 20, 0.5), (100.0, 0, 1.0)],
)
def test_distribution(temperature: float, top_k: int, top_p: float) -> None:
    """Chi-square of 20,000 draws against the reference's probabilities, and nothing outside its support."""
    torch.manual_seed(1)
    logits = torch.randn(40) * 3
    draws = 20000
    rows = rows_of(draws, temperature=temperature, top_k=top_k, top_p=top_p, seed=42)
    rows["position"] = np.arange(draws)
    counts = np.bincount(sample(logits.expand(draws, -1).contiguous(), rows), minlength=40)
    expected = reference_probabilities(logits, temperature, top_k, top_p).numpy() * draws
    assert counts[expected == 0].sum() == 0
    large = expected >= 5
    rest = expected[~large].sum()
    chi = ((counts - expected) ** 2)[large] / expected[large]
    chi = chi.sum() + ((counts[~large].sum() - rest) ** 2 / rest if rest > 0 else 0)
    freedom = max(1, large.sum() - (rest == 0))
    assert chi < freedom + 5 * math.sqrt(2 * freedom)


def test_draw_depends_on_seed_and_position_alone() -> None:
    logits = torch.randn(1, 500)
    row = rows_of(1, temperature=1.0, seed=9, position=77)
    alone = sample(logits, row)[0]
    rows = rows_of(64, temperature=0.7, top_k=40, seed=np.arange(64))
    rows[13] = row[0]
    crowd = torch.randn(64, 500)
    crowd[13] = logits[0]
    assert sample(crowd, rows)[13] == alone
    others = {int(sample(logits, rows_of(1, temperature=1.0, seed=seed, position=77))[0]) for seed in range(50)}
    assert len(others) > 10


def expected_probabilities(made: Cases, r: int) -> torch.Tensor:
    """What row r is drawn from, [vocabulary]."""
    row, extras, logits = made.rows[r], made.slots.extras[r], made.logits[r]
    min_p = 0.0
    if row["flags"]:
        prompt, end = int(extras["prompt_tokens"]), int(row["position"])
        history = made.slots.history[r].tolist()
        bias = dict(made.slots.bias[r][: extras["bias_count"]].tolist())
        masked = extras["stop_tokens"][: extras["stop_count"]].tolist() if row["flags"] & 2 else []
        logits = reference_adjusted(logits, history[:prompt], history[prompt:end], extras, bias, masked, made.banned[r])
        min_p = float(extras["min_p"])
    if row["temperature"] < GREEDY_BELOW or row["top_k"] == 1:
        return torch.zeros_like(logits).index_fill(0, logits.argmax(), 1.0)
    return reference_probabilities(logits, float(row["temperature"]), int(row["top_k"]), float(row["top_p"]), min_p)


@pytest.mark.parametrize("vocabulary", [7, 300, 20000])
def test_every_way_draws_the_token_at_the_uniform_number(vocabulary: int) -> None:
    """The inverse of the reference's cumulative distribution; equal but for draws within 1e-6 of a boundary."""
    made = cases(spread(len(WAYS) * 8, vocabulary), WAYS, seed=vocabulary)
    tokens = sample(made.logits, made.rows, made.slots, made.logprobs)
    for r, token in enumerate(tokens):
        if made.rows[r]["flags"] & layout.RowFlag.KNOWN:
            assert token == made.slots.history[r][made.rows[r]["position"]]
            continue
        sums = expected_probabilities(made, r).cumsum(0).numpy()
        u = uniform(int(made.rows[r]["seed"]), int(made.rows[r]["position"]))
        low = sums[token - 1] if token else 0.0
        assert low - 1e-6 <= u <= sums[token] + 1e-6, (r, WAYS[r % len(WAYS)])


@pytest.mark.parametrize("vocabulary", [7, 300, 20000])
@pytest.mark.parametrize("count", [1, 2, 8])
def test_log_probabilities(vocabulary: int, count: int) -> None:
    """Those of the model's own distribution, whatever is sampled from it."""
    ways = [{**way, "logprobs": count} for way in WAYS]
    made = cases(spread(len(ways), vocabulary), ways)
    tokens = sample(made.logits, made.rows, made.slots, made.logprobs)
    for r, token in enumerate(tokens.tolist()):
        found, expected = made.logprobs[r], made.logits[r].double().log_softmax(0)
        best = expected.topk(count - 1)
        assert found["tokens"][:count].tolist() == [token, *best.indices.tolist()]
        wanted = [float(expected[token]), *best.values.tolist()]
        assert np.allclose(found["logprobs"][:count], wanted, rtol=2e-6, atol=2e-6)
        assert found["rank"] == 1 + int((expected > expected[token]).sum())


def test_log_probabilities_of_logits_that_are_no_numbers() -> None:
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([[0.0, inf, 1, nan], [-inf, -inf, 5, nan], [-1e30, 0, 1e30, 1]])
    rows, found = rows_of(3, logprobs=4), np.zeros(3, layout.RowLogprobs)
    assert sample(logits, rows, None, found).tolist() == [1, 2, 2]
    assert found["tokens"][:, :4].tolist() == [[1, 1, 2, 0], [2, 2, 0, 1], [2, 2, 3, 1]]
    assert found["logprobs"][:2, :4].tolist() == [[0, 0, -inf, -inf], [0, 0, -inf, -inf]]
    assert found["logprobs"][2, :2].tolist() == [0, 0]
    assert found["rank"].tolist() == [1, 1, 1]


def test_a_known_token_is_the_history_s_whatever_the_logits_say() -> None:
    """Unless they say nothing, or the history has no token there."""
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([[0.0, 3, nan, 1], [0.0, -inf, 0, 0], [inf, 0, 0, 0], [nan, -inf, nan, nan], [0.0] * 4])
    slots = empty_slots(5, 8)
    slots.history[:4], slots.history[4] = 1, 4
    rows = rows_of(5, flags=layout.RowFlag.KNOWN, position=7, slot=np.arange(5), logprobs=2, temperature=0.5)
    found = np.zeros(5, layout.RowLogprobs)
    assert sample(logits, rows, slots, found).tolist() == [1, 1, 1, -1, -1]
    assert found["tokens"][:3, :2].tolist() == [[1, 1], [1, 0], [1, 0]]
    assert found["rank"][:3].tolist() == [1, 4, 2]
    assert found["logprobs"][:3, 0].tolist() == pytest.approx([-math.log(1 + math.exp(-3) + math.exp(-2)), -inf, -inf])
    with pytest.raises(ValueError, match="position"):
        sample(logits, rows_of(5, flags=layout.RowFlag.KNOWN, position=8, logprobs=2), slots, found)


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.4, {1}), (0.5, {1}), (0.51, {1, 3}), (0.75, {1, 3}), (0.76, {0, 1, 3}), (1.0, {0, 1, 2, 3})]
)
def test_top_p_keeps_the_fewest_tokens_that_hold_the_share(top_p: float, kept: set[int]) -> None:
    """Probabilities 1/8, 1/2, 1/8, 1/4, all exact; of equal ones the lower id counts first."""
    logits = torch.tensor([1.0, 4, 1, 2]).log2() * math.log(2)
    rows = rows_of(300, temperature=1, top_p=np.float32(top_p), seed=np.arange(300))
    assert set(sample(logits.expand(300, -1).contiguous(), rows).tolist()) == kept


def test_nothing_is_sampled_when_everything_is_forbidden() -> None:
    slots = empty_slots(1, 8)
    slots.extras["repetition_penalty"], slots.extras["allow_only"], slots.extras["bias_count"] = 1, 1, 2
    slots.bias["token"][0, :2], slots.bias["value"][0, :2] = (3, 5), -np.inf
    rows = rows_of(1, flags=layout.RowFlag.EXTRAS, temperature=1)
    assert sample(torch.randn(1, 9), rows, slots).tolist() == [-1]
    slots.bias["value"][0, 1] = -1000
    assert sample(torch.randn(1, 9), rows, slots).tolist() == [5]


def test_banned_sequences_are_not_completed() -> None:
    """Only where the answer so far ends in all tokens but the last one; the prompt does not count."""
    slots = empty_slots(1, 8)
    slots.history[0, :5] = [5, 6, 7, 8, 9]
    slots.extras["prompt_tokens"], slots.extras["repetition_penalty"] = 2, 1
    rows = rows_of(400, flags=layout.RowFlag.EXTRAS, temperature=1, position=5, seed=np.arange(400))
    write_bans(slots, 0, [[7, 8, 9, 0], [8, 9, 1], [7, 9, 2], [9, 3], [6, 7, 8, 9, 4], [9, 9, 5], [5, 6], [8, 9, 7, 8]])
    assert set(sample(torch.zeros(400, 10), rows, slots).tolist()) == {2, 4, 5, 6, 7, 8, 9}
    slots.extras["prompt_tokens"] = 4
    assert set(sample(torch.zeros(400, 10), rows, slots).tolist()) == set(range(10)) - {3}
    slots.extras["prompt_tokens"] = 5
    assert set(sample(torch.zeros(400, 10), rows, slots).tolist()) == set(range(10))


def test_nothing_is_sampled_when_bans_leave_nothing() -> None:
    """Of the two allowed tokens one is a stop token too early and the other one ends a banned sequence."""
    slots = empty_slots(1, 8)
    slots.history[0, :2] = [1, 3]
    slots.extras["prompt_tokens"] = slots.extras["repetition_penalty"] = slots.extras["allow_only"] = 1
    slots.extras["bias_count"], slots.bias["token"][0, :2] = 2, (3, 5)
    slots.extras["stop_count"], slots.extras["stop_tokens"][0, 0] = 1, 5
    write_bans(slots, 0, [[3, 3]])
    rows = rows_of(1, flags=layout.RowFlag.EXTRAS, temperature=0, position=2)
    assert sample(torch.zeros(1, 9), rows, slots).tolist() == [5]
    rows["flags"] = layout.RowFlag.EXTRAS | layout.RowFlag.MASK_STOPS
    assert sample(torch.zeros(1, 9), rows, slots).tolist() == [-1]


def test_the_model_s_logits_stay_as_they_were() -> None:
    made = cases(spread(len(WAYS), 500), WAYS)
    before = made.logits.clone()
    sample(made.logits, made.rows, made.slots, made.logprobs)
    assert torch.equal(made.logits, before)


def test_weights_are_powers_of_two_in_units_of_their_fixed_point() -> None:
    weight = sampling._library().blink_sampling_weight
    weight.restype, weight.argtypes = sampling.ctypes.c_uint64, [sampling.ctypes.c_float]  # type: ignore[attr-defined]
    octaves = np.concatenate([-np.random.default_rng(0).random(3000) * 45, [0, -1, -40, -41, -1e9, -np.inf]])
    for x in octaves.astype(np.float32).tolist():
        exact = 2.0 ** (40 + x)
        assert abs(weight(x) - exact) <= 3e-7 * exact + 1
    assert weight(0.0) == 2**40
    assert weight(float("nan")) == 0


@pytest.mark.parametrize(
    "fields", [{"flags": 1}, {"logprobs": 1}, {"flags": 1, "slot": 1}, {"flags": 1, "position": 9}]
)
def test_what_is_missing_or_not_there_is_refused(fields: dict) -> None:
    slots = empty_slots(1, 8)
    with pytest.raises(ValueError, match=r"room|slot"):
        sample(torch.zeros(1, 4), rows_of(1, **fields), slots if len(fields) > 1 else None)
