"""`swell top`: the cluster, live."""

from __future__ import annotations

import contextlib
import time
from importlib.util import find_spec
from typing import TYPE_CHECKING

import click

from swell.cli._common import connect, home_option, json_option, print_json, role_for
from swell.cli._when import DURATION

if TYPE_CHECKING:
    from rich.console import Console

MORE = "For lanes, curves and keys: pip install 'swell[top]'"


@click.command(epilog="\b\nExample:\n  swell top --once\n")
@click.option("--once", is_flag=True, help="Show the cluster once and return, for scripts.")
@click.option("--plain", is_flag=True, help="Only tables that are printed again and again, without keys.")
@click.option(
    "--every",
    type=DURATION,
    default="1s",
    show_default=True,
    help="Time between updates of plain tables, at least 0.2s.",
)
@json_option
@home_option
def top(once: bool, plain: bool, every: float, as_json: bool, home: str | None) -> None:
    """Watch lanes, queue and nodes live; Enter shows a job's curves, ? the keys, q ends it.

    Shows the jobs of all users if the administrator's token can be read, else your own. Without textual, or
    where the output is no terminal, plain tables are shown instead, until Ctrl-C.
    """
    from rich.console import Console

    console = Console(highlight=False)
    if once or as_json:
        _once(home, as_json, console)
    elif not plain and console.is_terminal and find_spec("textual") is not None:
        _screen(home)
    else:
        _tables(home, every, console, hint=console.is_terminal and not plain)


def _screen(home: str | None) -> None:
    """The live screen."""
    import asyncio

    from swell.api.client import AsyncClient
    from swell.cli._top.app import watch

    async def show() -> None:
        # Lost connections are the screen's own business: it says so and tries again.
        async with AsyncClient(home=home, role=role_for(home, prefer_admin=True), retry_s=0.0) as client:
            await watch(client)

    asyncio.run(show())


def _once(home: str | None, as_json: bool, console: Console) -> None:
    from swell.cli._view import Watcher, draw

    with connect(home, prefer_admin=True) as client:
        watcher = Watcher(client)
        watcher.look()
        time.sleep(1.0)  # the speed is computed from two looks
        view = watcher.look()
    if as_json:
        print_json(view.to_json())
        return
    console.width = max(console.width, 140) if not console.is_terminal else console.width
    console.print(draw(view))


def _tables(home: str | None, every: float, console: Console, *, hint: bool) -> None:
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from swell.cli._view import View, Watcher, draw

    def drawn(view: View) -> Group:
        return Group(draw(view), Text(MORE, "dim")) if hint else draw(view)

    with connect(home, prefer_admin=True) as client:
        watcher = Watcher(client)
        screen = Live(drawn(watcher.look()), console=console, screen=console.is_terminal, auto_refresh=False)
        with contextlib.suppress(KeyboardInterrupt), screen as live:
            while True:
                time.sleep(max(every, 0.2))
                live.update(drawn(watcher.look()), refresh=True)
