"""Sampling on the GPU: the host's tokens, exactly, for every way to sample, and its log-probabilities."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device", allow_module_level=True)
pytest.importorskip("cuda.bindings.driver")
if find_spec("gpu_runtime._host_sampling") is None:  # a library of C functions, which cannot be imported
    pytest.skip("the host's kernels are not built", allow_module_level=True)

from gpu_runtime.kernels.sampling import sample
from tests.sampling_cases import WAYS, Cases, cases, odd, spread
from tests.sampling_device import UNTOUCHED, OnDevice

pytestmark = pytest.mark.gpu


def assert_same(made: Cases) -> None:
    """The device does what the host does."""
    expected = sample(made.logits, made.rows, made.slots, made.logprobs)
    step = OnDevice(made)
    step.launch()
    torch.cuda.synchronize()
    assert step.tokens() == expected.tolist()
    found = step.logprobs()
    np.testing.assert_array_equal(found["tokens"], made.logprobs["tokens"])
    np.testing.assert_array_equal(found["rank"], made.logprobs["rank"])
    np.testing.assert_allclose(found["logprobs"], made.logprobs["logprobs"], rtol=2e-7, atol=1e-7)


@pytest.mark.parametrize("vocabulary", [5, 40, 4099, 49152, 128256])
def test_device_and_host_agree(vocabulary: int) -> None:
    """Rows of 4,099 tokens begin at every offset within 16 bytes."""
    assert_same(cases(spread(len(WAYS) * 8, vocabulary), WAYS, seed=vocabulary))


@pytest.mark.parametrize("vocabulary", [40, 50001])
def test_device_and_host_agree_on_odd_logits(vocabulary: int) -> None:
    ways = [{"temperature": 1, "top_k": 9}, {"temperature": 1, "top_p": 0.6, "logprobs": 21}, {"temperature": 0}]
    assert_same(cases(odd(vocabulary).repeat(3, 1), [way for way in ways for _ in range(8)]))


def test_a_captured_launch_follows_the_plan() -> None:
    """Rows beyond the plan's stay untouched; the number of rows and what they ask is read when the graph runs."""
    made = cases(spread(64, 32000), WAYS)
    expected = sample(made.logits, made.rows, made.slots, made.logprobs).tolist()
    step = OnDevice(made, rows=3)
    step.launch()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        step.launch()
    for rows in (0, 1, 50, 64):
        step.plan.sampled.fill_(UNTOUCHED)
        step.plan.header[5] = rows
        graph.replay()
        torch.cuda.synchronize()
        assert step.tokens() == expected[:rows] + [UNTOUCHED] * (64 - rows)


def test_the_same_tokens_every_time() -> None:
    step = OnDevice(cases(spread(128, 128256), WAYS))
    step.launch()
    first = step.tokens()
    for _ in range(20):
        step.launch()
        assert step.tokens() == first
