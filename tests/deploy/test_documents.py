"""What deploy/'s documents say of options, values, metrics, alerts, files and numbers is true."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from gpu_runtime.config import make_config
from gpu_runtime.control.memory import fixed_bytes, token_bytes
from tests.deploy.charts import CHARTS, DEPLOY
from tests.deploy.test_monitoring import SERIES, alerts
from tests.deploy.test_options import COMMANDS
from tests.unit.test_dpu_metrics import PROMISED

DOCUMENTS = sorted(DEPLOY.rglob("*.md"))
EVERY = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(DEPLOY)))
GUIDE = (DEPLOY / "GUIDE.md").read_text()


def code(text: str) -> list[str]:
    """Lines of blocks, continued ones whole, and code within lines."""
    blocks = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return lines + re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def option_names(command: Any) -> set[str]:
    """Of a command and all below it."""
    names = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    return names.union(*(option_names(inner) for inner in getattr(command, "commands", {}).values()))


@EVERY
def test_options_exist(path: Path) -> None:
    for line in code(path.read_text()):
        called = re.search(r"(?<![\w/-])(blinkctl|blink-dpu|blink-gpu|blink)\s+(?=[a-z-])", line)
        if called and not line.startswith(("kubectl", "docker", "chgrp", "crictl", "helm")):
            options = set(re.findall(r"(?<=\s)--[a-z][a-z0-9-]*", line[called.start() :]))
            assert options <= option_names(COMMANDS[called.group(1)]), line


@EVERY
def test_values_exist(path: Path) -> None:
    known: set[str] = set()
    tops: set[str] = set()

    def walk(node: Any, prefix: str) -> None:
        for key, inner in node.items() if isinstance(node, dict) else ():
            known.add(f"{prefix}{key}")
            walk(inner, f"{prefix}{key}.")

    for chart in ("blink-gpu", "blink-dpu", "blink-single"):
        values = yaml.safe_load((CHARTS / chart / "values.yaml").read_text())
        tops |= values.keys()
        walk(values, "")
    for name in re.findall(r"`([a-zA-Z]+(?:\.[a-zA-Z]+)+)`", path.read_text()):
        if (
            name.split(".")[0] in tops
            and not (DEPLOY / path.parent / name).exists()
            and not name.endswith((".toml", ".md"))
        ):
            assert name in known, name


@EVERY
def test_metrics_and_alerts_exist(path: Path) -> None:
    text = path.read_text()
    for name in re.findall(r"\bblink_\w+", text):
        assert name in PROMISED or name in SERIES or name in ("blink_deploy", "blink_proto", "blink_if"), name
    named = set(re.findall(r"\bBlink[A-Z][A-Za-z]+", text))
    assert named <= {rule["alert"] for rule in alerts()}


@EVERY
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", path.read_text()):
        file, _, anchor = target.partition("#")
        found = (path.parent / file) if file else path
        assert found.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)$", found.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}, target


@EVERY
def test_files_that_are_named_exist(path: Path) -> None:
    for name in re.findall(
        r"`((?:deploy|tests|charts|examples|dpf|images|gateway|static-pod)/[\w./-]+)`", path.read_text()
    ):
        assert any((root / name).exists() for root in (DEPLOY, DEPLOY.parent)), name


def test_the_example_of_capacity_is_what_the_runtime_counts() -> None:
    model = SimpleNamespace(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8,
        head_dim=128, num_hidden_layers=32, max_position_embeddings=131072,
    )  # fmt: skip
    folder: Any = SimpleNamespace(parameters=8_030_261_248, config=model)
    config = make_config("cuda")
    token, fixed = token_bytes(folder.config, "bfloat16"), fixed_bytes(config, folder)
    tokens = (0.9 * 139 * 2**30 - fixed) / token
    said = re.search(r"\(139 GiB\): (\d+) KiB a token,\s+([\d.]+) GiB needed, ([\d,]+) tokens", GUIDE)
    assert said is not None
    assert int(said[1]) * 1024 == token
    assert float(said[2]) == pytest.approx(fixed / 2**30, abs=0.05)
    assert int(said[3].replace(",", "")) == pytest.approx(tokens, rel=0.005)
    running = re.search(r"(\d+) of 2,048 \+ 512 tokens above, of which (\d+)", GUIDE)
    assert running is not None
    assert int(running[1]) == pytest.approx(tokens / 2560, rel=0.01)
    assert int(running[2]) == config.max_running


def test_the_guide_says_what_has_not_been_tried() -> None:
    assert "No part of this has run on a BlueField" in GUIDE
    for path in (DEPLOY / "dpf" / "README.md", DEPLOY / "images" / "README.md", DEPLOY / "gateway" / "README.md"):
        assert re.search(r"\*\*[^*]*(not been|never been|been\s+run)[^*]*\*\*", path.read_text()), path
