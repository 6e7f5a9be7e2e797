"""What others named cannot blind the operator: markup, control characters and more in every answer that is shown."""

from __future__ import annotations

import asyncio
import io
import json
import re
import unicodedata
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from blink_deploy import ctl, output
from blink_deploy.ctl import app
from blink_deploy.output import plain
from blink_deploy.watching.render import line, screen
from blink_deploy.watching.view import Sample, view_of
from blink_proto import control_pb2
from blink_proto.control_pb2_grpc import ControlServicer, add_ControlServicer_to_server
from gpu_runtime.config import make_config
from gpu_runtime.control.errors import BadRequestError, check_name
from gpu_runtime.control.runtime import Runtime

NAMES = [
    "[/x]",
    "t[/x]y [bold red]alarm[/bold red] :smiley:",
    "[link=http://a.example]b[/link]",
    "clear\x1b[2J\x1b[31m title\x1b]0;owned\x07 one-byte\x9b31m",
    "over\rwritten two\nlines turned\u202eround back\b\bspace",
]


class Hostile(ControlServicer):  # type: ignore[misc]
    """Whatever has a name has this one."""

    name = ""

    def _model(self) -> control_pb2.Model:
        return control_pb2.Model(name=self.name, architecture=self.name, dtype=self.name)

    def _state(self) -> control_pb2.State:
        made = control_pb2.State(phase=control_pb2.PHASE_SERVING, model=self.name, detail=self.name, life=1)
        made.telemetry.steps = 1
        return made

    def GetServerInfo(self, request: Any, context: Any) -> control_pb2.GetServerInfoResponse:
        return control_pb2.GetServerInfoResponse(version=self.name, device=self.name, state=self._state())

    def ListModels(self, request: Any, context: Any) -> control_pb2.ListModelsResponse:
        return control_pb2.ListModelsResponse(models=[self._model()])

    def ListSessions(self, request: Any, context: Any) -> control_pb2.ListSessionsResponse:
        one = control_pb2.Session(front_end=self.name, transport=self.name, gpu_memory=self.name)
        return control_pb2.ListSessionsResponse(sessions=[one])

    def LoadModel(self, request: Any, context: Any) -> Iterator[control_pb2.LoadModelProgress]:
        yield control_pb2.LoadModelProgress(stage=self.name)
        yield control_pb2.LoadModelProgress(done=True, model=self._model())

    def UnloadModel(self, request: Any, context: Any) -> None:
        context.abort(grpc.StatusCode.NOT_FOUND, self.name)

    def WatchState(self, request: Any, context: Any) -> Iterator[control_pb2.State]:
        yield self._state()


@pytest.fixture(scope="module")
def hostile() -> Iterator[tuple[Hostile, str]]:
    made, server = Hostile(), grpc.server(ThreadPoolExecutor(2))
    add_ControlServicer_to_server(made, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield made, f"127.0.0.1:{port}"
    server.stop(0).wait()


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no name is folded."""
    monkeypatch.setattr(output.console, "_width", 240)


def run(address: str, *arguments: str) -> Result:
    ran = CliRunner().invoke(app, ["--runtime", address, *arguments])
    assert ran.exception is None or isinstance(ran.exception, SystemExit), ran.exception
    return ran


def is_safe(text: str) -> bool:
    return not any(unicodedata.category(one) in ("Cc", "Cf") for one in text.replace("\n", ""))


def as_seen(name: str) -> str:
    """By hand, for these names."""
    for raw, seen in (("\x1b", "\\x1b"), ("\x07", "\\x07"), ("\x9b", "\\x9b"), ("\r", "\\r"), ("\b", "\\x08")):
        name = name.replace(raw, seen)
    return name.replace("\n", " ").replace("\u202e", "\\u202e")


@pytest.mark.parametrize("name", NAMES)
def test_names_in_every_table(hostile: tuple[Hostile, str], name: str) -> None:
    hostile[0].name = name
    for command in (["status"], ["list"], ["sessions"], ["load", "x"], ["watch"], ["watch", "--interval", "0"]):
        ran = run(hostile[1], *command)
        assert ran.exit_code == 0, ran.output
        assert as_seen(name) in ran.stdout, (command, ran.stdout)
        assert is_safe(ran.output), (command, ran.output)
    refused = run(hostile[1], "unload", "x")
    assert refused.exit_code == 1
    assert f"NOT_FOUND: {as_seen(name)}\n" in refused.output


@pytest.mark.parametrize("name", NAMES)
def test_names_in_json(hostile: tuple[Hostile, str], name: str) -> None:
    """As they are, and still nothing that a terminal would obey."""
    hostile[0].name = name
    for command, where in (
        (["status"], lambda found: found["state"]["model"]),
        (["list"], lambda found: found[0]["name"]),
        (["sessions"], lambda found: found[0]["front_end"]),
        (["load", "x"], lambda found: found["name"]),
        (["watch"], lambda found: found["model"]),
    ):
        ran = run(hostile[1], "-o", "json", *command)
        assert where(json.loads(ran.stdout)) == name
        assert is_safe(ran.output)


@pytest.mark.parametrize("name", NAMES)
def test_names_in_a_watching_terminal(name: str) -> None:
    """The screen that is refreshed in place."""
    state = control_pb2.State(phase=control_pb2.PHASE_SERVING, model=name, detail=name)
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(screen(view_of(None, Sample(0.0, state)), [], 30.0))
    shown = console.export_text()
    assert shown.count(as_seen(name)) == 2
    assert is_safe(shown)
    assert is_safe(line(view_of(None, Sample(0.0, state))))


@pytest.mark.parametrize("name", NAMES)
def test_names_in_a_progress_bar(hostile: tuple[Hostile, str], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a terminal, whose own control sequences are there too: only those of the bar."""
    said = io.StringIO()
    made = Console(file=said, force_terminal=True, width=240, color_system=None, markup=False, emoji=False)
    monkeypatch.setattr(ctl, "errors", made)
    hostile[0].name = name
    assert run(hostile[1], "load", "x").exit_code == 0
    assert as_seen(name) in said.getvalue()
    assert is_safe(re.sub(r"\x1b\[(\?25[lh]|\d*[AK])|\r", "", said.getvalue()))


def test_a_phase_of_a_later_version(hostile: tuple[Hostile, str]) -> None:
    state = control_pb2.State()
    state.ParseFromString(b"\x08\x63")  # phase = 99
    assert view_of(None, Sample(0.0, state)).phase == "99"


def test_ordinary_names_are_shown_as_they_are() -> None:
    for name in ("Llama-3.2-1B", "dpu-a/0", "Qwen 2.5", "模型", "naïve"):
        assert plain(name) == name
        check_name("front_end", name)


def test_names_that_are_not_taken(tiny_folder: Path) -> None:
    """Neither of front ends nor of models; in the latter case nothing is begun."""
    for name in ("", "x" * 129, *(name for name in NAMES if not name.isprintable())):
        with pytest.raises(BadRequestError, match="printable"):
            check_name("front_end", name)
    check_name("front_end", "x" * 128)
    runtime = Runtime(make_config("cpu"))
    with pytest.raises(BadRequestError, match="the model's name"):
        asyncio.run(runtime.load(str(tiny_folder), "a\x1b[2J", lambda done, total, what: None))
    assert runtime.watch.state.phase == control_pb2.PHASE_IDLE
    assert runtime.watch.state.epoch == 0
