"""How a program calls the control plane: with TLS and a certificate of its own, or in plain text on one machine."""

from __future__ import annotations

import ssl
from dataclasses import dataclass

import grpc

from blink_proto.grpc_settings import CLIENT_OPTIONS, is_local


class DialError(ValueError):
    """The choices do not fit together, or a file cannot be used."""


@dataclass(frozen=True)
class Dial:
    """Where the runtime is and how to prove who is who. Either all of `ca`, `certificate` and `key` or none.

    Args:
        ca: PEM file of the authorities that may have signed the runtime's certificate.
        certificate, key: PEM files of the caller.
        server_name: the name in the runtime's certificate; default: the host of `address`.
        insecure: plain text also to another machine.
    """

    address: str
    ca: str = ""
    certificate: str = ""
    key: str = ""
    server_name: str = ""
    insecure: bool = False

    @property
    def is_secure(self) -> bool:
        """Whether TLS is used."""
        return bool(self.ca)

    def check(self) -> None:
        """Refuses what cannot work, and files that cannot be used now.

        Raises:
            DialError: says what.
        """
        if len({bool(self.ca), bool(self.certificate), bool(self.key)}) != 1:
            raise DialError("authority, certificate and key of the control plane go together")
        if self.is_secure:
            self.credentials()
        elif not is_local(self.address) and not self.insecure:
            raise DialError(
                f"the control plane at {self.address} is on another machine: "
                "it needs TLS (authority, certificate and key), or to be declared insecure"
            )

    def options(self) -> list[tuple[str, int | str]]:
        """Options of the channel."""
        name: tuple[str, int | str] = ("grpc.ssl_target_name_override", self.server_name)
        named = [name] if self.server_name else []
        return [*CLIENT_OPTIONS, *named]

    def credentials(self) -> grpc.ChannelCredentials:
        """From the files as they are now.

        Raises:
            DialError: one cannot be read or used.
        """
        check_files(self.certificate, self.key, self.ca)
        ca, certificate, key = map(_read, (self.ca, self.certificate, self.key))
        return grpc.ssl_channel_credentials(ca, key, certificate)


def check_files(certificate: str, key: str, ca: str) -> None:
    """Reads a pair and authorities as OpenSSL does.

    Raises:
        DialError: a file is missing or broken, or the pair does not match.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except (OSError, DialError) as error:
        raise DialError(f"certificate {certificate} with key {key}: {_reason(error)}") from error
    try:
        context.load_verify_locations(ca)
    except OSError as error:
        raise DialError(f"authorities {ca}: {_reason(error)}") from error


def _no_password() -> str:
    """Instead of OpenSSL's question on the terminal."""
    raise DialError("the key is encrypted; give one that is not")


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or str(error)).replace("_", " ").lower()
    return getattr(error, "strerror", None) or str(error)


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise DialError(f"{path}: {_reason(error)}") from error
