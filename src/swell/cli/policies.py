"""`swell policies`: the list of policies."""

from __future__ import annotations

import json
from typing import Any

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
    from swell.policies import policy_names

    rows = [_describe(name) for name in policy_names()]
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


def _describe(name: str) -> dict[str, Any]:
    from swell.policies import options_of, policy_class

    try:
        cls = policy_class(name)
    except Exception as error:  # a broken plug-in must not break the whole list
        return {"name": name, "error": f"cannot be loaded: {error}"}
    return {
        "name": name,
        "paper": cls.paper,
        "goal": cls.goal,
        "knows": cls.knows,
        "adaptive_batch": cls.adaptive_batch,
        "interval_s": cls.interval_s,
        "options": [
            {"name": option, "type": kind.__name__, "default": default}
            for option, (kind, default) in options_of(cls).items()
        ],
    }
