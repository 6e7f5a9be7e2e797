"""Who may call what on the control plane: every method, with every role, with other certificates and without any."""

from __future__ import annotations

import datetime
import hashlib
import json
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from blink_proto import control_pb2
from tests.control import ADMINISTRATOR, FRONT_END, READER, ROLES, SecureRuntime, make_certificates, secure_runtime

A, F, R = {ADMINISTRATOR}, {FRONT_END}, {READER}
WANTED: dict[str, set[str]] = {
    "/blink.control.v1.Control/GetServerInfo": A | F | R,
    "/blink.control.v1.Control/ListModels": A | F | R,
    "/blink.control.v1.Control/WatchState": A | F | R,
    "/blink.control.v1.Control/ListSessions": A | R,
    "/blink.control.v1.Control/LoadModel": A,
    "/blink.control.v1.Control/UnloadModel": A,
    "/blink.control.v1.Control/Drain": A,
    "/blink.control.v1.Control/OpenSession": F,
    "/blink.control.v1.Control/CloseSession": A,
    "/blink.control.v1.Control/FetchTokenizer": F,
    "/grpc.health.v1.Health/Check": A | F | R,
    "/grpc.health.v1.Health/Watch": A | F | R,
    "/grpc.health.v1.Health/List": A | F | R,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": A | R,
    "/blink.control.v1.Control/Absent": set(),
    "/other.Service/Method": set(),
}
DENIED, UNKNOWN_CALLER = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureRuntime]:
    """Without a model, with reflection and an audit log."""
    folder = tmp_path_factory.mktemp("roles")
    certificates = make_certificates(folder / "certs")
    with secure_runtime(certificates, folder, "--reflection", "--audit-log", str(folder / "audit.log")) as running:
        yield running


def audit_lines(runtime: SecureRuntime, since: int = 0, count: int = 0) -> list[dict]:
    """Of the audit log, from a line on; waits for so many: a line is written once its call has ended."""
    path, deadline = runtime.log.parent / "audit.log", time.monotonic() + 5
    while True:
        lines = path.read_text().splitlines()[since:] if path.exists() else []
        if len(lines) >= count or time.monotonic() > deadline:
            return [json.loads(line) for line in lines]
        time.sleep(0.02)


def status_of(channel: grpc.Channel, method: str) -> grpc.StatusCode:
    """Of a call with an empty message; OK also for a stream that has begun."""
    call = channel.stream_stream(method)(iter([b""]), timeout=10)  # type: ignore[call-arg]
    try:
        next(call)
        return grpc.StatusCode.OK
    except StopIteration:
        return grpc.StatusCode.OK
    except grpc.RpcError as error:
        return error.code()
    finally:
        call.cancel()


def test_the_table_here_names_every_method() -> None:
    described = [control_pb2.DESCRIPTOR, health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR]
    methods = {
        f"/{service.full_name}/{method.name}"
        for file in described
        for service in file.services_by_name.values()
        for method in service.methods
    }
    assert methods == {name for name, roles in WANTED.items() if roles}


@pytest.mark.parametrize("role", ROLES)
def test_every_method_by_role(runtime: SecureRuntime, role: str) -> None:
    with runtime.channel(role) as channel:
        for method, allowed in WANTED.items():
            found = status_of(channel, method)
            if role in allowed:
                assert found not in (DENIED, UNKNOWN_CALLER, grpc.StatusCode.UNAVAILABLE), (method, found)
            else:
                assert found is DENIED, (method, found)


