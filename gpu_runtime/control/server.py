"""Runs the control plane: the gRPC server with health and reflection, and the end of the process in order."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from blink_proto.control_pb2_grpc import add_ControlServicer_to_server
from blink_proto.dial import DialError
from blink_proto.grpc_settings import MAX_CALLS, SERVER_OPTIONS, is_local
from gpu_runtime.config import ConfigError
from gpu_runtime.control.audit import STANDARD_ERROR, Audit
from gpu_runtime.control.files import LOOK_SECONDS, again_and_again
from gpu_runtime.control.guard import Guard
from gpu_runtime.control.health import SERVICE, follow_health, make_health
from gpu_runtime.control.refused import ListError, RefusedCertificates
from gpu_runtime.control.runtime import Runtime
from gpu_runtime.control.service import ControlService
from gpu_runtime.control.tls import ServerTls, TlsFiles


class AddressError(RuntimeError):
    """The address cannot be listened on."""


@dataclass(frozen=True)
class Listen:
    """What the operator chooses for the control plane."""

    address: str
    tls: TlsFiles | None = None
    insecure: bool = False
    """Plain text also where other machines can reach it."""
    reflection: bool | None = None
    """None: where nobody outside this machine can ask for it."""
    audit_log: str = STANDARD_ERROR
    refused_certificates: str = ""
    """File of them; empty: none."""

    @property
    def reflects(self) -> bool:
        """Whether callers may ask which calls there are: by default only in plain text on a local address. TLS, and
        other machines, mean production."""
        if self.reflection is None:
            return self.tls is None and is_local(self.address)
        return self.reflection


@dataclass
class ControlServer:
    """A running server and what keeps it up to date."""

    server: Any
    port: int
    checks: Any
    guard: Guard
    followers: list[asyncio.Task[None]]

    async def stop(self) -> None:
        """Ends the streams and the server."""
        for follower in self.followers:
            follower.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await follower
        await self.checks.enter_graceful_shutdown()
        self.guard.stop()
        await self.server.stop(grace=1.0)


def check_listen(listen: Listen) -> tuple[ServerTls | None, Audit, RefusedCertificates]:
    """Everything that can be wrong with the choices, before anything is started.

    Raises:
        ConfigError: says what.
    """
    if listen.tls is None and not is_local(listen.address) and not listen.insecure:
        raise ConfigError(
            f"--listen {listen.address} can be reached from other machines: it needs --tls-cert, --tls-key and "
            "--client-ca (blinkctl certs init makes them), or --insecure if everybody there may administer this runtime"
        )
    if listen.refused_certificates and listen.tls is None:
        raise ConfigError("--refused-certificates needs TLS: in plain text nobody shows one")
    try:
        refused = RefusedCertificates(listen.refused_certificates)
    except ListError as error:
        raise ConfigError(f"--refused-certificates {error}") from error
    try:
        tls = None if listen.tls is None else ServerTls(listen.tls)
    except DialError as error:
        raise ConfigError(f"the control plane's {error}") from error
    try:
        return tls, Audit(listen.audit_log), refused
    except OSError as error:
        raise ConfigError(f"--audit-log {listen.audit_log}: {error.strerror}") from error


async def start_server(runtime: Runtime, listen: Listen) -> ControlServer:
    """Starts the gRPC server.

    Raises:
        ConfigError: the choices cannot work.
        AddressError: the address is taken or malformed.
    """
    tls, audit, refused = check_listen(listen)
    guard = Guard(audit, refused)
    server = grpc.aio.server(interceptors=[guard], options=SERVER_OPTIONS, maximum_concurrent_rpcs=MAX_CALLS)
    add_ControlServicer_to_server(ControlService(runtime), server)
    checks = make_health()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    if listen.reflects:
        reflection.enable_server_reflection([SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    port = _bind(server, listen.address, tls)
    await server.start()
    followers = [asyncio.create_task(follow_health(runtime, checks))]
    if tls is not None:
        followers.append(asyncio.create_task(tls.follow()))
    if listen.refused_certificates:
        followers += _follow_refused(refused, guard, runtime)
    return ControlServer(server, port, checks, guard, followers)


def _follow_refused(refused: RefusedCertificates, guard: Guard, runtime: Runtime) -> list[asyncio.Task[None]]:
    """Once a second, for ever: whoever is refused by now has no calls and no session. Calls need no device to be ended,
    so they do not wait for one that sessions wait for.
    """
    looked = asyncio.Event()

    async def end_calls() -> None:
        await asyncio.sleep(LOOK_SECONDS)
        await refused.look()
        guard.end_refused()
        looked.set()

    async def end_sessions() -> None:
        await looked.wait()
        looked.clear()
        if runtime.models():
            await runtime.life.entrance.end_those(lambda one: refused.has(one.owner, one.fingerprint))

    both = {"ending the calls of refused certificates": end_calls, "ending their sessions": end_sessions}
    return [asyncio.create_task(again_and_again(what, work)) for what, work in both.items()]


def _bind(server: Any, address: str, tls: ServerTls | None) -> int:
    try:
        if tls is None:
            return int(server.add_insecure_port(address))
        return int(server.add_secure_port(address, tls.credentials()))
    except RuntimeError as error:
        raise AddressError(f"cannot listen on {address}: is another runtime there?") from error


async def wait_for_end(runtime: Runtime) -> int:
    """Waits for SIGTERM, SIGINT or the chain's own end; the exit status."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    waits = [asyncio.create_task(stop.wait()), asyncio.create_task(runtime.failed.wait())]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    return 1 if runtime.failed.is_set() else 0
