"""`swell usage`: who used how many GPU-hours, and what became of them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from swell.cli._common import connect, home_option, json_option, new_table, print_json, print_rich
from swell.cli._terminal import clean
from swell.cli._when import DURATION, say_duration

if TYPE_CHECKING:
    from swell.report.usage import By

EPILOG = """\b
Example:
  swell usage --by user --since 30d
  swell usage --by team --csv > april.csv
"""


@click.command(epilog=EPILOG)
@click.option(
    "--by",
    type=click.Choice(["user", "team", "model", "job"]),
    default="user",
    show_default=True,
    help="What a row stands for; a model is the name of a script.",
)
@click.option("--since", type=DURATION, help="Only count what was used within this time, such as 30d.")
@click.option(
    "--from",
    "file",
    type=click.Path(path_type=Path),
    help="Events from a file, as `swell events --json --admin` writes them.",
)
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV, for spreadsheets.")
@json_option
@home_option
def usage(
    by: By, since: float | None, file: Path | None, as_csv: bool, as_json: bool, home: str | None
) -> None:
    """Show how many GPU-hours were held, and how many of them were useful.

    Held hours are useful, paused (starts and resizes) or lost (failed jobs, repeated steps). Lent hours are
    those that a team held beyond its quota of today. Waited hours are a job's, not a GPU's. Without GPUs,
    slots are counted. A user sees their own jobs; with the administrator's token all jobs are counted.
    """
    from swell.cli.replay import live_events, read_events_file
    from swell.report.usage import usage as counted

    quotas: dict[str, int] = {}
    if file is None:
        with connect(home, prefer_admin=True) as client:
            events = live_events(client)
            quotas = {team.name: team.slots for team in client.teams() if team.name}
        now_s = time.time()
    else:
        events = read_events_file(file)
        now_s = max((event.time_s for event in events), default=0.0)
    rows = counted(events, by, now_s=now_s, since_s=now_s - since if since else 0.0, quotas=quotas)
    records = [row.to_json() for row in rows]
    if as_json:
        print_json(records)
    elif as_csv:
        _print_csv(by, records)
    elif not records:
        click.echo("No job held or waited for a slot" + (" in that time." if since else " yet."))
    else:
        columns = ["jobs", "held", "useful", "paused", "lost", "lent", "waited"]
        table = new_table([by, *columns], right=columns)
        for row in rows:
            useful = f"{row.useful_s / row.held_s:.0%}" if row.held_s else "-"
            hours = [f"{value / 3600:.2f}" for value in (row.paused_s, row.lost_s, row.lent_s)]
            held = f"{row.held_s / 3600:.2f}"
            table.add_row(clean(row.of), str(row.jobs), held, useful, *hours, say_duration(row.waited_s))
        print_rich(table)
        click.echo("held, paused, lost, lent: GPU-hours; waited: all jobs' waiting together.")


def _print_csv(by: str, records: list[dict[str, object]]) -> None:
    import csv
    import sys

    columns = ["jobs", "held_gpu_hours", "useful_gpu_hours", "paused_gpu_hours", "lost_gpu_hours"]
    writer = csv.writer(sys.stdout)
    writer.writerow([by, *columns, "lent_gpu_hours", "waited_hours"])
    for record in records:
        of, *figures = record.values()
        # A spreadsheet takes a name that begins like this for a formula.
        writer.writerow([f"'{of}" if str(of).startswith(("=", "+", "-", "@")) else of, *figures])
