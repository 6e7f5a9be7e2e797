"""The front end's link to a runtime over TLS: files are read for every connection, and bad ones are waited out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from blink_deploy import authority
from blink_proto import control_pb2
from blink_proto.control_pb2_grpc import ControlServicer, add_ControlServicer_to_server
from blink_proto.dial import Dial
from dpu_service import runtime_link
from dpu_service.runtime_link import RuntimeLink


class Seen(ControlServicer):
    """Notes who watches."""

    def __init__(self) -> None:
        self.certificates: list[bytes] = []

    async def WatchState(
        self, request: control_pb2.WatchStateRequest, context: Any
    ) -> AsyncIterator[control_pb2.State]:
        (shown,) = context.auth_context()["x509_pem_cert"]
        self.certificates.append(shown)
        yield control_pb2.State(phase=control_pb2.PHASE_IDLE)
        await asyncio.sleep(60)


async def no_offer(worker: int) -> bytes:
    return b""


def test_a_renewed_certificate_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runtime_link, "WATCH_SECONDS", 0.3)
    monkeypatch.setattr(runtime_link, "RETRY_SECONDS", 0.05)
    folder = tmp_path / "certs"
    authority.initialise(folder, [], 30)
    first = (folder / "front-end.pem").read_bytes()
    server_pair = [(folder / name).read_bytes() for name in ("server-key.pem", "server.pem")]
    ca = (folder / "ca.pem").read_bytes()

    async def main() -> None:
        seen, server = Seen(), grpc.aio.server()
        add_ControlServicer_to_server(seen, server)
        credentials = grpc.ssl_server_credentials([(server_pair[0], server_pair[1])], ca, require_client_auth=True)
        port = server.add_secure_port("127.0.0.1:0", credentials)
        await server.start()
        files = (str(folder / name) for name in ("ca.pem", "front-end.pem", "front-end-key.pem"))
        link = RuntimeLink(Dial(f"127.0.0.1:{port}", *files), "a", 1, "shm", no_offer, lambda worker, session: None)
        following = asyncio.create_task(link.follow())

        async def wait_for(count: int) -> None:
            async with asyncio.timeout(10):
                while len(seen.certificates) < count:
                    await asyncio.sleep(0.02)

        try:
            await wait_for(2)
            assert set(seen.certificates) == {first}
            (folder / "front-end-key.pem").write_text("half of a rotation")
            async with asyncio.timeout(10):
                while "front-end-key.pem" not in caplog.text:
                    await asyncio.sleep(0.02)
            authority.renew(folder, [], 30, ["front-end"])
            await wait_for(len(seen.certificates) + 1)
            assert seen.certificates[-1] == (folder / "front-end.pem").read_bytes() != first
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            await server.stop(None)

    asyncio.run(main())
    assert "DEADLINE_EXCEEDED" not in caplog.text, "dialling anew after the usual time is no failure"
