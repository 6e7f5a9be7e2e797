"""A lease shows only when everything before it is wiped: what its front end writes at once stays, and is taken. Its end
shows only when the log is wiped."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from blink_proto import arena
from gpu_runtime.scheduler import host
from tests.emulation.build import build_emulated
from tests.property.bench import Bench, CoreEngine

Answer = Callable[[Bench, int, NDArray[np.uint8]], None]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    path = build_emulated("told_at_once.cpp", tmp_path_factory.mktemp("emulated"))
    loaded = ctypes.CDLL(str(path))
    pointer, number = ctypes.c_void_p, ctypes.c_uint64
    loaded.blink_answer_at_once.argtypes = [pointer, number, pointer, pointer, number]
    loaded.blink_look_at_once.argtypes = [pointer, pointer, pointer, number]
    return loaded


@pytest.fixture
def answer_at_once(library: ctypes.CDLL) -> Iterator[Answer]:
    """Writes all of channel 0 behind its control words as soon as a lease shows."""

    def answer(bench: Bench, lease: int, content: NDArray[np.uint8]) -> None:
        to = written(bench)
        library.blink_answer_at_once(status_of(bench), lease, to.ctypes.data, content.ctypes.data, to.nbytes)

    host.use_library(library._name)
    yield answer
    host.use_library(None)


def status_of(bench: Bench) -> int:
    """Address of channel 0's ChannelOut."""
    assert isinstance(bench.engine, CoreEngine)
    assert arena.CHANNEL_OUT_OFFSETS["lease"] == 0
    return bench.engine.outbound.bytes.ctypes.data + 8 * bench.engine.outbound.control_at(0, "lease")


def written(bench: Bench) -> NDArray[np.uint8]:
    """Rings and heap of channel 0, up to the end of what is its own."""
    layout = bench.inbound.layout
    start = layout.channel_offset(0)
    return bench.inbound.bytes[start + layout.channel_submit_offset : start + layout.channel_bytes]


def test_nothing_that_follows_a_lease_is_wiped(answer_at_once: Answer) -> None:
    """The first lease, and one that follows another without a pause."""
    bench = Bench(CoreEngine, leased=False)
    worker = bench.workers[0]
    record = np.zeros((), arena.SubmitRecord)
    record["prompt_tokens"], record["max_tokens"], record["top_p"] = 2, 9, 1
    for lease in (1, 2):
        written(bench)[:] = 0xFF
        worker.write_prompt(0, [5, 5])
        worker.ask()
        worker.write_record(record, 0)
        worker.commit(0)
        content = written(bench).copy()
        answer_at_once(bench, lease, content)
        assert bench.step() == []
        assert np.array_equal(written(bench), content)
        if lease == 2:
            assert bench.step() == [(0, 0, 0, 2, True)]


@pytest.mark.usefixtures("answer_at_once")
def test_nothing_is_left_in_the_log_when_the_end_of_a_lease_shows(library: ctypes.CDLL) -> None:
    """Also of the record that came in that step."""
    bench = Bench(CoreEngine, log_slots=4)
    bench.submit([5, 5], max_tokens=9)
    bench.step()
    bench.step(7)
    log = bench.engine.outbound.bytes[8 * bench.engine.outbound.log_at(0, 0) :][: 16 * 4]
    assert log.any()
    seen = np.full_like(log, 0xFF)
    library.blink_look_at_once(status_of(bench), log.ctypes.data, seen.ctypes.data, seen.nbytes)
    bench.workers[0].write_lease(0)
    assert bench.step(8) == []
    assert (bench.out("live"), bench.out("log_written")) == (0, 2)
    assert not seen.any()
