"""`swell demo`: the platform in three minutes, with real jobs."""

from __future__ import annotations

import sys

import click


@click.command(epilog="\b\nExample:\n  swell demo --no-dashboard\n")
@click.option(
    "--dashboard/--no-dashboard",
    default=None,
    help="Open the live page in a browser [default: if this is a terminal].",
)
@click.pass_context
def demo(ctx: click.Context, dashboard: bool | None) -> None:
    """Run real training jobs on four CPU slots of this machine: they swell and ebb, a promise is kept.

    Takes about two minutes, in a temporary home, and leaves nothing behind.
    """
    from importlib.util import find_spec

    from swell.domain import SwellError

    for module in ("torch", "fastapi", "sklearn"):
        if find_spec(module) is None:
            raise SwellError(f"the demo needs {module}: pip install 'swell[demo]'")

    from swell.cli._demo import run

    ctx.exit(run(sys.stdout.isatty() if dashboard is None else dashboard))
