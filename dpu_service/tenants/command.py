"""`blink-dpu keys`: makes keys."""

from __future__ import annotations

from typing import Annotated

import typer

from dpu_service.tenants.file import NAME
from dpu_service.tenants.keys import new_key, write_digest

app = typer.Typer(help="Make API keys.", no_args_is_help=True)


@app.callback()
def _commands() -> None:
    """Make API keys."""


@app.command()
def new(tenant: Annotated[str, typer.Option(help="Whose key: letters, digits, '.', '_' and '-'.")]) -> None:
    """Prints a new key, which is shown this once, and what belongs into the file of --api-keys."""
    if not NAME.fullmatch(tenant):
        raise typer.BadParameter("a tenant's name is up to 64 letters, digits, '.', '_' and '-'")
    key = new_key()
    shown = f'"{tenant}"' if "." in tenant else tenant
    typer.echo(f"key, shown this once: {key}\n")
    typer.echo("for the file of --api-keys (or its digest among the keys of the tenant's table):\n")
    typer.echo(f'[tenants.{shown}]\nkeys = ["{write_digest(key)}"]')
