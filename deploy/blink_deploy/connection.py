"""What holds for every command of `blinkctl`, and the connection that most of them make."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc
import typer

from blink_deploy.client import ControlClient
from blink_deploy.output import USAGE, Output, explain, say_error
from blink_proto.dial import Dial, DialError

INTERRUPTED = 130


@dataclass(frozen=True)
class Options:
    """What holds for every command."""

    dial: Dial
    output: Output
    timeout: float


@contextmanager
def connected(context: typer.Context) -> Iterator[ControlClient]:
    """A client; what the runtime refuses ends the command with its message."""
    options: Options = context.obj
    try:
        with ControlClient(options.dial, options.timeout) as client:
            yield client
    except DialError as error:
        say_error(str(error))
        raise typer.Exit(USAGE) from error
    except grpc.RpcError as error:
        raise typer.Exit(explain(error, options.dial.address, secure=options.dial.is_secure)) from error
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
