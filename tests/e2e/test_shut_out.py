"""Both programs over the stand-in for DOCA's libraries: an administrator ends a session, and shuts a DPU out."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import httpx
import pytest

from blink_deploy import authority
from blink_proto.roles import Role
from tests.control import READER, make_certificates, secure_runtime
from tests.e2e.test_control_tls import eventually, secured_front_end
from tests.front_end import ready_line
from tests.transport.doca.build import SHIM_ADDRESS, shim_folder

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build the stand-in with")
OPTIONS = ("--transport", "doca", "--rdma-address", SHIM_ADDRESS)


def test_an_administrator_shuts_a_front_end_out(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(shim_folder()))
    certificates = make_certificates(tmp_path / "certs")
    authority.issue(certificates, Role.FRONT_END, "dpu-a", 30)
    refused, audit = tmp_path / "refused", tmp_path / "audit"
    refused.write_text("")
    arguments = ("--model", str(tiny_model), "--name", "tiny", "--channels", "2", *OPTIONS)
    watched = ("--refused-certificates", str(refused), "--audit-log", str(audit))
    with (
        secure_runtime(certificates, tmp_path, *arguments, *watched) as runtime,
        secured_front_end(runtime, tmp_path / "dpu", "--name", "dpu-a", *OPTIONS, role="dpu-a") as (process, log),
    ):
        (url,) = ready_line(process, log)

        def status() -> int:
            body = {"model": "tiny", "prompt": "hello", "max_tokens": 4}
            return httpx.post(f"{url}/v1/completions", json=body, timeout=30).status_code

        def sessions() -> list[dict]:
            found: list[dict] = json.loads(runtime.ctl("-o", "json", "sessions", role=READER).stdout)
            return found

        def opened() -> int:
            return log.read_text().count('"session opened"')

        eventually(lambda: status() == 200)
        assert [one["front_end"] for one in sessions()] == ["dpu-a/0"]
        assert opened() == 1
        assert "not for the role reader" in runtime.ctl("sessions", "end", "dpu-a/0", role=READER, status=4).stderr
        assert "NOT_FOUND" in runtime.ctl("sessions", "end", "dpu-b/0", status=1).stderr
        assert "its channels are free" in runtime.ctl("sessions", "end", "dpu-a/0").stdout
        eventually(lambda: opened() == 2 and status() == 200)  # it may come again

        draft = refused.with_suffix(".new")
        draft.write_text("CN=blink dpu-a\n")
        os.replace(draft, refused)
        eventually(lambda: sessions() == [])
        eventually(lambda: "this certificate is refused" in log.read_text())
        eventually(lambda: status() == 503)
        assert json.loads(runtime.ctl("-o", "json", "status").stdout)["channels_free"] == 2
        count = opened()
        refused.write_text("# nobody\n")
        eventually(lambda: opened() == count + 1 and status() == 200)
    ended = [line for line in map(json.loads, audit.read_text().splitlines()) if line["method"] == "CloseSession"]
    assert [(line["role"], line["outcome"]) for line in ended] == [
        ("reader", "PERMISSION_DENIED"),
        ("administrator", "NOT_FOUND"),
        ("administrator", "OK"),
    ]
    assert ended[-1]["request"] == {"front_end": "dpu-a/0"}
    assert "Traceback" not in (tmp_path / "runtime.log").read_text()
