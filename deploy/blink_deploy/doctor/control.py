"""The control plane: certificates, the way to it, and whether both sides mean the same arena."""

from __future__ import annotations

import datetime
import socket
import ssl
from itertools import pairwise
from typing import TYPE_CHECKING

import grpc

from blink_deploy.client import ControlClient
from blink_deploy.doctor.probe import Probe
from blink_deploy.doctor.report import Finding, fail, ok, skip, warn, worst
from blink_deploy.doctor.site import Part, Site
from blink_proto import control_pb2
from blink_proto.dial import Dial, DialError
from blink_proto.roles import Role, role_of

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

SECONDS = 5.0
SOON = datetime.timedelta(days=14)


def certificates(probe: Probe, site: Site) -> Finding:
    """The caller's own pair: whether it matches, is valid now, was signed by the authority, and names a role."""
    dial = site.dial
    if not (dial.ca or dial.certificate or dial.key):
        return skip("no certificates are named (--certs, or --ca, --cert and --key)")
    try:
        from cryptography import x509
    except ImportError:
        return skip("certificates are looked at with the package cryptography, which is not installed")
    try:
        dial.check()
        with open(dial.certificate, "rb") as own, open(dial.ca, "rb") as authority:
            chain, authorities = (x509.load_pem_x509_certificates(file.read()) for file in (own, authority))
    except (DialError, OSError, ValueError) as error:
        return fail(str(error), "name files that belong together; blinkctl certs init makes them")
    return worst([_life(chain[0]), _signature(chain, authorities), _role(chain[0], site.part)])


def _life(certificate: Certificate) -> Finding:
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    now = datetime.datetime.now(datetime.UTC)
    if now < begin:
        return fail(f"valid from {begin:%Y-%m-%d %H:%M} on", "set the clock")
    if end <= now:
        return fail(f"expired on {end:%Y-%m-%d}", "blinkctl certs renew")
    seen = f"valid until {end:%Y-%m-%d}"
    return warn(seen, "it expires within two weeks: blinkctl certs renew") if end - now < SOON else ok(seen)


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


def reachable(probe: Probe, site: Site) -> Finding:
    """Whether the control plane's port answers, and shows a certificate that is valid for the name that is dialled."""
    dial = site.dial
    host, _, port = dial.address.rpartition(":")
    host = host.strip("[]")
    try:
        with socket.create_connection((host, int(port)), timeout=SECONDS) as raw:
            if not dial.is_secure:
                return ok(f"{dial.address} answers; plain text")
            with _context(dial).wrap_socket(raw, server_hostname=dial.server_name or host) as wrapped:
                return _shown(dial, wrapped)
    except ssl.SSLCertVerificationError as error:
        todo = "its names are those of `blinkctl certs init --host`; else --server-name; same authority on both sides"
        return fail(f"{dial.address} shows a certificate that is refused: {error.verify_message}", todo)
    except DialError as error:
        return fail(str(error), "see certificates")
    except (OSError, ValueError) as error:
        todo = "is blink-gpu running? address, --listen, NodePort, firewall, NetworkPolicy"
        return _absent(site, f"{dial.address}: {_reason(error)}", todo)


def _absent(site: Site, seen: str, todo: str) -> Finding:
    """A front end cannot begin without it; where the runtime itself belongs it may not have been started yet."""
    return fail(seen, todo) if site.part is Part.DPU else warn(seen, todo)


def _context(dial: Dial) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=dial.ca)
    context.set_alpn_protocols(["h2"])
    context.load_cert_chain(dial.certificate, dial.key, password=lambda: "")
    return context


def _shown(dial: Dial, wrapped: ssl.SSLSocket) -> Finding:
    end = ssl.cert_time_to_seconds(str((wrapped.getpeercert() or {})["notAfter"]))
    until = datetime.datetime.fromtimestamp(end, datetime.UTC)
    seen = f"{dial.address} answers; {wrapped.version()}; its certificate is valid until {until:%Y-%m-%d}"
    if until - datetime.datetime.now(datetime.UTC) < SOON:
        return warn(seen, "it expires within two weeks: blinkctl certs renew server")
    return ok(seen)


def same_arena(probe: Probe, site: Site) -> Finding:
    """Whether the runtime's arena has the layout that this version knows; a session is refused otherwise."""
    try:
        with ControlClient(site.dial, SECONDS) as client:
            info = client.server_info()
    except DialError as error:
        return skip(str(error))
    except grpc.RpcError as error:
        return _no_answer(site, error)
    return _compare(info)


def _no_answer(site: Site, error: grpc.RpcError) -> Finding:
    code: grpc.StatusCode = error.code()
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return fail(f"{code.name}: {error.details()}", "a certificate with a role; see certificates")
    return _absent(
        site, f"no answer from {site.dial.address} ({code.name})", "see control-plane; TLS on one side only?"
    )


def _compare(info: control_pb2.GetServerInfoResponse) -> Finding:
    """What the runtime says of itself against what this version knows."""
    from blink_proto import arena  # brings numpy, which other commands do not need

    seen = f"blink-gpu {info.version}, layout {info.layout_hash:016x}"
    if (info.arena_version, info.layout_hash) != (arena.VERSION, arena.LAYOUT_HASH):
        todo = f"this version knows {arena.LAYOUT_HASH:016x}: install the same version on both sides"
        return fail(seen, todo)
    phase = control_pb2.Phase.Name(info.state.phase).removeprefix("PHASE_").lower()
    seen = (
        f"{seen}, as here; {phase} {info.state.model}".rstrip()
        + f"; {info.channels_free} of {info.channels} channels free"
    )
    if info.state.phase == control_pb2.PHASE_SERVING:
        return ok(seen)
    return warn(seen, "no model is served yet: blinkctl load, or look at blink-gpu's log")


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
