"""Runs the control plane: the gRPC server with health and reflection, and the end of the process in order."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from blink_proto import control_pb2
from blink_proto.control_pb2 import Phase
from blink_proto.control_pb2_grpc import add_ControlServicer_to_server
from gpu_runtime.control.runtime import Runtime
from gpu_runtime.control.service import ControlService

SERVICE = control_pb2.DESCRIPTOR.services_by_name["Control"].full_name
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class AddressError(RuntimeError):
    """The address cannot be listened on."""


async def start_server(runtime: Runtime, address: str) -> tuple[Any, int, asyncio.Task[None]]:
    """Starts the gRPC server; (server, port, the task that keeps the health service up to date).

    Raises:
        AddressError: the address is taken or malformed.
    """
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    add_ControlServicer_to_server(ControlService(runtime), server)
    checks = health.aio.HealthServicer()  # type: ignore[attr-defined]  # the stubs lack it
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    reflection.enable_server_reflection([SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise AddressError(f"cannot listen on {address}: is another runtime there?") from error
    await server.start()
    return server, port, asyncio.create_task(_follow_health(runtime, checks))


async def _follow_health(runtime: Runtime, checks: Any) -> None:
    """Overall and control service: up while the process is; each model by name: while it is served."""
    await checks.set("", _SERVING)
    await checks.set(SERVICE, _SERVING)
    async for state in runtime.watch.follow():
        if state.model:
            serving = state.phase == Phase.PHASE_SERVING
            await checks.set(state.model, _SERVING if serving else _NOT_SERVING)
        if state.phase == Phase.PHASE_FAILED:
            await checks.set("", _NOT_SERVING)


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


async def stop_server(server: Any, follower: asyncio.Task[None]) -> None:
    """Ends the streams and the server."""
    follower.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await follower
    await server.stop(grace=1.0)
