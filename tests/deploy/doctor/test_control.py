"""Checks of the control plane against a real runtime and certificates that are wrong on purpose."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from blink_deploy.doctor import certificates, control
from blink_deploy.doctor.report import Finding, Result
from blink_deploy.doctor.site import Part, Site, Transport
from blink_proto import arena, control_pb2
from blink_proto.dial import Dial
from tests.control import SecureRuntime, make_certificates, secure_runtime
from tests.deploy.doctor.machines import healthy
from tests.e2e.serving import free_port

OK, WARN, FAIL, SKIPPED = Result.OK, Result.WARN, Result.FAIL, Result.SKIPPED


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureRuntime]:
    """Without a model."""
    folder = tmp_path_factory.mktemp("runtime")
    with secure_runtime(make_certificates(folder / "certs"), folder) as running:
        yield running


def dial(address: str, folder: Path, role: str = "front-end", **more: Any) -> Dial:
    return Dial(address, *(str(folder / f"{name}.pem") for name in ("ca", role, f"{role}-key")), **more)


def look(check: Any, dialled: Dial, part: Part = Part.DPU) -> Finding:
    return check(healthy(Path("/nonexistent")), Site(part, Transport.SHM, dialled))


def issue(folder: Path, begins: int, ends: int, role: str = "front-end") -> Path:
    """A pair of the folder's authority, valid from and to so many days from now, in a new folder."""
    made = folder.with_name(f"{folder.name}-{begins}-{ends}-{role}")
    made.mkdir()
    ca = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
    signer = serialization.load_pem_private_key((folder / "ca-key.pem").read_bytes(), None)
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "made")]))
        .issuer_name(ca.subject)
        .public_key(key.public_key())
        .serial_number(7)
        .not_valid_before(now + datetime.timedelta(days=begins))
        .not_valid_after(now + datetime.timedelta(days=ends))
    )
    if role:
        name = x509.UniformResourceIdentifier(f"spiffe://blink/role/{role}")
        builder = builder.add_extension(x509.SubjectAlternativeName([name]), critical=False)
    certificate = builder.sign(signer, hashes.SHA256())  # type: ignore[arg-type]
    pem = serialization.Encoding.PEM
    kind = serialization.PrivateFormat.PKCS8
    (made / "front-end.pem").write_bytes(certificate.public_bytes(pem))
    (made / "front-end-key.pem").write_bytes(key.private_bytes(pem, kind, serialization.NoEncryption()))
    (made / "ca.pem").write_bytes((folder / "ca.pem").read_bytes())
    return made


@pytest.mark.parametrize(
    ("begins", "ends", "role", "result", "words"),
    [
        (-1, 90, "front-end", OK, "signed by the authority; role front-end"),
        (-1, 13, "front-end", WARN, "valid until"),
        (-9, -1, "front-end", FAIL, "expired on"),
        (1, 90, "front-end", FAIL, "valid from"),
        (-1, 90, "", FAIL, "names no role"),
        (-1, 90, "emperor", FAIL, "names no role"),
    ],
)
def test_certificates(runtime: SecureRuntime, begins: int, ends: int, role: str, result: Result, words: str) -> None:
    found = look(certificates.own_pair, dial(runtime.address, issue(runtime.certificates, begins, ends, role)))
    assert found.result is result
    assert words in found.seen


def test_certificates_that_do_not_belong_together(runtime: SecureRuntime, tmp_path: Path) -> None:
    other = make_certificates(tmp_path / "other")
    own = runtime.certificates
    mixed = Dial(runtime.address, str(other / "ca.pem"), str(own / "reader.pem"), str(own / "reader-key.pem"))
    assert "not signed by the authority" in look(certificates.own_pair, mixed).seen
    swapped = Dial(runtime.address, str(own / "ca.pem"), str(own / "reader.pem"), str(own / "front-end-key.pem"))
    assert look(certificates.own_pair, swapped).result is FAIL
    assert look(certificates.own_pair, dial(runtime.address, tmp_path / "absent")).result is FAIL
    assert look(certificates.own_pair, Dial(runtime.address)).result is SKIPPED


