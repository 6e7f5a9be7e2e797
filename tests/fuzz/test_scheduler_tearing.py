"""A front end that changes its words while the scheduler reads them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.fuzz.test_scheduler_fuzz import build


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_what_was_checked_is_what_is_used(sanitizer: str, tmp_path: Path) -> None:
    program = build("scheduler_tearing.cpp", sanitizer, tmp_path / "tearing")
    ran = subprocess.run([str(program), "1", "500"], capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr[-4000:]
    steps, tokens, rejects = (int(number) for number in ran.stdout.split())
    assert tokens >= 500
    assert min(steps, rejects) > 50, "the writer reached too little"
