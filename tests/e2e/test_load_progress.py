"""How far a load is, over gRPC and in the terminal of `blinkctl load`."""

from __future__ import annotations

import os
import pty
import re
import subprocess
from pathlib import Path

import grpc
import pytest

from blink_proto import control_pb2
from blink_proto.control_pb2_grpc import ControlStub
from tests.e2e.test_control import CLI, ctl, runtime
from tests.tiny import SIZES, save_tokenizer

LAYERS = 128
UNITS = 3 + 9 * LAYERS + 11
"""Embedding, head and last norm; of a layer seven matrices and two norms; steps of 1, 2, 4, 8, 16, 24, 32, 48, 64, 96
and 128 tokens."""


@pytest.fixture(scope="module")
def deep_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Many tensors."""
    import transformers

    folder = tmp_path_factory.mktemp("deep")
    config = transformers.LlamaConfig(**SIZES | {"num_hidden_layers": LAYERS})
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    save_tokenizer(folder / "tokenizer.json", SIZES["vocab_size"])
    return folder


def test_a_load_says_how_far_it_is(deep_model: Path) -> None:
    with runtime("--threads", "1") as (address, _):
        stub = ControlStub(grpc.insecure_channel(address))
        request = control_pb2.LoadModelRequest(source=str(deep_model), name="deep")
        *steps, last = stub.LoadModel(request, timeout=120)
        assert (last.done, last.stage, last.done_units, last.total_units) == (True, "ready", UNITS, UNITS)
        counted = [step for step in steps if step.total_units]
        assert {step.total_units for step in counted} == {UNITS}
        grows([step.done_units for step in counted])
        assert {step.stage for step in counted} == {"loading and warming up"}
        (again,) = [step for step in stub.LoadModel(request, timeout=20) if step.done]
        assert again.model == last.model

        ctl(address, "unload", "deep", "--grace", "1")
        grows([int(done) for done in re.findall(rf"(\d+)/{UNITS}\b", in_terminal(address, deep_model))])


def grows(done: list[int]) -> None:
    """From nothing to all, by way of something."""
    assert (done[0], done[-1]) == (0, UNITS)
    assert done == sorted(done)
    assert len(set(done)) >= 3


def in_terminal(address: str, folder: Path) -> str:
    """All that `blinkctl load` writes to one."""
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"}
    told = ["--runtime", address, "load", str(folder), "--name", "deep"]
    process = subprocess.Popen([*CLI, *told], stdin=slave, stdout=slave, stderr=slave, env=environment)
    os.close(slave)
    said = b""
    while True:
        try:
            said += os.read(master, 65536)
        except OSError:  # the other end is closed
            break
    os.close(master)
    assert process.wait(20) == 0
    text = said.decode()
    assert "loaded deep" in text
    return text
