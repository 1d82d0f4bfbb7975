"""`swell top`: the cluster, live."""

from __future__ import annotations

import contextlib
import time

import click

from swell.cli._common import connect, home_option, json_option, print_json


@click.command(epilog="\b\nExample:\n  swell top --once\n")
@click.option("--once", is_flag=True, help="Show the cluster once and return, for scripts.")
@click.option(
    "--every", type=click.FloatRange(0.2), default=1.0, show_default=True, help="Seconds between updates."
)
@json_option
@home_option
def top(once: bool, every: float, as_json: bool, home: str | None) -> None:
    """Watch nodes, jobs, slots and speed, until Ctrl-C.

    Shows the jobs of all users if the administrator's token can be read, else your own.
    """
    from rich.console import Console
    from rich.live import Live

    from swell.cli._view import Watcher, draw

    console = Console(highlight=False)
    with connect(home, prefer_admin=True) as client:
        watcher = Watcher(client)
        view = watcher.look()
        if once or as_json:
            time.sleep(1.0)  # the speed is computed from two looks
            view = watcher.look()
            if as_json:
                print_json(view.to_json())
            else:
                console.width = max(console.width, 140) if not console.is_terminal else console.width
                console.print(draw(view))
            return
        screen = Live(draw(view), console=console, screen=console.is_terminal, auto_refresh=False)
        with contextlib.suppress(KeyboardInterrupt), screen as live:
            while True:
                time.sleep(every)
                live.update(draw(watcher.look()), refresh=True)
