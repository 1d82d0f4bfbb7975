"""`swell events`: past events, and events as they happen."""

from __future__ import annotations

import contextlib

import click

from swell.cli._common import admin_option, connect, find_job, home_option


@click.command(epilog="\b\nExample:\n  swell events --job train\n")
@click.option("-f", "--follow", is_flag=True, help="Then show new events as they happen, until Ctrl-C.")
@click.option("--job", help="Only show events of this job.")
@click.option("--since", type=click.IntRange(0), default=0, help="Number of the last event already seen.")
@click.option("-n", "--last", type=click.IntRange(1), help="Only show the last so many events.")
@click.option(
    "--json", "as_json", is_flag=True, help="One JSON object per line, as `swell replay` reads them."
)
@admin_option
@home_option
def events(
    follow: bool, job: str | None, since: int, last: int | None, as_json: bool, admin: bool, home: str | None
) -> None:
    """Show the events of your jobs and of nodes, oldest first; with --admin of the jobs of all users."""
    from collections import deque

    from swell.api.schemas import EventView
    from swell.cli._events import line, subject
    from swell.domain import Event, EventKind

    def show(event: EventView) -> None:
        if as_json:
            kind = EventKind(event.kind)
            plain = Event(event.time_s, kind, job_id=event.job_id, node=event.node, data=event.data)
            click.echo(plain.to_json())
        else:
            about = subject(event.job_id, event.node, event.data)
            click.echo(line(event.time_s, event.kind, about, event.data))

    with connect(home, admin=admin) as client:
        only = None if job is None else find_job(client, job)
        past = deque(client.events(job=only, since=since, follow=False), maxlen=last)
        for event in past:
            show(event)
        with contextlib.suppress(KeyboardInterrupt):
            if not follow:
                return
            for event in client.events(job=only, since=past[-1].seq if past else since):
                show(event)
