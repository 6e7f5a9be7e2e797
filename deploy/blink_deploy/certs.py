"""`blinkctl certs`: certificates for the control plane. Needs no runtime."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from blink_deploy.output import REFUSED, USAGE, Output, PlainTable, say_error, show
from blink_proto.roles import Role

app = typer.Typer(no_args_is_help=True, help="Certificates for the control plane.")
Folder = Annotated[Path, typer.Option("--dir", envvar="BLINK_CERTS", help="Folder of the authority and what it signs.")]
Days = Annotated[int, typer.Option(min=1, max=825, help="Life of what is signed.")]
Hosts = Annotated[
    list[str] | None,
    typer.Option("--host", help="Name or address under which the runtime is called, beside this machine's; repeat."),
]
DEFAULT_FOLDER = Path("blink-certs")


@app.command()
def init(context: typer.Context, folder: Folder = DEFAULT_FOLDER, host: Hosts = None, days: Days = 365) -> None:
    """Makes an authority, the runtime's certificate, and one for each role: front-end, administrator, reader."""
    _run(lambda authority: authority.initialise(folder, host or [], days))
    _show(context, folder)


@app.command()
def issue(
    context: typer.Context,
    role: Annotated[Role, typer.Argument(help="What it may be used for.")],
    name: Annotated[str, typer.Option("--name", help="Of its two files and its subject, as dpu-a.")],
    folder: Folder = DEFAULT_FOLDER,
    days: Days = 365,
) -> None:
    """Signs one more certificate: a subject of its own for each front end, administrator or reader."""
    _run(lambda authority: authority.issue(folder, role, name, days))
    _show(context, folder)


@app.command()
def renew(
    context: typer.Context,
    which: Annotated[list[str] | None, typer.Argument(help="server, front-end, dpu-a, …; default: all.")] = None,
    folder: Folder = DEFAULT_FOLDER,
    host: Hosts = None,
    days: Days = 365,
) -> None:
    """Signs anew, with new keys. Running programs take their files up by themselves."""
    _run(lambda authority: authority.renew(folder, host or [], days, which or []))
    _show(context, folder)


@app.command("show")
def show_all(context: typer.Context, folder: Folder = DEFAULT_FOLDER) -> None:
    """What is in the folder, and until when it is valid."""
    _show(context, folder)


def _run(job: Callable[[Any], Any]) -> Any:
    """Gives the module `authority` to a job; what goes wrong ends the command."""
    try:
        from blink_deploy import authority
    except ModuleNotFoundError as error:
        say_error(f"certificates need the package {error.name}: pip install cryptography")
        raise typer.Exit(USAGE) from error
    try:
        return job(authority)
    except (authority.CertificateError, OSError) as error:
        say_error(str(error))
        raise typer.Exit(REFUSED) from error


def _show(context: typer.Context, folder: Path) -> None:
    found = _run(lambda authority: authority.show(folder))

    def table() -> PlainTable:
        heads = ("certificate", "role", "subject", "names", "valid until", "SHA-256")
        made = PlainTable(*heads, title=str(folder), title_justify="left")
        for one in found:
            names, until = ", ".join(one.names), f"{one.expires:%Y-%m-%d}"
            made.add_row(one.name, one.role, one.subject, names, until, one.fingerprint[:16])
        return made

    output: Output = context.obj.output
    fields = ("name", "subject", "role", "names", "fingerprint")
    value = [{**{name: getattr(one, name) for name in fields}, "expires": one.expires.isoformat()} for one in found]
    show(output, value, table)
