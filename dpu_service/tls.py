"""Certificates: the operator's own, or a self-signed one made at first start."""

from __future__ import annotations

import datetime
import ipaddress
import os
import socket
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

VALID_DAYS = 825
"""The longest life that common clients accept of a server certificate."""
RENEW_DAYS = 30


def default_data_folder() -> Path:
    """$XDG_DATA_HOME/blink, or ~/.local/share/blink."""
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base) if base else Path.home() / ".local" / "share") / "blink"


def self_signed(folder: Path) -> tuple[Path, Path]:
    """Certificate and key files in `folder`, made anew when missing or about to expire.

    Raises:
        OSError: the folder cannot be written.
    """
    certificate, key = folder / "tls-cert.pem", folder / "tls-key.pem"
    if not _usable(certificate, key):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _make(certificate, key)
    return certificate, key


def server_context(certificate: str, key: str) -> ssl.SSLContext:
    """For HTTPS with HTTP/1.1.

    Raises:
        OSError: a file cannot be read, or the two do not belong together (ssl.SSLError).
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(certificate, key)
    context.set_alpn_protocols(["http/1.1"])
    return context


def _usable(certificate: Path, key: Path) -> bool:
    try:
        server_context(str(certificate), str(key))
        expires = x509.load_pem_x509_certificate(certificate.read_bytes()).not_valid_after_utc
    except (OSError, ValueError):
        return False
    return expires - datetime.datetime.now(datetime.UTC) > datetime.timedelta(days=RENEW_DAYS)


def _make(certificate: Path, key: Path) -> None:
    private = ec.generate_private_key(ec.SECP256R1())
    made = _sign(private)
    pem = private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    _write(key, pem, 0o600)
    _write(certificate, made.public_bytes(serialization.Encoding.PEM), 0o644)


def _sign(private: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    host = socket.gethostname()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host[:64] or "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(name, name, private.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - datetime.timedelta(hours=1))
    builder = builder.not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
    builder = builder.add_extension(x509.SubjectAlternativeName(_names(host)), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    return builder.sign(private, hashes.SHA256())


def _names(host: str) -> list[x509.GeneralName]:
    hosts = dict.fromkeys(["localhost", host] if host.isascii() and host else ["localhost"])
    loopback = [x509.IPAddress(ipaddress.ip_address(address)) for address in ("127.0.0.1", "::1")]
    return [*(x509.DNSName(name) for name in hosts), *loopback]


def _write(path: Path, content: bytes, mode: int) -> None:
    """Whole or not at all, and never readable by others for a moment."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    draft.replace(path)
