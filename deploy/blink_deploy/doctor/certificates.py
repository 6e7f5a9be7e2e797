"""Certificates that lie in files: the caller's own pair, and what clients are shown."""

from __future__ import annotations

import datetime
from itertools import pairwise
from typing import TYPE_CHECKING

from blink_deploy.doctor.probe import Probe
from blink_deploy.doctor.report import Finding, fail, ok, skip, warn, worst
from blink_deploy.doctor.site import Part, Site
from blink_proto.dial import DialError
from blink_proto.roles import Role, role_of

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

SOON = datetime.timedelta(days=14)
RENEW = "renew it; blinkctl certs renew does for those that it made"
_MISSING = "certificates are looked at with the package cryptography, which is not installed"


def own_pair(probe: Probe, site: Site) -> Finding:
    """The caller's own pair: whether it matches, is valid now, was signed by the authority, and names a role."""
    dial = site.dial
    if not (dial.ca or dial.certificate or dial.key):
        return skip("no certificates are named (--certs, or --ca, --cert and --key)")
    try:
        from cryptography import x509
    except ImportError:
        return skip(_MISSING)
    try:
        dial.check()
        with open(dial.certificate, "rb") as own, open(dial.ca, "rb") as authority:
            chain, authorities = (x509.load_pem_x509_certificates(file.read()) for file in (own, authority))
    except (DialError, OSError, ValueError) as error:
        return fail(str(error), "name files that belong together; blinkctl certs init makes them")
    return worst([_life(chain[0]), _signature(chain, authorities), _role(chain[0], site.part)])


def shown_to_clients(probe: Probe, site: Site) -> Finding:
    """The certificate of HTTPS: whether it is valid now, its file's chain has no gap, and which names it has."""
    if not site.https_cert:
        return skip("give --https-cert")
    try:
        from cryptography import x509
    except ImportError:
        return skip(_MISSING)
    try:
        with open(site.https_cert, "rb") as file:
            chain = x509.load_pem_x509_certificates(file.read())
    except (OSError, ValueError) as error:
        return fail(f"{site.https_cert}: {reason(error)}", "a PEM file: the certificate, then those that signed it")
    return worst([_life(chain[0]), _order(chain), _names(chain[0])])


def _order(chain: list[Certificate]) -> Finding:
    if all(_issued(lower, upper) for lower, upper in pairwise(chain)):
        return ok(f"{len(chain)} in the file")
    return fail("the file's certificates do not follow each other", "the certificate first, each one's issuer next")


def _names(certificate: Certificate) -> Finding:
    from cryptography import x509

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return fail("it has no names", "clients look for the name that they call among the alternative names")
    known = [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]
    return ok(f"for {', '.join(known)}") if known else fail("it has no names", "sign one with what clients call it")


def _life(certificate: Certificate) -> Finding:
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    now = datetime.datetime.now(datetime.UTC)
    if now < begin:
        return fail(f"valid from {begin:%Y-%m-%d %H:%M} on", "set the clock")
    if end <= now:
        return fail(f"expired on {end:%Y-%m-%d}", RENEW)
    seen = f"valid until {end:%Y-%m-%d}"
    return warn(seen, f"it expires within two weeks: {RENEW}") if end - now < SOON else ok(seen)


def _signature(chain: list[Certificate], authorities: list[Certificate]) -> Finding:
    """Each certificate of the file by the next, the last one by an authority."""
    for lower, upper in pairwise(chain):
        if not _issued(lower, upper):
            break
    else:
        if any(chain[-1] == authority or _issued(chain[-1], authority) for authority in authorities):
            return ok("signed by the authority")
    return fail("not signed by the authority", "certificate and authority are of different folders or clusters")


def _issued(lower: Certificate, upper: Certificate) -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        lower.verify_directly_issued_by(upper)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _role(certificate: Certificate, part: Part) -> Finding:
    from cryptography import x509

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        role = role_of(names.get_values_for_type(x509.UniformResourceIdentifier))
    except x509.ExtensionNotFound:
        role = None
    if role is None:
        return fail("names no role", f"a URI such as {Role.FRONT_END.uri} must be among its names")
    if part is Part.DPU and role is not Role.FRONT_END:
        return ok(f"role {role} (blink-dpu itself needs {Role.FRONT_END})")
    return ok(f"role {role}")


def reason(error: Exception) -> str:
    """The shortest that says it."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
