"""A small certificate authority in a folder: one certificate for the runtime, one for each role of its callers, and as
many more as are asked for.

Keys are on the curve P-256, in PKCS #8 without a password, readable by their owner only.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from blink_proto.roles import Role, role_of

AUTHORITY, SERVER = "ca", "server"
LEAVES = (SERVER, *(role.value for role in Role))
AUTHORITY_DAYS = 3650
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,57}")
"""Of a certificate that was asked for: names its files and its subject, which has room for 64 characters."""
_EARLIER = datetime.timedelta(minutes=5)
"""Certificates begin a little before now: clocks differ."""


class CertificateError(Exception):
    """The folder is not as it should be."""


@dataclass(frozen=True)
class Shown:
    """A certificate of the folder, for people."""

    name: str
    subject: str
    role: str
    names: list[str]
    expires: datetime.datetime
    fingerprint: str


def certificate_path(folder: Path, name: str) -> Path:
    """`ca.pem`, `server.pem`, `administrator.pem`, …"""
    return folder / f"{name}.pem"


def key_path(folder: Path, name: str) -> Path:
    """The certificate's key."""
    return folder / f"{name}-key.pem"


def initialise(folder: Path, hosts: Sequence[str], days: int) -> None:
    """Makes the authority and everything it signs.

    Args:
        hosts: names and addresses under which the runtime is called, beside this machine's.
        days: life of what it signs; the authority's own is ten years.

    Raises:
        CertificateError: there is an authority already, or a host is neither a name nor an address.
        OSError: the folder cannot be written.
    """
    if certificate_path(folder, AUTHORITY).exists() or key_path(folder, AUTHORITY).exists():
        raise CertificateError(f"{folder} has an authority already; `certs renew` signs anew")
    names = _names([*_own_hosts(), *hosts])
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    key = ec.generate_private_key(ec.SECP256R1())
    _write_pair(folder, AUTHORITY, _self_signed(key), key)
    _sign_all(folder, names, days, LEAVES)


def issue(folder: Path, role: Role, name: str, days: int) -> None:
    """Signs one more certificate for a role, with a subject of its own: `CN=blink NAME`.

    Raises:
        CertificateError: there is no usable authority, or the name is taken or no good one.
        OSError: the folder cannot be written.
    """
    if not _NAME.fullmatch(name) or name in (AUTHORITY, *LEAVES) or name.endswith("-key"):
        raise CertificateError(
            f"{name!r} cannot name a certificate: letters, digits, '.', '_' and '-', 58 at most, beginning with a "
            "letter or digit, no '-key' at the end, and none of the names that `certs init` gives"
        )
    for path in (certificate_path(folder, name), key_path(folder, name)):
        if os.path.lexists(path):
            raise CertificateError(f"{path} is there already; `certs renew {name}` signs it anew")
    authority, signer = _read_authority(folder)
    key = ec.generate_private_key(ec.SECP256R1())
    _write_pair(folder, name, _caller(authority, signer, key, name, role, days), key)


def renew(folder: Path, hosts: Sequence[str], days: int, which: Sequence[str]) -> None:
    """Signs anew, with new keys, by the same authority. Running servers take their files up by themselves.

    Args:
        hosts: beside this machine's; empty: those that the present certificate has.
        which: of `LEAVES`, or issued; empty: all.

    Raises:
        CertificateError: there is no usable authority, or a name is wrong.
        OSError: the folder cannot be written.
    """
    there = [*LEAVES, *issued(folder)]
    unknown = sorted(set(which) - set(there))
    if unknown:
        raise CertificateError(f"no such certificate: {', '.join(unknown)}; there are: {', '.join(there)}")
    names = _names([*_own_hosts(), *hosts]) if hosts else _present_names(folder)
    _sign_all(folder, names, days, which or there)


def issued(folder: Path) -> list[str]:
    """Names of the certificates that were asked for, in order: those in the folder that its authority has signed for a
    role.

    Raises:
        CertificateError: the authority cannot be read.
    """
    authority = _read_certificate(folder, AUTHORITY)
    names = sorted(path.name.removesuffix(".pem") for path in folder.glob("*.pem"))
    others = [name for name in names if name not in (AUTHORITY, *LEAVES) and not name.endswith("-key")]
    return [name for name in others if _is_issued(folder, name, authority)]


def _is_issued(folder: Path, name: str, authority: x509.Certificate) -> bool:
    try:
        made = _read_certificate(folder, name)
        made.verify_directly_issued_by(authority)
    except (CertificateError, ValueError, TypeError, InvalidSignature):
        return False
    return _role(made) is not None


