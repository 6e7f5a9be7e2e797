"""The control plane beside a scripted device."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from blink_proto import arena, control_pb2
from blink_proto.control_pb2_grpc import ControlServicer, add_ControlServicer_to_server
from tests.replay.device import ReplayDevice


class ReplayControl(ControlServicer):  # type: ignore[misc]
    """The part of the control plane that front ends use. Without a device it serves no model."""

    def __init__(self, model: str, files: dict[str, bytes], device: ReplayDevice | None) -> None:
        self.model, self.files = model, files
        self.device = device
        self.opened: list[control_pb2.OpenSessionRequest] = []
        self._changed = threading.Condition()
        self._closed = False
        self._server: grpc.Server | None = None
        self.port = 0

    def start(self, port: int = 0) -> int:
        """Listens on a loopback port; the port."""
        self._server = grpc.server(ThreadPoolExecutor(4))
        add_ControlServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self._server.start()
        return self.port

    def stop(self) -> None:
        """Is gone, as after a crash."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        assert self._server is not None
        self._server.stop(0).wait()

    def put(self, device: ReplayDevice | None) -> None:
        """Serves another device (a new epoch), or none."""
        with self._changed:
            self.device = device
            self._changed.notify_all()

    def WatchState(self, request: Any, context: Any) -> Iterator[control_pb2.State]:
        """The present state, then every change."""
        said: object = self
        while not self._closed and context.is_active():
            with self._changed:
                if self.device is said:
                    self._changed.wait(0.2)
                    continue
                said = self.device
            if said is None:
                yield control_pb2.State(phase=control_pb2.PHASE_IDLE)
            else:
                assert isinstance(said, ReplayDevice)
                yield control_pb2.State(phase=control_pb2.PHASE_SERVING, epoch=said.epoch, model=self.model)

    def OpenSession(self, request: Any, context: Any) -> control_pb2.OpenSessionResponse:
        """Hands out a channel of its own to every name, in the order in which they come."""
        self.opened.append(request)
        device = self.device
        if device is None:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "no model is loaded")
        assert device is not None
        names = list(dict.fromkeys(one.front_end for one in self.opened))
        channel = names.index(request.front_end)
        if channel >= device.sizes.channels:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no channel is free")
        sizes = device.sizes
        layout = control_pb2.ArenaLayout(
            version=arena.VERSION,
            layout_hash=arena.LAYOUT_HASH,
            channels=sizes.channels,
            submit_slots=sizes.submit_slots,
            cancel_slots=sizes.cancel_slots,
            log_slots=sizes.log_slots,
            heap_tokens=sizes.heap_tokens,
            inbound_bytes=arena.InboundLayout(sizes).total_bytes,
            outbound_bytes=arena.OutboundLayout(sizes).total_bytes,
        )
        model = control_pb2.Model(
            name=self.model,
            architecture="replay",
            vocab_size=device.vocab_size,
            max_model_tokens=device.window,
            max_sequence_tokens=device.window,
        )
        return control_pb2.OpenSessionResponse(
            layout=layout,
            nonce=device.nonce,
            epoch=device.epoch,
            channels=[channel],
            transport_blob=device.blob(),
            model=model,
        )

    def FetchTokenizer(self, request: Any, context: Any) -> Iterator[control_pb2.FetchTokenizerChunk]:
        """In small pieces, so that joining them is tested too."""
        for name, content in self.files.items():
            for at in range(0, len(content), 10_000):
                yield control_pb2.FetchTokenizerChunk(file=name, content=content[at : at + 10_000])
