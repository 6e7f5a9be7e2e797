"""`blinkctl sessions`: who holds which channels, and shutting a front end out."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from blink_deploy.connection import connected
from blink_deploy.output import PlainTable, as_dict, show

app = typer.Typer(invoke_without_command=True)


@app.callback()
def sessions(context: typer.Context) -> None:
    """Who holds which channels; `end` shuts a front end out."""
    if context.invoked_subcommand is not None:
        return
    with connected(context) as client:
        found = client.list_sessions()

    def table() -> PlainTable:
        made = PlainTable("front end", "transport", "open since", "channels", "live")
        for one in found:
            since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.opened_unix_seconds))
            indices = ", ".join(str(channel.index) for channel in one.channels)
            live = f"{sum(channel.live for channel in one.channels)} of {len(one.channels)}"
            how = f"{one.transport}, {one.gpu_memory}" if one.gpu_memory else one.transport
            made.add_row(one.front_end, how, since, indices, live)
        return made

    show(context.obj.output, [as_dict(one) for one in found], table)


@app.command()
def end(
    context: typer.Context, name: Annotated[str, typer.Argument(help="Of the front end, as `sessions` shows it.")]
) -> None:
    """Ends a session: keys are void at once, channels free again. The front end may open another one, unless its
    certificate is refused (blink-gpu --refused-certificates).
    """
    with connected(context) as client:
        freed = client.close_session(name)
    when = "free" if freed else "free when its lease has run out"
    show(
        context.obj.output,
        {"ended": name, "freed": freed},
        lambda: f"ended the session of {name}; its channels are {when}",
    )