def show(folder: Path) -> list[Shown]:
    """Every certificate of the folder.

    Raises:
        CertificateError: one is missing or cannot be read.
    """
    return [_describe(name, _read_certificate(folder, name)) for name in (AUTHORITY, *LEAVES, *issued(folder))]


def _role(made: x509.Certificate) -> Role | None:
    return role_of(_alternative(made, x509.UniformResourceIdentifier))


def _describe(name: str, made: x509.Certificate) -> Shown:
    role = _role(made)
    hosts = [*_alternative(made, x509.DNSName), *_alternative(made, x509.IPAddress)]
    fingerprint = made.fingerprint(hashes.SHA256()).hex()
    return Shown(
        name, made.subject.rfc4514_string(), role.value if role else "", hosts, made.not_valid_after_utc, fingerprint
    )


def _sign_all(folder: Path, names: list[x509.GeneralName], days: int, which: Sequence[str]) -> None:
    authority, signer = _read_authority(folder)
    for name in which:
        key = ec.generate_private_key(ec.SECP256R1())
        if name == SERVER:
            made = _leaf(authority, signer, key, name, names, ExtendedKeyUsageOID.SERVER_AUTH, days)
        else:
            role = Role(name) if name in LEAVES else _role(_read_certificate(folder, name))
            made = _caller(authority, signer, key, name, role or Role.READER, days)
        _write_pair(folder, name, made, key)


def _caller(
    authority: x509.Certificate,
    signer: ec.EllipticCurvePrivateKey,
    key: ec.EllipticCurvePrivateKey,
    name: str,
    role: Role,
    days: int,
) -> x509.Certificate:
    uri = x509.UniformResourceIdentifier(role.uri)
    return _leaf(authority, signer, key, name, [uri], ExtendedKeyUsageOID.CLIENT_AUTH, days)


def _self_signed(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Blink control plane authority")])
    builder = _begin(name, name, key, AUTHORITY_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    return builder.add_extension(_usage(signs=True), critical=True).sign(key, hashes.SHA256())


def _leaf(
    authority: x509.Certificate,
    signer: ec.EllipticCurvePrivateKey,
    key: ec.EllipticCurvePrivateKey,
    name: str,
    names: list[x509.GeneralName],
    purpose: x509.ObjectIdentifier,
    days: int,
) -> x509.Certificate:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"blink {name}")])
    builder = _begin(subject, authority.subject, key, days)
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(signs=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    return builder.add_extension(issuer, critical=False).sign(signer, hashes.SHA256())


def _begin(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - _EARLIER).not_valid_after(now + datetime.timedelta(days=days))
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _own_hosts() -> list[str]:
    return ["localhost", socket.gethostname(), "127.0.0.1", "::1"]


def _names(hosts: Sequence[str]) -> list[x509.GeneralName]:
    return [_name(host) for host in dict.fromkeys(hosts) if host]


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not host.isascii() or not all(label and len(label) < 64 for label in host.split(".")) or " " in host:
        raise CertificateError(f"{host!r} is neither a host name nor an IP address")
    return x509.DNSName(host)


def _present_names(folder: Path) -> list[x509.GeneralName]:
    found = _read_certificate(folder, SERVER).extensions.get_extension_for_class(x509.SubjectAlternativeName)
    return list(found.value)


def _alternative(made: x509.Certificate, kind: type[x509.GeneralName]) -> list[str]:
    try:
        found = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [str(name.value) for name in found if isinstance(name, kind)]


def _read_certificate(folder: Path, name: str) -> x509.Certificate:
    path = certificate_path(folder, name)
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except FileNotFoundError:
        raise CertificateError(f"{path} is not there; `certs init` makes it") from None
    except (OSError, ValueError) as error:
        raise CertificateError(f"{path} cannot be read: {error}") from error


def _read_authority(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    authority, path = _read_certificate(folder, AUTHORITY), key_path(folder, AUTHORITY)
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise CertificateError(f"{path} cannot be read; it is needed to sign") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != authority.public_key():
        raise CertificateError(f"{path} is not the key of {certificate_path(folder, AUTHORITY)}")
    return authority, key


def _write_pair(folder: Path, name: str, made: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    _write(key_path(folder, name), pem, 0o600)
    _write(certificate_path(folder, name), made.public_bytes(serialization.Encoding.PEM), 0o644)


def _write(path: Path, content: bytes, mode: int) -> None:
    """Whole or not at all, and never readable by others for a moment."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    draft.replace(path)
