"""The standard health service, kept up to date.

`""`: submissions can be made, or a model could be loaded: not while draining, after a failure and at the end. The
control service by its name: the process answers. A model by its name: it is served.
"""

from __future__ import annotations

from typing import Any

from grpc_health.v1 import health, health_pb2

from blink_proto import control_pb2
from blink_proto.control_pb2 import Phase
from gpu_runtime.control.runtime import Runtime

SERVICE: str = control_pb2.DESCRIPTOR.services_by_name["Control"].full_name
_AWAY = (Phase.PHASE_DRAINING, Phase.PHASE_FAILED)


def make_health() -> Any:
    """The servicer."""
    return health.aio.HealthServicer()  # type: ignore[attr-defined]  # the stubs lack it


async def follow_health(runtime: Runtime, checks: Any) -> None:
    """Runs for ever."""
    await checks.set(SERVICE, _status(True))
    known: set[str] = set()
    async for state in runtime.watch.follow():
        await checks.set("", _status(state.phase not in _AWAY))
        known |= {state.model} - {""}
        for name in known:
            await checks.set(name, _status(name == state.model and state.phase == Phase.PHASE_SERVING))


def _status(serving: bool) -> int:
    answer = health_pb2.HealthCheckResponse
    return int(answer.SERVING if serving else answer.NOT_SERVING)