def test_a_chain_is_followed_to_the_authority(runtime: SecureRuntime, tmp_path: Path) -> None:
    """A file with the certificate and, behind it, its issuer's."""
    own = runtime.certificates
    chain = tmp_path / "chain.pem"
    chain.write_bytes((own / "reader.pem").read_bytes() + (own / "ca.pem").read_bytes())
    named = Dial(runtime.address, str(own / "ca.pem"), str(chain), str(own / "reader-key.pem"))
    assert "signed by the authority; role reader" in look(certificates.own_pair, named).seen
    chain.write_bytes((own / "reader.pem").read_bytes() + (own / "server.pem").read_bytes())
    assert look(certificates.own_pair, named).result is FAIL


def https(file: Path | str) -> Finding:
    site = Site(Part.DPU, Transport.SHM, Dial("localhost:1"), https_cert=str(file))
    return certificates.shown_to_clients(healthy(Path("/nonexistent")), site)


def test_what_clients_are_shown(runtime: SecureRuntime, tmp_path: Path) -> None:
    own = runtime.certificates
    server, ca = (own / "server.pem").read_bytes(), (own / "ca.pem").read_bytes()
    found = https(own / "server.pem")
    assert found.result is OK
    assert "1 in the file; for " in found.seen
    assert "localhost" in found.seen
    chain = tmp_path / "chain.pem"
    for content, result, words in ((server + ca, OK, "2 in the file"), (ca + server, FAIL, "do not follow each other")):
        chain.write_bytes(content)
        found = https(chain)
        assert found.result is result
        assert words in found.seen
    assert "no names" in https(issue(own, -3, 70) / "front-end.pem").seen
    assert "expired" in https(issue(own, -9, -2) / "front-end.pem").seen
    assert https(own / "reader-key.pem").result is FAIL
    assert https(tmp_path / "absent.pem").seen.endswith("No such file or directory")
    assert https("").result is SKIPPED


def test_a_runtime_is_reached(runtime: SecureRuntime) -> None:
    found = look(control.reachable, dial(runtime.address, runtime.certificates))
    assert found.result is OK
    assert "TLSv1.3" in found.seen
    plain = look(control.reachable, Dial(runtime.address))
    assert plain == Finding(OK, f"{runtime.address} answers; plain text")


def test_a_name_that_its_certificate_has_not(runtime: SecureRuntime) -> None:
    named = dial(runtime.address, runtime.certificates, server_name="gpu.elsewhere")
    found = look(control.reachable, named)
    assert found.result is FAIL
    assert "gpu.elsewhere" in found.seen


def test_another_authority(runtime: SecureRuntime, tmp_path: Path) -> None:
    found = look(control.reachable, dial(runtime.address, make_certificates(tmp_path / "other")))
    assert found.result is FAIL
    assert "refused" in found.seen


@pytest.mark.parametrize(("part", "result"), [(Part.DPU, FAIL), (Part.GPU, WARN), (Part.SINGLE, WARN)])
def test_nobody_there(part: Part, result: Result) -> None:
    """A front end needs its runtime; on the GPU's own machine it may not have been started yet."""
    absent = Dial(f"127.0.0.1:{free_port()}")
    for check in (control.reachable, control.same_arena):
        found = look(check, absent, part)
        assert found.result is result
        assert absent.address in found.seen


def test_an_arena_without_a_model_is_told(runtime: SecureRuntime) -> None:
    found = look(control.same_arena, dial(runtime.address, runtime.certificates))
    assert found.result is WARN
    assert f"{arena.LAYOUT_HASH:016x}, as here; idle" in found.seen
    nameless = dial(runtime.address, issue(runtime.certificates, -2, 80, ""))
    found = look(control.same_arena, nameless)
    assert found.result is FAIL
    assert "UNAUTHENTICATED" in found.seen


def test_other_layouts_do_not_fit() -> None:
    """What the session's handshake compares."""
    serving = control_pb2.State(phase=control_pb2.PHASE_SERVING, model="tiny")

    def said(**changes: int) -> Finding:
        facts = {"arena_version": arena.VERSION, "layout_hash": arena.LAYOUT_HASH}
        facts |= {"channels": 8, "channels_free": 7, **changes}
        return control._compare(control_pb2.GetServerInfoResponse(version="0.1.0", state=serving, **facts))

    assert said().result is OK
    assert "serving tiny; 7 of 8 channels free" in said().seen
    assert said(layout_hash=arena.LAYOUT_HASH ^ 1).result is FAIL
    assert said(arena_version=arena.VERSION + 1).result is FAIL