def sign(
    folder: Path, names: list[x509.GeneralName], *, days: int = 1, authority: Path | None = None
) -> tuple[Path, Path]:
    """A client's pair, signed by the authority of a folder."""
    source = authority or folder
    signer = serialization.load_pem_private_key((source / "ca-key.pem").read_bytes(), None)
    issuer = x509.load_pem_x509_certificate((source / "ca.pem").read_bytes())
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "somebody")])
    builder = x509.CertificateBuilder(issuer.subject, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - datetime.timedelta(days=10))
    builder = builder.not_valid_after(now + datetime.timedelta(days=days))
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
    paths = folder / "somebody.pem", folder / "somebody-key.pem"
    paths[0].write_bytes(builder.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return paths


def test_certificates_that_name_no_role(runtime: SecureRuntime) -> None:
    """No URI, a role that there is not, two roles, another trust domain, or the URI in a name of another type."""
    uri, dns = x509.UniformResourceIdentifier, x509.DNSName
    administrator = "spiffe://blink/role/administrator"
    for names in (
        [dns("somebody")],
        [uri("spiffe://blink/role/root")],
        [uri("spiffe://blink/role/administrator/"), dns("x")],
        [uri(administrator), uri("spiffe://blink/role/reader")],
        [uri("spiffe://other/role/administrator")],
        [dns(administrator)],
        [x509.RFC822Name(administrator)],
    ):
        with runtime.channel_with(*sign(runtime.certificates, names)) as channel:
            for method in WANTED:
                assert status_of(channel, method) is UNKNOWN_CALLER, (names, method)
    with runtime.channel_with(*sign(runtime.certificates, [uri(administrator), dns("a.example")])) as channel:
        assert status_of(channel, "/blink.control.v1.Control/ListSessions") is grpc.StatusCode.OK


def test_handshakes_that_fail(runtime: SecureRuntime, tmp_path: Path) -> None:
    """No certificate, one of another authority, one that has expired, and the server's own."""
    other = make_certificates(tmp_path / "other")
    role = [x509.UniformResourceIdentifier("spiffe://blink/role/administrator")]
    foreign = sign(other, role)
    expired = sign(runtime.certificates, role, days=-1)
    server = runtime.certificates / "server.pem", runtime.certificates / "server-key.pem"
    for pair in ((None, None), foreign, expired, server):
        with runtime.channel_with(*pair) as channel:
            for method in ("/blink.control.v1.Control/GetServerInfo", "/grpc.health.v1.Health/Check"):
                assert status_of(channel, method) is grpc.StatusCode.UNAVAILABLE, pair


def test_plain_text_gets_no_answer_from_a_tls_port(runtime: SecureRuntime) -> None:
    with grpc.insecure_channel(runtime.address) as channel:
        assert status_of(channel, "/grpc.health.v1.Health/Check") is grpc.StatusCode.UNAVAILABLE


def test_what_the_audit_log_says(runtime: SecureRuntime) -> None:
    """Administrative calls and refusals, with who and how; nothing of calls that only look."""
    before = len(audit_lines(runtime))
    runtime.ctl("status", role=READER)
    runtime.ctl("load", "/nowhere", "--name", "n", status=1)
    runtime.ctl("drain", "--grace", "3", role=READER, status=4)
    with runtime.channel(FRONT_END) as channel:
        call = channel.unary_unary("/blink.control.v1.Control/OpenSession")  # type: ignore[call-arg]
        request = control_pb2.OpenSessionRequest(front_end="f\n{", channels=3, transport="pigeon")
        with pytest.raises(grpc.RpcError):
            call(request.SerializeToString(), timeout=10)
    loaded, drained, opened = audit_lines(runtime, before, 3)
    der = ssl.PEM_cert_to_DER_cert((runtime.certificates / "administrator.pem").read_text())
    assert (loaded["method"], loaded["outcome"], loaded["role"]) == ("LoadModel", "INVALID_ARGUMENT", ADMINISTRATOR)
    assert (loaded["subject"], loaded["fingerprint"]) == ("CN=blink administrator", hashlib.sha256(der).hexdigest())
    assert loaded["request"] == {"source": "/nowhere", "name": "n", "replace": False, "grace_seconds": 30}
    assert 0 <= loaded["seconds"] < 10
    assert datetime.datetime.fromisoformat(loaded["time"]).tzinfo is not None
    assert loaded["peer"].startswith("ipv4:127.0.0.1:")
    assert (drained["method"], drained["outcome"], drained["role"]) == ("Drain", "PERMISSION_DENIED", READER)
    assert drained["request"] == {}
    assert (opened["outcome"], opened["request"]["front_end"]) == ("FAILED_PRECONDITION", "f\n{")
    assert (runtime.log.parent / "audit.log").stat().st_mode & 0o777 == 0o600


def test_the_audit_log_may_be_moved_away(runtime: SecureRuntime) -> None:
    path = runtime.log.parent / "audit.log"
    path.rename(path.with_suffix(".old"))
    runtime.ctl("resume", status=1)
    assert [line["method"] for line in audit_lines(runtime, count=1)] == ["Drain"]
