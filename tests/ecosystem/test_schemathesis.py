"""schemathesis over the OpenAPI document: requests that fit it and requests that do not, and never a 500.

BLINK_SCHEMATHESIS is the number of examples for each route.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.ecosystem.narrowed import for_this_model, only_served
from tests.ecosystem.told import make_told_device
from tests.front_end import MODEL, ROOT, FrontEnd, eventually, front_end

EXAMPLES = os.environ.get("BLINK_SCHEMATHESIS", "20")
EVERYTHING = ("--phases", "coverage,fuzzing")
pytestmark = pytest.mark.timeout(300 if int(EXAMPLES) <= 100 else 0)


@pytest.fixture(scope="module")
def shared() -> Iterator[FrontEnd]:
    flags = ("--workers", "1", "--no-access-log", "--queue-depth", "4096")
    with front_end(*flags, device=make_told_device()) as running:
        yield running


@pytest.fixture
def front(shared: FrontEnd) -> Iterator[FrontEnd]:
    """Afterwards everything has ended, nothing went wrong inside, and it still serves."""
    yield shared
    eventually(lambda: shared.device.playing == 0)
    assert shared.device.channels[0].protocol_errors == 0
    levels = [json.loads(line)["level"] for line in shared.log.read_text().splitlines()]
    assert "error" not in {level.lower() for level in levels}
    answer = httpx.post(f"{shared.http}/v1/completions", json={"model": MODEL, "prompt": "hi"})
    assert answer.json()["choices"][0]["text"] == "hello"


def examine(front: FrontEnd, folder: Path, document: dict[str, Any], seed: int, *flags: str) -> None:
    path = folder / "openapi.json"
    path.write_text(json.dumps(document))
    command = [str(Path(sys.executable).parent / "schemathesis"), "run", str(path), "--url", front.http]
    command += ["--max-examples", EXAMPLES, "--seed", str(seed), *flags]
    hooks = {"SCHEMATHESIS_HOOKS": "tests.ecosystem.schemathesis_hooks", "PYTHONPATH": str(ROOT)}
    environment = {**os.environ, **hooks}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("seed", [1, secrets.randbelow(1 << 32)], ids=["fixed", "random"])
def test_requests_that_fit_and_that_do_not(front: FrontEnd, tmp_path: Path, seed: int) -> None:
    print(f"seed {seed}")
    examine(front, tmp_path, for_this_model(), seed, *EVERYTHING, "--exclude-checks", "positive_data_acceptance")


def test_what_fits_and_has_no_other_reason_against_it_is_served(front: FrontEnd, tmp_path: Path) -> None:
    examine(front, tmp_path, only_served(), 1, *EVERYTHING, "--mode", "positive")


def test_nothing_but_probes_without_a_key(tmp_path: Path) -> None:
    """schemathesis leaves the key out and sends wrong ones where the document asks for it."""
    keys = tmp_path / "keys.toml"
    digest = hashlib.sha256(b"blink-key").hexdigest()
    keys.write_text(f'[tenants.one]\nkeys = ["sha256:{digest}"]\nmetrics = true\n')
    flags = ("--header", "Authorization: Bearer blink-key", "--phases", "coverage,fuzzing")
    checks = "ignored_auth,missing_required_header,not_a_server_error,status_code_conformance"
    with front_end("--workers", "1", "--api-keys", str(keys), device=make_told_device()) as front:
        examine(front, tmp_path, for_this_model(keys=True), 1, *flags, "--checks", checks, "--max-examples", "5")
