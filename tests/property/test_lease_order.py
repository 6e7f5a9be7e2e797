"""A lease shows only when its rings are empty: a record that its front end commits at once is taken."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from blink_proto import arena
from gpu_runtime.scheduler import host
from tests.emulation.build import build_emulated
from tests.property.bench import Bench, CoreEngine

Answer = Callable[[Bench, int], None]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    path = build_emulated("told_at_once.cpp", tmp_path_factory.mktemp("emulated"))
    loaded = ctypes.CDLL(str(path))
    pointer, number = ctypes.c_void_p, ctypes.c_uint64
    loaded.blink_answer_at_once.argtypes = [pointer, number, pointer, number]
    return loaded


@pytest.fixture
def answer_at_once(library: ctypes.CDLL) -> Iterator[Answer]:
    """Commits what stands in the first slot of channel 0 as soon as a lease shows."""

    def answer(bench: Bench, lease: int) -> None:
        assert isinstance(bench.engine, CoreEngine)
        assert arena.CHANNEL_OUT_OFFSETS["lease"] == 0
        status = bench.engine.outbound.bytes.ctypes.data + 8 * bench.engine.outbound.control_at(0, "lease")
        commit = bench.inbound.bytes.ctypes.data + 8 * bench.inbound.submit_commit_at(0, 0)
        library.blink_answer_at_once(status, lease, commit, arena.pack_commit_word(1, lease))

    host.use_library(library._name)
    yield answer
    host.use_library(None)


def test_the_first_record_of_a_lease_is_not_cleared(answer_at_once: Answer) -> None:
    """Of the first lease, and of one that follows another without a pause."""
    bench = Bench(CoreEngine, leased=False)
    worker = bench.workers[0]
    worker.write_prompt(0, [5, 5])
    record = np.zeros((), arena.SubmitRecord)
    record["prompt_tokens"], record["max_tokens"], record["top_p"] = 2, 9, 1
    worker.write_record(record, 0)
    for lease in (1, 2):
        answer_at_once(bench, lease)
        worker.ask()
        assert bench.step() == []
        assert bench.inbound.words[bench.inbound.submit_commit_at(0, 0)] == arena.pack_commit_word(1, lease)
        if lease == 2:
            assert bench.step() == [(0, 0, 0, 2, True)]
