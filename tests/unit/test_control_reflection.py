"""Where callers may ask the control plane which calls there are."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from gpu_runtime.config import make_config
from gpu_runtime.control.runtime import Runtime
from gpu_runtime.control.server import Listen, start_server


async def asked(listen: Listen) -> set[str] | grpc.StatusCode:
    """The services that a server names, or how it refuses."""
    server = await start_server(Runtime(make_config("cpu")), listen)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            request = reflection_pb2.ServerReflectionRequest(list_services="")
            call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([request]), timeout=10)
            async for answer in call:
                return {service.name for service in answer.list_services_response.service}
            raise AssertionError("no answer")
    except grpc.aio.AioRpcError as error:
        return error.code()
    finally:
        await server.stop()


@pytest.mark.parametrize(
    ("listen", "reflects"),
    [
        (Listen("127.0.0.1:0"), True),
        (Listen("127.0.0.1:0", insecure=True), True),
        (Listen("127.0.0.1:0", reflection=False), False),
        (Listen("0.0.0.0:0", insecure=True), False),
        (Listen("0.0.0.0:0", insecure=True, reflection=True), True),
    ],
    ids=lambda value: f"{value.address}-{value.insecure}-{value.reflection}" if isinstance(value, Listen) else "",
)
def test_only_this_machine_is_told_unless_wanted_otherwise(listen: Listen, reflects: bool) -> None:
    """In plain text; with TLS it is off as well (`tests/e2e/test_control_tls.py`)."""
    told = asyncio.run(asked(listen))
    if reflects:
        assert isinstance(told, set)
        assert "blink.control.v1.Control" in told
    else:
        assert told is grpc.StatusCode.UNIMPLEMENTED
