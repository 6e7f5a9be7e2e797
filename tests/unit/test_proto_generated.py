"""Nothing generated is stale, and the control plane's contract is what clients were told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.descriptor import FieldDescriptor

import blink_proto
from blink_proto import control_pb2, generate

METHODS = {
    "GetServerInfo": False,
    "LoadModel": True,
    "UnloadModel": False,
    "ListModels": False,
    "OpenSession": False,
    "CloseSession": False,
    "ListSessions": False,
    "FetchTokenizer": True,
    "Drain": False,
    "WatchState": True,
}
"""Methods of the service, and whether the answer is a stream."""


def test_generated_files_are_not_stale() -> None:
    command = [sys.executable, "-m", "blink_proto.generate", "--check"]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_check_names_a_stale_file_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fresh, stale, missing = (tmp_path / name for name in ("fresh", "stale", "missing"))
    fresh.write_text("same")
    stale.write_text("old")
    monkeypatch.setattr(generate, "REPOSITORY", tmp_path)
    monkeypatch.setattr(generate, "layout_outputs", lambda: {fresh: "same", stale: "new", missing: "new"})
    monkeypatch.setattr(generate, "stub_outputs", dict)
    assert generate.main(["--check"]) == 1
    assert capsys.readouterr().out == "stale: stale\nstale: missing\n"
    assert (stale.read_text(), missing.exists()) == ("old", False)
    assert generate.main([]) == 0
    assert (stale.read_text(), missing.read_text()) == ("new", "new")
    assert generate.main(["--check"]) == 0


def test_the_package_is_not_called_proto() -> None:
    """`proto` is the import name of the proto-plus package."""
    assert blink_proto.__name__ == control_pb2.__package__ == "blink_proto"
    assert control_pb2.DESCRIPTOR.name == "blink_proto/control.proto"


def test_the_service() -> None:
    assert control_pb2.DESCRIPTOR.package == "blink.control.v1"
    service = control_pb2.DESCRIPTOR.services_by_name["Control"]
    assert {method.name: method.server_streaming for method in service.methods} == METHODS
    assert not any(method.client_streaming for method in service.methods)


def test_the_stubs_name_the_service_as_the_contract_does() -> None:
    from blink_proto import control_pb2_grpc

    assert hasattr(control_pb2_grpc, "ControlStub")
    text = Path(control_pb2_grpc.__file__).read_text(encoding="utf-8")
    assert all(f"'/blink.control.v1.Control/{name}'" in text for name in METHODS)
    assert "from blink_proto import control_pb2" in text


def test_hashes_and_nonces_travel_in_full() -> None:
    """All 64 bits, and eight bytes on the wire whatever the value."""
    for message, field in [
        ("ArenaLayout", "layout_hash"),
        ("OpenSessionRequest", "layout_hash"),
        ("GetServerInfoResponse", "layout_hash"),
        ("OpenSessionResponse", "nonce"),
    ]:
        descriptor = control_pb2.DESCRIPTOR.message_types_by_name[message].fields_by_name[field]
        assert descriptor.type == FieldDescriptor.TYPE_FIXED64


def test_phases_begin_with_unspecified() -> None:
    phases = control_pb2.DESCRIPTOR.enum_types_by_name["Phase"]
    assert phases.values_by_number[0].name == "PHASE_UNSPECIFIED"
    assert [value.number for value in phases.values] == list(range(6))
