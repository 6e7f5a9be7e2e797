"""Who calls: what a connection's certificate says."""

from __future__ import annotations

import hashlib
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from blink_proto.roles import Role, role_of


@dataclass(frozen=True)
class Caller:
    """The other end of a connection. In plain text nobody proves anything: only `peer` is known."""

    secure: bool
    role: Role | None
    subject: str
    fingerprint: str
    """SHA-256 of the certificate (DER), in hexadecimal."""
    peer: str

    @property
    def shown_role(self) -> str:
        """For logs."""
        if not self.secure:
            return "plain text"
        return self.role.value if self.role else "none"


def caller_of(context: Mapping[str, Iterable[bytes]], peer: str) -> Caller:
    """From gRPC's authentication context. Only names of type URI count as roles, whatever else the certificate says."""
    if _first(context, "transport_security_type") != b"ssl":
        return Caller(False, None, "", "", peer)
    uris = [uri.decode(errors="replace") for uri in context.get("peer_uri") or ()]
    subject = _first(context, "x509_subject").decode(errors="replace")
    return Caller(True, role_of(uris), subject, fingerprint_of(_first(context, "x509_pem_cert")), peer)


def fingerprint_of(pem: bytes) -> str:
    """SHA-256 of a PEM certificate's DER; empty for none."""
    if not pem:
        return ""
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem.decode())).hexdigest()


def _first(context: Mapping[str, Iterable[bytes]], key: str) -> bytes:
    return next(iter(context.get(key) or ()), b"")
