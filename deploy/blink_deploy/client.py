"""The control plane as seen by the operator's commands."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType

import grpc

from blink_proto import control_pb2
from blink_proto.control_pb2_grpc import ControlStub

DEADLINE_SECONDS = 10.0


class ControlClient:
    """One connection to a runtime. Every call raises grpc.RpcError when the runtime refuses or is not there."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address)
        self._stub = ControlStub(self._channel)

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()

    def server_info(self) -> control_pb2.GetServerInfoResponse:
        """What the runtime is."""
        info: control_pb2.GetServerInfoResponse = self._stub.GetServerInfo(
            control_pb2.GetServerInfoRequest(), timeout=DEADLINE_SECONDS
        )
        return info

    def list_models(self) -> list[control_pb2.Model]:
        """What is loaded."""
        answer = self._stub.ListModels(control_pb2.ListModelsRequest(), timeout=DEADLINE_SECONDS)
        return list(answer.models)

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
        self._stub.UnloadModel(request, timeout=grace + 60.0)

    def drain(self, grace: int) -> bool:
        """Takes nothing new; False when some sequences outlived the grace time."""
        answer = self._stub.Drain(control_pb2.DrainRequest(grace_seconds=grace), timeout=grace + DEADLINE_SECONDS)
        return bool(answer.drained)

    def resume(self) -> None:
        """Takes submissions again."""
        self._stub.Drain(control_pb2.DrainRequest(resume=True), timeout=DEADLINE_SECONDS)

    def watch(self) -> Iterator[control_pb2.State]:
        """The present state, then every change."""
        states: Iterator[control_pb2.State] = self._stub.WatchState(control_pb2.WatchStateRequest())
        return states
