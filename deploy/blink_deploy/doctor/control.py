"""The control plane: the way to it, and whether both sides mean the same arena."""

from __future__ import annotations

import datetime
import socket
import ssl

import grpc

from blink_deploy.client import ControlClient
from blink_deploy.doctor.certificates import SOON, reason
from blink_deploy.doctor.probe import Probe
from blink_deploy.doctor.report import Finding, fail, ok, skip, warn
from blink_deploy.doctor.site import Part, Site
from blink_proto import control_pb2
from blink_proto.dial import Dial, DialError

SECONDS = 5.0


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
        return _absent(site, f"{dial.address}: {reason(error)}", todo)


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
