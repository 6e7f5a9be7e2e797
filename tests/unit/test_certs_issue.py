"""`blinkctl certs issue`: a subject of its own for each caller, and what the control plane sees of it."""

from __future__ import annotations

import asyncio
import datetime
import json
import re
import subprocess
from pathlib import Path

import grpc
import pytest
from typer.testing import CliRunner, Result

from blink_deploy import authority
from blink_deploy.ctl import app
from blink_proto import control_pb2
from blink_proto.control_pb2_grpc import ControlStub
from gpu_runtime.control.chain_life import ChainLife
from tests.doors import doors


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    authority.initialise(tmp_path / "certs", [], 30)
    return tmp_path / "certs"


def certs(folder: Path, *arguments: str, status: int = 0) -> Result:
    ran = CliRunner().invoke(app, ["-o", "json", "certs", *arguments, "--dir", str(folder)])
    assert ran.exit_code == status, ran.output
    return ran


def openssl(*arguments: str) -> str:
    return subprocess.run(["openssl", *arguments], capture_output=True, text=True, check=True).stdout


def test_what_is_issued(folder: Path) -> None:
    """Read by OpenSSL: subject, role, purpose, life, issuer; nothing else in the folder changes."""
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    shown = json.loads(certs(folder, "issue", "front-end", "--name", "dpu-a", "--days", "90").stdout)
    made = folder / "dpu-a.pem"
    text = openssl("x509", "-in", str(made), "-noout", "-text", "-nameopt", "RFC2253")
    assert "Subject: CN=blink dpu-a\n" in text
    assert "URI:spiffe://blink/role/front-end\n" in text
    assert "TLS Web Client Authentication\n" in text
    assert "CA:FALSE" in text
    assert "OK" in openssl("verify", "-CAfile", str(folder / "ca.pem"), str(made))
    until = openssl("x509", "-in", str(made), "-noout", "-enddate").strip().removeprefix("notAfter=")
    left = datetime.datetime.strptime(until, "%b %d %H:%M:%S %Y GMT") - datetime.datetime.utcnow()
    assert datetime.timedelta(days=89, hours=23) < left <= datetime.timedelta(days=90)
    assert made.stat().st_mode & 0o777 == 0o644
    assert (folder / "dpu-a-key.pem").stat().st_mode & 0o777 == 0o600
    assert shown[-1]["name"] == "dpu-a"
    assert (shown[-1]["subject"], shown[-1]["role"]) == ("CN=blink dpu-a", "front-end")
    assert {path.name: path.read_bytes() for path in folder.iterdir() if "dpu-a" not in path.name} == before


def test_a_row_of_the_table(folder: Path) -> None:
    certs(folder, "issue", "reader", "--name", "board")
    ran = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["certs", "show", "--dir", str(folder)])
    rows = [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in ran.output.splitlines()]
    heads = next(row for row in rows if "subject" in row)
    shown = dict(zip(heads, next(row for row in rows if row and row[0] == "board"), strict=True))
    printed = openssl("x509", "-in", str(folder / "board.pem"), "-noout", "-fingerprint", "-sha256").split("=")[1]
    assert (shown["role"], shown["subject"]) == ("reader", "CN=blink board")
    assert shown["SHA-256"] == printed.replace(":", "").lower()[:16]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", shown["valid until"])


def test_nothing_is_overwritten(folder: Path) -> None:
    certs(folder, "issue", "reader", "--name", "dpu-a")
    (folder / "lost-key.pem").write_text("a key whose certificate is elsewhere")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for name in ("dpu-a", "lost"):
        assert "is there already" in certs(folder, "issue", "front-end", "--name", name, status=1).output
    for name in ("ca", "server", "reader", "ca-key", "../x", "a b", "", ".x", "x" * 59, "[/x]"):
        assert "cannot name" in certs(folder, "issue", "front-end", "--name", name, status=1).output
    certs(folder, "issue", "root", "--name", "x", status=2)
    (folder / "ca-key.pem").rename(folder / "elsewhere")
    assert "needed to sign" in certs(folder, "issue", "front-end", "--name", "dpu-b", status=1).output
    (folder / "elsewhere").rename(folder / "ca-key.pem")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_renewing_keeps_role_and_subject(folder: Path) -> None:
    """By name, or with all others; what the authority has not signed is let alone."""
    certs(folder, "issue", "administrator", "--name", "ops", "--days", "30")
    authority.initialise(folder.parent / "other", [], 30)
    (folder / "foreign.pem").write_bytes((folder.parent / "other" / "reader.pem").read_bytes())
    (folder / "notes.pem").write_text("no certificate")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    certs(folder, "renew", "ops")
    assert {path.name for path in folder.iterdir() if path.read_bytes() != before[path.name]} == {
        "ops.pem",
        "ops-key.pem",
    }
    shown = {one["name"]: one for one in json.loads(certs(folder, "renew").stdout)}
    assert (shown["ops"]["subject"], shown["ops"]["role"]) == ("CN=blink ops", "administrator")
    assert set(shown) == {"ca", "server", "front-end", "administrator", "reader", "ops"}
    assert "no such certificate: foreign" in certs(folder, "renew", "foreign", status=1).output


def test_each_front_end_keeps_its_place(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the server sees it: role, subject, and that the one cannot take the other's name while it lives."""
    for role, name in (("front-end", "dpu-a"), ("front-end", "dpu-b"), ("reader", "eyes"), ("administrator", "ops")):
        certs(folder, "issue", role, "--name", name)

    async def main() -> None:
        async with doors(monkeypatch, folder) as made:
            async with made.connection("dpu-a") as made.channel:
                await made.open("a")
            (session,) = made.life.sessions.all()
            assert session.owner == "CN=blink dpu-a"
            made.live(0)
            async with made.connection("dpu-b") as made.channel:
                with pytest.raises(grpc.aio.AioRpcError) as taken:
                    await made.open("a")
                assert taken.value.code() is grpc.StatusCode.PERMISSION_DENIED
                await made.open("b")
            for name, code in (("eyes", grpc.StatusCode.PERMISSION_DENIED), ("ops", grpc.StatusCode.OK)):
                async with made.connection(name) as channel:
                    call = ControlStub(channel).Drain(control_pb2.DrainRequest(resume=True), timeout=5)
                    assert await call.code() is code
                    await ControlStub(channel).ListSessions(control_pb2.ListSessionsRequest(), timeout=5)

    monkeypatch.setattr(ChainLife, "resume", lambda life: None)  # there is no chain
    asyncio.run(main())
