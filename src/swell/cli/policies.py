"""`swell policies`: the list of policies."""

from __future__ import annotations

import json

import click

EPILOG = """\b
Example:
  swell policies
"""


@click.command(epilog=EPILOG)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list, for programs.")
def policies(as_json: bool) -> None:
    """List the policies: paper, goal, what they know about jobs, and their options with defaults.

    An option is given behind the name: --policy pollux:p=-1
    """
    from swell.policies import described

    rows = described()
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return

    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from swell.cli._report import print_table

    table = Table(header_style="bold")
    for heading in ("policy", "goal", "paper", "knows", "options"):
        table.add_column(heading, no_wrap=heading in ("policy", "knows"))
    for row in rows:
        if "error" in row:
            table.add_row(row["name"], escape(row["error"]))
            continue
        options = ", ".join(f"{o['name']}={o['default']}" for o in row["options"])
        table.add_row(*map(escape, (row["name"], row["goal"], row["paper"], row["knows"], options)))
    print_table(table, Console(highlight=False))
