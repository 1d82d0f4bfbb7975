"""`swell replay`: what would have happened under other policies, or on another cluster."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from swell.cli._common import connect, home_option, json_option, new_table, print_json, print_rich
from swell.cli._when import DURATION, say_duration

if TYPE_CHECKING:
    from swell.domain import Event

EPILOG = """\b
Example:
  swell replay --policy tide --policy elasticflow --cluster 2x4
"""


@click.command(epilog=EPILOG)
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
