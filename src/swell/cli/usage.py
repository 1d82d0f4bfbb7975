"""`swell usage` and `swell replay`: what was done with the GPUs, and what other policies would have done."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from swell.cli._common import (
    DURATION,
    clean,
    connect,
    home_option,
    json_option,
    new_table,
    print_json,
    print_rich,
    say_duration,
)

if TYPE_CHECKING:
    from swell.domain import Event
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


# `swell replay`: what would have happened under other policies, or on another cluster.


REPLAY_EPILOG = """\b
Example:
  swell replay --policy tide --policy elasticflow --cluster 2x4
"""


@click.command(epilog=REPLAY_EPILOG)
@click.option("--policy", "policies", multiple=True, metavar="NAME", help="Policy to try; may be repeated.")
@click.option("--cluster", metavar="NxG", help="Another cluster, such as 8x8 [default: the real one].")
@click.option("--since", type=DURATION, help="Only jobs that were submitted within this time, such as 7d.")
@click.option(
    "--from",
    "file",
    type=click.Path(path_type=Path),
    help="Events from a file, as `swell events --json --admin` writes them.",
)
@json_option
@home_option
def replay(
    policies: tuple[str, ...],
    cluster: str | None,
    since: float | None,
    file: Path | None,
    as_json: bool,
    home: str | None,
) -> None:
    """Show from the event log what would have happened under other policies or on another cluster.

    The jobs that have ended are simulated under each policy, with the submission times and the speeds that
    were measured. The results are shown beside what really happened.
    """
    from swell.domain import Cluster
    from swell.policies import DEFAULT
    from swell.sim.replay import replay as run

    where = None if cluster is None else Cluster.parse(cluster)
    if file is None:
        with connect(home, prefer_admin=True) as client:
            events = live_events(client)
            chosen = list(policies) or [client.policy()]
    else:
        events = read_events_file(file)
        chosen = list(policies) or [DEFAULT]
    if since is not None:
        events = _recent(events, since)
    records = run(events, chosen, where)
    if as_json:
        print_json(records)
        return
    _show(records)


def live_events(client: Any) -> list[Event]:
    """All events that the control plane has, oldest first."""
    from swell.domain import Event, EventKind

    return [
        Event(e.time_s, EventKind(e.kind), job_id=e.job_id, node=e.node, data=e.data)
        for e in client.events(since=0, follow=False)
    ]


def read_events_file(file: Path) -> list[Event]:
    """The events of a file that `swell events --json` wrote."""
    from swell.domain import InputError, read_events

    try:
        with file.open() as lines:
            return list(read_events(lines))
    except OSError as error:
        raise InputError(
            f"{file}: cannot be read ({error.strerror}); 'swell events --json --admin' writes such a file",
            field="from",
        ) from error


def _recent(events: list[Event], since_s: float) -> list[Event]:
    old = {e.job_id for e in events if e.kind.value == "submitted" and e.time_s < time.time() - since_s}
    return [event for event in events if event.job_id is None or event.job_id not in old]


def _show(records: list[dict[str, Any]]) -> None:
    columns = ["policy", "cluster", "finished", "refused", "avg JCT", "p99 JCT", "deadlines met", "GPUs held"]
    table = new_table([*columns, "resizes"], right=[*columns[2:], "resizes"])
    for record in records:
        share = record["utilisation"]
        table.add_row(
            record["policy"],
            record["cluster"] + (f", {record['per_gpu']} slots per GPU" if record["per_gpu"] > 1 else ""),
            f"{record['finished']} of {record['jobs']}",
            str(record["refused"]),
            say_duration(record["avg_jct_s"]),
            say_duration(record["p99_jct_s"]),
            f"{record['deadline_met']} of {record['deadline_jobs']}" if record["deadline_jobs"] else "-",
            "-" if share is None else f"{share:.0%}",
            str(record["resizes"]),
        )
    print_rich(table)
    if records[0]["left_out"]:
        click.echo(f"{records[0]['left_out']} jobs have not ended and were left out.")
    for sentence in records[0]["assumed"]:
        click.echo(sentence)
