"""The rehearsal of the scheduler's tail, run on emulated threads: always the short way, and always the same."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np

from gpu_runtime.scheduler import image
from tests.emulation.build import build_emulated


def test_every_rehearsal_takes_the_short_way_and_leaves_the_same(tmp_path: Path) -> None:
    library = ctypes.CDLL(str(build_emulated("rehearsal.cpp", tmp_path)))
    room = np.zeros(image.rehearsal_bytes() + 64, np.uint8)
    memory = room[-room.ctypes.data % 64 :][: image.rehearsal_bytes()]
    made = image.make_rehearsal(memory.ctypes.data)
    memory[:] = made.content
    cold = ctypes.create_string_buffer(made.cold, len(made.cold))
    assert library.blink_rehearse(cold, 1)
    once = memory.copy()
    assert (once != made.content).any()  # it has written its works and records
    assert library.blink_rehearse(cold, 500)
    assert (memory == once).all()


def test_it_is_small() -> None:
    assert image.rehearsal_bytes() < 256 << 10
