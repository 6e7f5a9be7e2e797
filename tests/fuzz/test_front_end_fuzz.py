"""The front end's two decoders on anything: bodies of requests, and what the device writes.

The same random inputs each time, then atheris (libFuzzer by coverage) where it is installed. BLINK_FUZZ_SECONDS lets it
search for so long from a random seed instead.
"""

from __future__ import annotations

import importlib.util
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.front_end import ROOT
from tests.fuzz import channel_target, request_target
from tests.fuzz.json_mutator import mutated

SECONDS = int(os.environ.get("BLINK_FUZZ_SECONDS", "0"))
SEED_BODY = b'{"model":"tiny","prompt":"hi","messages":[{"role":"user","content":"hi"}]}'
SEEDS = {
    "request": [endpoint + SEED_BODY for endpoint in (b"c", b"t")],
    "channel": [random.Random(seed).randbytes(400) for seed in range(8)],
}


def _requests() -> list[bytes]:
    return [(b"c" if i % 2 else b"t") + mutated(SEED_BODY, i) for i in range(10_000)]


def _memories() -> list[bytes]:
    chance = random.Random(1)
    return [chance.randbytes(chance.randrange(1000)) for _ in range(2_000)]


@pytest.mark.parametrize(
    ("one", "inputs"), [(request_target.one, _requests), (channel_target.one, _memories)], ids=["request", "channel"]
)
def test_random_inputs(one: Callable[[bytes], None], inputs: Callable[[], list[bytes]]) -> None:
    for data in inputs():
        one(data)


@pytest.mark.parametrize(
    "found",
    [
        pytest.param(b't{"model":"tiny","prompt":"hi","x":"\xff"}', id="invalid UTF-8 in an ignored field"),
        pytest.param(b't{"model":"tiny","prompt":"hi","\xff":1}', id="invalid UTF-8 in an ignored name"),
        pytest.param(
            b'c{"model":"tiny","messages":[{"role":"user","content":"hi","function_call":""}]}',
            id="a message's own harmless values",
        ),
    ],
)
def test_requests_that_were_found(found: bytes) -> None:
    request_target.one(found)


def test_invalid_text_is_refused_wherever_it_stands() -> None:
    assert request_target.refusal(b't{"model":"tiny","prompt":"hi","x":"\xff"}') == "invalid_json"
    assert request_target.refusal(b't{"model":"tiny","prompt":"hi","x":"\xc3\xa9"}') is None


@pytest.mark.timeout(SECONDS + 300)
@pytest.mark.parametrize(("target", "runs"), [("request", 5_000), ("channel", 1_000)])
def test_by_coverage(target: str, runs: int, tmp_path: Path) -> None:
    if importlib.util.find_spec("atheris") is None:
        pytest.skip("atheris is not installed (it has no wheel for this platform or Python)")
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for i, seed in enumerate(SEEDS[target]):
        (corpus / str(i)).write_bytes(seed)
    bound = [f"-max_total_time={SECONDS}"] if SECONDS else ["-seed=1", f"-runs={runs}"]
    command = [sys.executable, "-m", "tests.fuzz.atheris_run", target, str(corpus), *bound]
    command += ["-max_len=4096", "-len_control=0", "-timeout=10", "-rss_limit_mb=4096", f"-artifact_prefix={tmp_path}/"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "proto")])}
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, env=environment)
    assert done.returncode == 0, done.stderr[-5000:]
