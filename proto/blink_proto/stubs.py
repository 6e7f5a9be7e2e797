"""Generates the gRPC stubs of `control.proto` with grpcio-tools, in a temporary folder."""

from __future__ import annotations

import tempfile
from importlib import resources
from pathlib import Path

STUBS = ("control_pb2.py", "control_pb2.pyi", "control_pb2_grpc.py")

_REDACTION = """
from blink_proto.redact import redact as _redact
_redact(DESCRIPTOR, globals())
"""
"""Put behind the messages, so that nobody has them without it."""


def generate_stubs(package: Path) -> dict[Path, str]:
    """Path inside `package` and content of every stub.

    Raises:
        RuntimeError: protoc refused the file.
    """
    from grpc_tools import protoc

    well_known = str(resources.files("grpc_tools") / "_proto")
    with tempfile.TemporaryDirectory() as folder:
        outputs = [f"--{kind}_out={folder}" for kind in ("python", "pyi", "grpc_python")]
        source = str(package / "control.proto")
        status = protoc.main(["protoc", f"-I{package.parent}", f"-I{well_known}", *outputs, source])
        if status != 0:
            raise RuntimeError(f"protoc ended with status {status}")
        made = Path(folder) / package.name
        stubs = {package / name: (made / name).read_text(encoding="utf-8") for name in STUBS}
        stubs[package / STUBS[0]] += _REDACTION
        return stubs
