"""`blinkctl`: administers a GPU runtime over its control plane.

Exit status: 0 done; 1 refused or failed; 2 wrong usage; 3 the runtime cannot be reached or does not answer in time;
4 the certificate's role may not do this.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import grpc
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from blink_deploy import certs, sessions
from blink_deploy.client import DEADLINE_SECONDS
from blink_deploy.connection import Options, connected
from blink_deploy.doctor.command import doctor
from blink_deploy.output import (
    REFUSED,
    Output,
    PlainTable,
    as_dict,
    errors,
    phase_name,
    plain,
    show,
)
from blink_deploy.watching.command import Follower, shown
from blink_deploy.watching.scrape import Metrics
from blink_proto import VERSION, control_pb2
from blink_proto.dial import Dial

app = typer.Typer(no_args_is_help=True, help=__doc__, pretty_exceptions_show_locals=False)
app.add_typer(certs.app, name="certs")
app.add_typer(sessions.app, name="sessions")
app.command()(doctor)

Grace = Annotated[int, typer.Option(min=0, max=3600, help="Seconds for running sequences to finish.")]


def _say_version(wanted: bool) -> None:
    if wanted:
        print(f"blinkctl {VERSION}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    runtime: Annotated[
        str, typer.Option(envvar="BLINK_RUNTIME", help="Address of the control plane.")
    ] = "127.0.0.1:50051",
    certs: Annotated[
        Path | None,
        typer.Option(envvar="BLINK_CERTS", help="Folder made by `certs init`, instead of --ca, --cert and --key."),
    ] = None,
    role: Annotated[str, typer.Option(envvar="BLINK_ROLE", help="Whose certificate in that folder.")] = "administrator",
    ca: Annotated[str, typer.Option(envvar="BLINK_CA", help="PEM authorities of the runtime's certificate.")] = "",
    cert: Annotated[str, typer.Option(envvar="BLINK_CERT", help="PEM certificate that says who you are.")] = "",
    key: Annotated[str, typer.Option(envvar="BLINK_KEY", help="PEM key of --cert.")] = "",
    server_name: Annotated[
        str, typer.Option(envvar="BLINK_SERVER_NAME", help="Name in the runtime's certificate, if called by another.")
    ] = "",
    insecure: Annotated[bool, typer.Option("--insecure", help="Plain text also to another machine.")] = False,
    output: Annotated[Output, typer.Option("--output", "-o", envvar="BLINK_OUTPUT", help="table or json")] = (
        Output.TABLE
    ),
    timeout: Annotated[
        float, typer.Option(envvar="BLINK_TIMEOUT", min=0.1, help="Seconds for an answer.")
    ] = DEADLINE_SECONDS,
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Says the version, and ends.")
    ] = False,
) -> None:
    """Administers a GPU runtime."""
    if certs is not None and not (ca or cert or key):
        ca, cert, key = (str(certs / f"{name}.pem") for name in ("ca", role, f"{role}-key"))
    context.obj = Options(Dial(runtime, ca, cert, key, server_name, insecure), output, timeout)


@app.command()
def status(context: typer.Context) -> None:
    """What the runtime is and how it is doing."""
    with connected(context) as client:
        info = client.server_info()

    def table() -> PlainTable:
        made = PlainTable(show_header=False)
        made.add_row("version", info.version)
        made.add_row("device", info.device)
        made.add_row("state", phase_name(info.state))
        made.add_row("model", info.state.model or "–")
        made.add_row("epoch", str(info.state.epoch))
        made.add_row("channels free", f"{info.channels_free} of {info.channels}")
        if info.state.detail:
            made.add_row("detail", info.state.detail)
        return made

    show(context.obj.output, as_dict(info), table)


@app.command()
def health(
    context: typer.Context,
    service: Annotated[str, typer.Argument(help="A model's name, or a gRPC service; default: the whole runtime.")] = "",
) -> None:
    """Asks the standard health service; status 1 for anything but SERVING. For probes."""
    with connected(context) as client:
        serving = client.is_serving(service)
    show(context.obj.output, {"serving": serving}, lambda: "serving" if serving else "not serving")
    if not serving:
        raise typer.Exit(REFUSED)


@app.command("list")
def list_models(context: typer.Context) -> None:
    """The loaded models."""
    with connected(context) as client:
        models = client.list_models()

    def table() -> PlainTable:
        made = PlainTable("name", "architecture", "parameters", "window", "dtype")
        for model in models:
            size = f"{model.parameters / 1e6:.1f} M"
            made.add_row(model.name, model.architecture, size, str(model.max_model_tokens), model.dtype)
        return made

    show(context.obj.output, [as_dict(model) for model in models], table)


@app.command()
def load(
    context: typer.Context,
    source: Annotated[str, typer.Argument(help="Folder or file on the runtime's host, or a built-in name.")],
    name: Annotated[str, typer.Option(help="Name that clients use; default: its own.")] = "",
    replace: Annotated[
        bool, typer.Option("--replace", help="In place of the loaded one, which serves until the new one is checked.")
    ] = False,
    grace: Annotated[
        int, typer.Option(min=0, max=3600, help="With --replace: seconds for running sequences to finish.")
    ] = 30,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds; a load that takes longer goes on.")] = 1800.0,
) -> None:
    """Loads a model. May be called again at any time: what is loaded already is said at once, what loads is joined."""
    model = control_pb2.Model()
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    with connected(context) as client:
        steps = client.load(source, name, timeout, replace=replace, grace=grace)
        with Progress(
            *columns, TimeElapsedColumn(), console=errors, transient=True, disable=not errors.is_terminal
        ) as bar:
            task = bar.add_task("loading", total=None)
            for step in steps:
                done, total = step.done_units, step.total_units or None
                bar.update(task, description=plain(step.stage), completed=done, total=total, refresh=True)
                model = step.model
    show(context.obj.output, as_dict(model), lambda: f"loaded {model.name}")


@app.command()
def unload(context: typer.Context, name: str, grace: Grace = 30) -> None:
    """Drains the chain and frees a model."""
    with connected(context) as client:
        client.unload(name, grace)
    show(context.obj.output, {"unloaded": name}, lambda: f"unloaded {name}")


@app.command()
def drain(context: typer.Context, grace: Grace = 30) -> None:
    """Takes nothing new and waits for what runs; status 1 when that outlives the grace time."""
    with connected(context) as client:
        drained = client.drain(grace)
    text = "drained" if drained else "sequences were still running at the end of the grace time"
    show(context.obj.output, {"drained": drained}, lambda: text)
    if not drained:
        raise typer.Exit(REFUSED)


@app.command()
def resume(context: typer.Context) -> None:
    """Takes submissions again after a drain."""
    with connected(context) as client:
        client.resume()
    show(context.obj.output, {"resumed": True}, lambda: "taking submissions again")


@app.command()
def watch(
    context: typer.Context,
    seconds: Annotated[float, typer.Option(min=0, help="End after so long; 0: go on until Ctrl-C.")] = 0.0,
    interval: Annotated[
        float | None,
        typer.Option(min=0, help="Seconds between two looks at the device; 0: changes of state only, as in JSON."),
    ] = None,
    metrics_url: Annotated[
        str, typer.Option(envvar="BLINK_METRICS_URL", help="A front end's /metrics, for latencies and its queue.")
    ] = "",
    metrics_ca: Annotated[str, typer.Option(help="PEM authorities of its certificate; default: the system's.")] = "",
    metrics_key_file: Annotated[str, typer.Option(help="File with an API key that may read metrics.")] = "",
) -> None:
    """Shows rates, queue, KV use and latencies: in a terminal in place, else line by line, in JSON an object a line."""
    if metrics_url and not metrics_url.startswith(("http://", "https://")):
        raise typer.BadParameter("--metrics-url begins with http:// or https://")
    output: Output = context.obj.output
    usual = 0.0 if output is Output.JSON and not metrics_url else 1.0
    every = usual if interval is None else interval
    follower = Follower(Metrics(metrics_url, metrics_ca, metrics_key_file) if metrics_url else None)
    deadline = time.monotonic() + seconds
    with connected(context) as client, shown(output, follower, measured=every > 0) as show_state:
        try:
            for state in client.watch(seconds or None, every):
                show_state(state)
        except grpc.RpcError as error:
            if not (seconds and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and time.monotonic() > deadline - 1):
                raise


def main() -> None:
    """Console script."""
    app()


if __name__ == "__main__":
    main()
