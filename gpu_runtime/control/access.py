"""Who may call what: one table."""

from __future__ import annotations

import grpc

from blink_proto.roles import Role
from gpu_runtime.control.caller import Caller

_EVERYBODY = frozenset(Role)
_LOOKERS = frozenset({Role.ADMINISTRATOR, Role.READER})
_CONTROL = "/blink.control.v1.Control/"
ALLOWED: dict[str, frozenset[Role]] = {
    _CONTROL + "GetServerInfo": _EVERYBODY,
    _CONTROL + "ListModels": _EVERYBODY,
    _CONTROL + "WatchState": _EVERYBODY,
    _CONTROL + "ListSessions": _LOOKERS,
    _CONTROL + "LoadModel": frozenset({Role.ADMINISTRATOR}),
    _CONTROL + "UnloadModel": frozenset({Role.ADMINISTRATOR}),
    _CONTROL + "Drain": frozenset({Role.ADMINISTRATOR}),
    _CONTROL + "CloseSession": frozenset({Role.ADMINISTRATOR}),
    _CONTROL + "OpenSession": frozenset({Role.FRONT_END}),
    _CONTROL + "FetchTokenizer": frozenset({Role.FRONT_END}),
    "/grpc.health.v1.Health/Check": _EVERYBODY,
    "/grpc.health.v1.Health/Watch": _EVERYBODY,
    "/grpc.health.v1.Health/List": _EVERYBODY,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _LOOKERS,
}
"""What is not here may be called by nobody."""

AUDITED = frozenset(_CONTROL + name for name in ("LoadModel", "UnloadModel", "Drain", "OpenSession", "CloseSession"))
"""Calls that change something. Those that are refused to the caller's role are told too, whatever they are."""


def refusal(method: str, caller: Caller) -> tuple[grpc.StatusCode, str] | None:
    """Why a caller may not call a method; None when it may. In plain text, on one machine, everybody may do everything
    that the table knows.
    """
    allowed = ALLOWED.get(method, frozenset())
    if caller.secure and caller.role is None:
        known = ", ".join(role.uri for role in Role)
        return grpc.StatusCode.UNAUTHENTICATED, f"the certificate names no role (a URI, one of: {known})"
    if caller.role in allowed or (allowed and not caller.secure):
        return None
    role = caller.shown_role
    return grpc.StatusCode.PERMISSION_DENIED, f"{method.rpartition('/')[2]} is not for the role {role}"
