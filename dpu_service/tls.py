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

from dpu_service.config import WorkerConfig
from dpu_service.http.choose import ALPN

VALID_DAYS = 825
"""The longest life that common clients accept of a server certificate."""
RENEW_DAYS = 30
MIN_VERSIONS = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}


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


def server_context(certificate: str, key: str, client_ca: str = "", min_version: str = "1.2") -> ssl.SSLContext:
    """For HTTP/2 and HTTP/1.1 over TLS.

    Args:
        client_ca: file of the authorities whose certificates clients must have; empty: clients need none.
        min_version: a key of `MIN_VERSIONS`.

    Raises:
        OSError: a file cannot be read, holds nothing usable, or key and certificate do not match (ssl.SSLError).
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = MIN_VERSIONS[min_version]
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION | ssl.OP_CIPHER_SERVER_PREFERENCE
    context.set_ciphers("ECDHE+AESGCM:ECDHE+CHACHA20")  # of TLS 1.2: those that HTTP/2 allows (RFC 9113, 9.2.2)
    context.load_cert_chain(certificate, key, password=_no_password)
    context.set_alpn_protocols(ALPN)
    if client_ca:
        context.load_verify_locations(client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def context_of(config: WorkerConfig) -> ssl.SSLContext:
    """`server_context` of what the operator chose."""
    return server_context(config.tls_cert, config.tls_key, config.tls_client_ca, config.tls_min_version)


def _no_password() -> str:
    """Instead of OpenSSL's question on the terminal."""
    raise ssl.SSLError("the key is encrypted; give one that is not")


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
