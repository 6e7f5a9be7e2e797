"""A GPU runtime whose control plane speaks TLS, and callers with certificates of their own."""

from __future__ import annotations

import os
import select
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from blink_deploy import authority
from blink_proto.control_pb2_grpc import ControlStub

CTL = [sys.executable, "-m", "blink_deploy.ctl"]
ADMINISTRATOR, READER, FRONT_END = "administrator", "reader", "front-end"
ROLES = (FRONT_END, ADMINISTRATOR, READER)


def make_certificates(folder: Path) -> Path:
    """A folder as `blinkctl certs init` makes it."""
    authority.initialise(folder, [], 30)
    return folder


@dataclass
class SecureRuntime:
    """A running `blink-gpu`."""

    process: subprocess.Popen[bytes]
    port: int
    certificates: Path
    log: Path

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def channel(self, role: str) -> grpc.Channel:
        """A new connection with a role's certificate."""
        return self.channel_with(self.certificates / f"{role}.pem", self.certificates / f"{role}-key.pem")

    def channel_with(self, certificate: Path | None, key: Path | None) -> grpc.Channel:
        """A new connection with any certificate, or without one."""
        shown = [path.read_bytes() if path else None for path in (key, certificate)]
        ca = (self.certificates / "ca.pem").read_bytes()
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
        return grpc.secure_channel(self.address, grpc.ssl_channel_credentials(ca, *shown), options=options)

    def stub(self, role: str) -> ControlStub:
        return ControlStub(self.channel(role))

    def ctl(self, *arguments: str, role: str = ADMINISTRATOR, status: int = 0) -> subprocess.CompletedProcess[str]:
        """Runs `blinkctl`."""
        told = ["--runtime", self.address, "--certs", str(self.certificates), "--role", role]
        return ctl(*told, *arguments, status=status)

    def front_end_flags(self, role: str = FRONT_END) -> list[str]:
        """How `blink-dpu` is told of the runtime."""
        names = {"ca": "ca.pem", "cert": f"{role}.pem", "key": f"{role}-key.pem"}
        flags = [part for name, file in names.items() for part in (f"--runtime-{name}", str(self.certificates / file))]
        return ["--runtime", self.address, *flags]

    def shown_certificate(self) -> bytes:
        """What a new handshake is shown, DER."""
        trust = ssl.create_default_context(cafile=str(self.certificates / "ca.pem"))
        trust.set_alpn_protocols(["h2"])
        trust.load_cert_chain(self.certificates / "reader.pem", self.certificates / "reader-key.pem")
        raw = socket.create_connection(("127.0.0.1", self.port), timeout=10)
        with trust.wrap_socket(raw, server_hostname="127.0.0.1") as wrapped:
            return wrapped.getpeercert(binary_form=True) or b""


def ctl(*arguments: str, status: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs `blinkctl` as it is told."""
    ran = subprocess.run(
        [*CTL, *arguments], capture_output=True, text=True, timeout=120, env={**os.environ, **environment}
    )
    assert ran.returncode == status, (ran.returncode, ran.stdout, ran.stderr)
    assert "Traceback" not in ran.stderr
    return ran


@contextmanager
def secure_runtime(certificates: Path, folder: Path, *arguments: str) -> Iterator[SecureRuntime]:
    """A runtime that is ready, with certificates of a folder as of `make_certificates`; its log is in `folder`."""
    ready, child_end = os.pipe()
    log = folder / "runtime.log"
    command = [sys.executable, "-m", "gpu_runtime.main", "--listen", "127.0.0.1:0", "--ready-fd", str(child_end)]
    command += ["--tls-cert", str(certificates / "server.pem"), "--tls-key", str(certificates / "server-key.pem")]
    command += ["--client-ca", str(certificates / "ca.pem"), "--grace", "5", *arguments]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, pass_fds=(child_end,))
    os.close(child_end)
    try:
        assert select.select([ready], [], [], 60)[0], log.read_text()
        line = os.read(ready, 100).split()
        assert line, log.read_text()
        yield SecureRuntime(process, int(line[1]), certificates, log)
    finally:
        os.close(ready)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
