"""The sampling kernel's executor for the GPU, on emulated threads, against the host's."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from gpu_runtime.kernels import sampling
from gpu_runtime.kernels.sampling import sample
from tests.emulation.build import build_emulated
from tests.sampling_cases import WAYS, Cases, cases, odd, spread


@pytest.fixture(scope="module")
def block(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernel's text compiled for one host thread that plays a block's."""
    target = build_emulated("sampling_block.cpp", tmp_path_factory.mktemp("block"))
    library = ctypes.CDLL(str(target))
    library.blink_sample.restype, library.blink_sample.argtypes = None, [ctypes.c_void_p]
    return library


def run(made: Cases) -> tuple[list[int], list[tuple]]:
    tokens = sample(made.logits, made.rows, made.slots, made.logprobs)
    return tokens.tolist(), made.logprobs.tolist()


@pytest.mark.parametrize("vocabulary", [5, 40, 128, 4099, 128256])
def test_block_and_host_agree(block: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, vocabulary: int) -> None:
    rows = len(WAYS) * (4 if vocabulary < 4000 else 1)
    made = cases(spread(rows, vocabulary), WAYS, seed=vocabulary)
    expected = run(made)
    made.logprobs[:] = 0
    monkeypatch.setattr(sampling, "_library", lambda: block)
    found = run(made)
    assert found[0] == expected[0]
    np.testing.assert_equal(found[1], expected[1])


@pytest.mark.parametrize("vocabulary", [40, 5000])
def test_block_and_host_agree_on_odd_logits(
    block: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, vocabulary: int
) -> None:
    ways = [{"temperature": 1, "top_k": 9}, {"temperature": 1, "top_p": 0.6, "logprobs": 21}]
    logits = torch.cat([odd(vocabulary)] * 2).contiguous()
    made = cases(logits, [way for way in ways for _ in range(8)])
    expected = run(made)
    made.logprobs[:] = 0
    monkeypatch.setattr(sampling, "_library", lambda: block)
    assert str(run(made)) == str(expected)
