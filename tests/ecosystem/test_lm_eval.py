"""lm-eval, in an environment of its own, over the front end: what it finds is what the device's scores say."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ecosystem import lm_eval_tasks
from tests.ecosystem.environments import python_with
from tests.ecosystem.told import make_told_device
from tests.front_end import MODEL, FrontEnd, front_end


@pytest.fixture(scope="module")
def front() -> Iterator[FrontEnd]:
    device = make_told_device()
    device.script = lm_eval_tasks.script
    with front_end("--workers", "1", "--no-access-log", device=device) as running:
        yield running


def evaluate(folder: Path, model: str, url: str, tasks: str, *flags: str, arguments: str = "") -> Any:
    """lm-eval's results, and its samples by task."""
    python = python_with("lm-eval[api]", "transformers")
    lm_eval_tasks.write(folder)
    command = [str(python), "-m", "lm_eval", "run", "--model", model, "--tasks", tasks, "--include_path", str(folder)]
    command += ["--model_args", f"model={MODEL},base_url={url},max_retries=1,num_concurrent=4{arguments}"]
    command += ["--output_path", str(folder / "out"), "--log_samples", *flags]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home"), "OPENAI_API_KEY": "none"}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | offline
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-5000:]
    (results,) = (folder / "out").rglob("results_*.json")
    samples = {
        path.name.split("_")[1]: [json.loads(line) for line in path.read_text().splitlines()]
        for path in (folder / "out").rglob("samples_*.jsonl")
    }
    return json.loads(results.read_text())["results"], samples


@pytest.mark.ecosystem
@pytest.mark.timeout(600)
def test_completions(front: FrontEnd, tmp_path: Path) -> None:
    arguments = f",tokenizer={tmp_path},tokenizer_backend=huggingface"
    results, samples = evaluate(
        tmp_path, "local-completions", f"{front.http}/v1/completions", "choose,say", arguments=arguments
    )
    expected = lm_eval_tasks.expected()
    found = {one["doc_id"]: [float(said[0][0]) for said in one["resps"]] for one in samples["choose"]}
    assert [found[i] for i in range(len(expected))] == [pytest.approx(sums, abs=1e-5) for sums in expected]
    right = sum(sums.index(max(sums)) == 0 for sums in expected)
    assert 0 < right < len(expected), "the task should not be all or nothing"
    assert results["choose"]["acc,none"] == pytest.approx(right / len(expected))
    assert results["say"]["exact_match,none"] == 1


@pytest.mark.ecosystem
@pytest.mark.timeout(600)
@pytest.mark.skipif(os.environ.get("BLINK_ECOSYSTEM") != "all", reason="`make test-ecosystem` runs it: it takes long")
def test_chat(front: FrontEnd, tmp_path: Path) -> None:
    results, _ = evaluate(
        tmp_path, "local-chat-completions", f"{front.http}/v1/chat/completions", "say", "--apply_chat_template"
    )
    assert results["say"]["exact_match,none"] == 1
