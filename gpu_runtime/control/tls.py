"""The control plane's certificate: checked, and looked at again while the runtime serves."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from blink_proto.dial import DialError, check_files
from gpu_runtime.control.files import LOOK_SECONDS, Look, again_and_again, look, say
from gpu_runtime.control.patience import in_thread

_Looks = tuple[Look, ...]


@dataclass(frozen=True)
class TlsFiles:
    """PEM files: the server's chain and key, and the authorities that sign the callers' certificates."""

    certificate: str
    key: str
    client_ca: str


class ServerTls:
    """Credentials that follow their files: new handshakes use new ones, open connections go on.

    Raises:
        DialError: a file cannot be used.
    """

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._seen = self._look()
        self._present = self._read()
        self._given = self._present

    def credentials(self) -> grpc.ServerCredentials:
        """Callers must show a certificate that the authorities have signed."""
        newer: Any = self._newer  # the stubs do not know that None means: no change
        return grpc.dynamic_ssl_server_credentials(self._present, newer, True)

    async def follow(self) -> None:
        """Looks once a second, for ever. What cannot be used changes nothing and is said once."""
        await again_and_again("looking at the control plane's certificate", self._follow_once)

    async def _follow_once(self) -> None:
        await asyncio.sleep(LOOK_SECONDS)
        now = self._look()
        if now == self._seen:
            return
        try:
            self._present = await in_thread(self._read)
            news = "took up a new certificate of the control plane"
        except DialError as error:
            news = f"kept the old certificate of the control plane: {error}"
        self._seen = now
        say(news)

    def _newer(self) -> grpc.ServerCertificateConfiguration | None:
        """gRPC asks before each handshake, in a thread of its own."""
        present = self._present
        if present is self._given:
            return None
        self._given = present
        return present

    def _read(self) -> grpc.ServerCertificateConfiguration:
        files = self._files
        check_files(files.certificate, files.key, files.client_ca)
        try:
            key, chain, ca = (Path(path).read_bytes() for path in (files.key, files.certificate, files.client_ca))
        except OSError as error:
            raise DialError(str(error)) from error
        return grpc.ssl_server_certificate_configuration([(key, chain)], ca)

    def _look(self) -> _Looks:
        return tuple(map(look, (self._files.certificate, self._files.key, self._files.client_ca)))
