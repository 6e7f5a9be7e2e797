"""`blinkctl`: administers a GPU runtime over its control plane."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Annotated, Any

import grpc
import typer
from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from blink_deploy.client import ControlClient
from blink_proto import control_pb2

app = typer.Typer(no_args_is_help=True, help=__doc__)
console = Console()
errors = Console(stderr=True)


class Output(StrEnum):
    """How answers are printed."""

    TABLE = "table"
    JSON = "json"


@app.callback()
def _options(
    context: typer.Context,
    server: Annotated[
        str, typer.Option(envvar="BLINK_SERVER", help="Address of the control plane.")
    ] = "127.0.0.1:50051",
    output: Annotated[Output, typer.Option(help="table or json")] = Output.TABLE,
) -> None:
    """Administers a GPU runtime."""
    context.obj = (server, output)


@contextmanager
def connected(context: typer.Context) -> Iterator[ControlClient]:
    """A client; what the runtime refuses ends the command with status 1 and its message."""
    server, _ = context.obj
    try:
        with ControlClient(server) as client:
            yield client
    except grpc.RpcError as error:
        errors.print(f"[red]{error.code().name}: {error.details()}")
        raise typer.Exit(1) from error


def as_dict(message: Any) -> dict[str, Any]:
    """A message as JSON sees it, with the field names of the contract."""
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def show(context: typer.Context, value: Any, table: Callable[[], Table]) -> None:
    """Prints an answer in the chosen way."""
    if context.obj[1] is Output.JSON:
        print(json.dumps(value, indent=2))
    else:
        console.print(table())


def phase_name(state: control_pb2.State) -> str:
    """`serving` for PHASE_SERVING."""
    return control_pb2.Phase.Name(state.phase).removeprefix("PHASE_").lower()


@app.command()
def status(context: typer.Context) -> None:
    """What the runtime is and how it is doing."""
    with connected(context) as client:
        info = client.server_info()

    def table() -> Table:
        made = Table(show_header=False)
        made.add_row("version", info.version)
        made.add_row("device", info.device)
        made.add_row("state", phase_name(info.state))
        made.add_row("model", info.state.model or "–")
        made.add_row("epoch", str(info.state.epoch))
        made.add_row("channels free", f"{info.channels_free} of {info.channels}")
        return made

    show(context, as_dict(info), table)


@app.command("list")
def list_models(context: typer.Context) -> None:
    """The loaded models."""
    with connected(context) as client:
        models = client.list_models()

    def table() -> Table:
        made = Table("name", "architecture", "parameters", "window", "dtype")
        for model in models:
            size = f"{model.parameters / 1e6:.1f} M"
            made.add_row(model.name, model.architecture, size, str(model.max_model_tokens), model.dtype)
        return made

    show(context, [as_dict(model) for model in models], table)


@app.command()
def load(
    context: typer.Context,
    source: Annotated[str, typer.Argument(help="Folder or file on the runtime's host, or a built-in name.")],
    name: Annotated[str, typer.Option(help="Name that clients use; default: its own.")] = "",
    replace: Annotated[
        bool, typer.Option("--replace", help="In place of the loaded one, which serves until the new one is checked.")
    ] = False,
    grace: Annotated[int, typer.Option(min=0, help="With --replace: seconds for running sequences to finish.")] = 30,
    timeout: Annotated[float, typer.Option(help="Seconds.")] = 1800.0,
) -> None:
    """Loads a model."""
    with connected(context) as client, Progress(console=errors, transient=True) as bar:
        task = bar.add_task("loading", total=None)
        model = control_pb2.Model()
        for step in client.load(source, name, timeout, replace=replace, grace=grace):
            total = step.total_units or None
            bar.update(task, description=step.stage, completed=step.done_units, total=total)
            model = step.model
    show(context, as_dict(model), lambda: _one_line(f"loaded {model.name}"))


@app.command()
def unload(
    context: typer.Context,
    name: str,
    grace: Annotated[int, typer.Option(min=0, help="Seconds for running sequences to finish.")] = 30,
) -> None:
    """Drains the chain and frees a model."""
    with connected(context) as client:
        client.unload(name, grace)
    show(context, {"unloaded": name}, lambda: _one_line(f"unloaded {name}"))


@app.command()
def drain(
    context: typer.Context,
    grace: Annotated[int, typer.Option(min=0, help="Seconds for running sequences to finish.")] = 30,
    resume: Annotated[bool, typer.Option(help="Take submissions again.")] = False,
) -> None:
    """Takes nothing new and waits for what runs."""
    with connected(context) as client:
        if resume:
            client.resume()
            show(context, {"resumed": True}, lambda: _one_line("taking submissions again"))
            return
        drained = client.drain(grace)
    text = "drained" if drained else "sequences were still running at the end of the grace time"
    show(context, {"drained": drained}, lambda: _one_line(text))
    if not drained:
        raise typer.Exit(1)


@app.command()
def watch(context: typer.Context) -> None:
    """Prints the state, and every change of it, until Ctrl-C."""
    with connected(context) as client:
        for state in client.watch():
            text = f"epoch {state.epoch}  {phase_name(state)}  {state.model}  {state.detail}"
            print(json.dumps(as_dict(state)) if context.obj[1] is Output.JSON else text.rstrip(), flush=True)


def _one_line(text: str) -> Table:
    table = Table(show_header=False, box=None)
    table.add_row(text)
    return table


def main() -> None:
    """Console script."""
    app()


if __name__ == "__main__":
    main()
