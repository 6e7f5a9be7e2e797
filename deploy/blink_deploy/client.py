"""The control plane as seen by the operator's commands."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from blink_proto import control_pb2
from blink_proto.control_pb2_grpc import ControlStub
from blink_proto.dial import Dial

DEADLINE_SECONDS = 10.0
_FREEING_SECONDS = 60.0
"""What an unload may take beyond the grace time."""


class ControlClient:
    """One connection to a runtime. Every call raises grpc.RpcError when the runtime refuses or is not there.

    Args:
        timeout: seconds for a call, beside the grace time that it may name.

    Raises:
        DialError: the certificates cannot be used.
    """

    def __init__(self, dial: Dial, timeout: float = DEADLINE_SECONDS) -> None:
        dial.check()
        options = dial.options()
        if dial.is_secure:
            self._channel = grpc.secure_channel(dial.address, dial.credentials(), options=options)
        else:
            self._channel = grpc.insecure_channel(dial.address, options=options)
        self._stub = ControlStub(self._channel)
        self._timeout = timeout

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()

    def server_info(self) -> control_pb2.GetServerInfoResponse:
        """What the runtime is."""
        info: control_pb2.GetServerInfoResponse = self._stub.GetServerInfo(
            control_pb2.GetServerInfoRequest(), timeout=self._timeout
        )
        return info

    def is_serving(self, service: str) -> bool:
        """What the standard health service says of a service, or of a model by its name."""
        request = health_pb2.HealthCheckRequest(service=service)
        answer = health_pb2_grpc.HealthStub(self._channel).Check(request, timeout=self._timeout)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def list_models(self) -> list[control_pb2.Model]:
        """What is loaded."""
        answer = self._stub.ListModels(control_pb2.ListModelsRequest(), timeout=self._timeout)
        return list(answer.models)

    def list_sessions(self) -> list[control_pb2.Session]:
        """Who holds which channels."""
        answer = self._stub.ListSessions(control_pb2.ListSessionsRequest(), timeout=self._timeout)
        return list(answer.sessions)

    def close_session(self, front_end: str) -> bool:
        """Shuts a front end out; False when its channels are free only once its lease has run out."""
        request = control_pb2.CloseSessionRequest(front_end=front_end)
        return bool(self._stub.CloseSession(request, timeout=self._timeout).freed)

    def load(
        self, source: str, name: str, timeout: float, *, replace: bool = False, grace: int = 0
    ) -> Iterator[control_pb2.LoadModelProgress]:
        """Loads a model, in place of the loaded one if told so; yields its progress."""
        request = control_pb2.LoadModelRequest(source=source, name=name, replace=replace, grace_seconds=grace)
        progress: Iterator[control_pb2.LoadModelProgress] = self._stub.LoadModel(request, timeout=timeout)
        return progress

    def unload(self, name: str, grace: int) -> None:
        """Drains and frees a model."""
        request = control_pb2.UnloadModelRequest(name=name, grace_seconds=grace)
        self._stub.UnloadModel(request, timeout=grace + max(self._timeout, _FREEING_SECONDS))

    def drain(self, grace: int) -> bool:
        """Takes nothing new; False when some sequences outlived the grace time."""
        answer = self._stub.Drain(control_pb2.DrainRequest(grace_seconds=grace), timeout=grace + self._timeout)
        return bool(answer.drained)

    def resume(self) -> None:
        """Takes submissions again."""
        self._stub.Drain(control_pb2.DrainRequest(resume=True), timeout=self._timeout)

    def watch(self, timeout: float | None = None, every: float = 0.0) -> Iterator[control_pb2.State]:
        """The present state, then every change, for so many seconds (None: as long as the runtime is there).

        Args:
            every: seconds after which a state comes without a change, with what the device counts; 0: never.
        """
        request = control_pb2.WatchStateRequest(every_milliseconds=round(every * 1000))
        states: Iterator[control_pb2.State] = self._stub.WatchState(request, timeout=timeout)
        return states
