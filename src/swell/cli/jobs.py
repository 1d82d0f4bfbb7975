"""Commands about jobs: list them, read their output, pause, resume, bound and end them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from swell.cli._common import (
    active_jobs,
    admin_option,
    bar,
    complete_job,
    connect,
    find_job,
    follow_logs,
    home_option,
    job_argument,
    json_option,
    new_table,
    one_line,
    print_json,
    print_rich,
)
from swell.cli._terminal import add_row, output
from swell.cli._when import say_duration, say_moment
from swell.domain.words import many

if TYPE_CHECKING:
    from swell.api.schemas import JobView

PHASES = ["queued", "running", "paused", "finished", "failed", "cancelled", "refused"]


@click.command(epilog="\b\nExample:\n  swell queue --all\n")
@click.option("-a", "--all", "everything", is_flag=True, help="Also list jobs that are over.")
@click.option("--phase", type=click.Choice(PHASES), help="Only list jobs in this phase.")
@click.option(
    "-n", "--limit", type=click.IntRange(1), default=100, show_default=True, help="List at most so many jobs."
)
@admin_option
@json_option
@home_option
def queue(
    everything: bool, phase: str | None, limit: int, admin: bool, as_json: bool, home: str | None
) -> None:
    """List jobs, newest first: your own, or those of all users with --admin."""
    with connect(home, admin=admin) as client:
        if everything or phase is not None:
            jobs = client.jobs(phase=phase, limit=limit)
        else:
            jobs = active_jobs(client)[:limit]
    if as_json:
        print_json([job.model_dump(mode="json") for job in jobs])
        return
    if not jobs:
        click.echo(
            "No jobs."
            if everything
            else "No jobs are waiting or running; --all also lists jobs that are over."
        )
        return
    columns = ["job", "phase", "workers", "progress", "submitted", "finish", "resizes", "why"]
    table = new_table([*columns, "owner"] if admin else columns, right=["workers", "resizes"])
    for job in jobs:
        row = [
            job.job_id,
            job.phase.value,
            str(len(job.wanted)),
            bar(job.done, job.of),
            say_moment(job.submitted_s),
            finish(job),
            str(job.resizes),
            one_line(why(job)),
        ]
        add_row(table, *([*row, job.owner] if admin else row))
    print_rich(table)


def why(job: JobView) -> str:
    """Why a job is in its phase, or why it can have no more workers."""
    if job.reason or not job.confined or job.over:
        return job.reason
    return f"at most {many(job.most_workers or 1, 'worker')}: {job.confined}"


def finish(job: JobView) -> str:
    """When a job ended, must end or will probably end."""
    if job.ended_s is not None:
        return f"{say_moment(job.ended_s)} (took {say_duration(job.ended_s - job.submitted_s)})"
    if job.promise.guaranteed_s is not None:
        return f"by {say_moment(job.promise.guaranteed_s)}, promised"
    if job.promise.estimate.finish_s is not None:
        return f"about {say_moment(job.promise.estimate.finish_s)}"
    return "-"


@click.command(epilog="\b\nExample:\n  swell logs train\n")
@job_argument
@click.option("-f", "--follow", is_flag=True, help="Go on until the job is over.")
@admin_option
@home_option
def logs(job: str, follow: bool, admin: bool, home: str | None) -> None:
    """Show the output of a JOB (its id, the start of it, or its name)."""
    with connect(home, admin=admin) as client:
        found = find_job(client, job)
        if follow:
            follow_logs(client, found)
            return
        for text in client.logs(found):
            click.echo(output(text), nl=False)


@click.command(epilog="\b\nExample:\n  swell pause train\n")
@job_argument
@admin_option
@json_option
@home_option
def pause(job: str, admin: bool, as_json: bool, home: str | None) -> None:
    """Have a JOB save its state and give its slots back until it is resumed."""
    with connect(home, admin=admin) as client:
        changed = client.pause(find_job(client, job))
    _say(changed, as_json, f"is paused; 'swell resume {changed.job_id}' lets it go on.")


@click.command(epilog="\b\nExample:\n  swell resume train\n")
@job_argument
@admin_option
@json_option
@home_option
def resume(job: str, admin: bool, as_json: bool, home: str | None) -> None:
    """Let a paused JOB go on."""
    with connect(home, admin=admin) as client:
        changed = client.resume(find_job(client, job))
    _say(changed, as_json, "is in the queue again.")


@click.command(epilog="\b\nExample:\n  swell resize train --max 2\n")
@job_argument
@click.argument("workers", type=int, required=False)
@click.option("--min", "least", type=click.IntRange(1), help="Fewest workers [default: unchanged].")
@click.option("--max", "most", type=click.IntRange(1), help="Most workers [default: unchanged].")
@click.option("--no-max", is_flag=True, help="No upper bound.")
@admin_option
@json_option
@home_option
def resize(
    job: str, workers: int | None, least: int | None, most: int | None, no_max: bool, admin: bool,
    as_json: bool, home: str | None,
) -> None:  # fmt: skip
    """Change the number of workers of a running JOB.

    A job of `swell run` gets WORKERS workers. The scheduler chooses the number for a submitted job: bound it
    with --min and --max.
    """
    from swell.domain import InputError

    if workers is not None:
        if least is not None or most is not None or no_max:
            raise InputError(
                "give WORKERS (for a job of `swell run`) or bounds (for a submitted job), not both",
                field="workers",
            )
        from swell.cli.run import resize_run

        resize_run(job, workers)
        return
    if most is not None and no_max:
        raise InputError("give either --max or --no-max, not both", field="max")
    if least is None and most is None and not no_max:
        raise InputError(
            "give --min, --max or --no-max for a submitted job, or WORKERS for a job of `swell run`",
            field="min",
        )
    with connect(home, admin=admin) as client:
        found = find_job(client, job)
        bound = None if no_max else most if most is not None else found.request.max_workers
        lower = least if least is not None else found.request.min_workers
        changed = client.scale(found, min(lower, bound) if least is None and bound else lower, bound)
    request = changed.request
    upper = "any number of" if request.max_workers is None else f"at most {request.max_workers}"
    _say(changed, as_json, f"gets at least {request.min_workers} and {upper} workers.")


@click.command(epilog="\b\nExample:\n  swell cancel train\n  swell cancel --all --name 'lr-*' --yes\n")
@click.argument("job", required=False, shell_complete=complete_job)
@click.option("--all", "everything", is_flag=True, help="End all of your jobs that are not over.")
@click.option("--name", "pattern", metavar="PATTERN", help="With --all: only jobs of such a name, as 'lr-*'.")
@click.option("-y", "--yes", is_flag=True, help="With --all: do not ask first.")
@admin_option
@json_option
@home_option
def cancel(
    job: str | None, everything: bool, pattern: str | None, yes: bool, admin: bool, as_json: bool,
    home: str | None,
) -> None:  # fmt: skip
    """End a JOB for good, or several with --all."""
    from fnmatch import fnmatchcase

    if everything == (job is not None) or (pattern is not None and not everything):
        raise click.UsageError("give one JOB, or --all (with --name PATTERN for some of them)")
    with connect(home, admin=admin) as client:
        if job is not None:
            changed = client.cancel(find_job(client, job))
            _say(changed, as_json, "is cancelled.")
            return
        found = [one for one in active_jobs(client) if pattern is None or fnmatchcase(one.name, pattern)]
        if found and not yes:
            names = ", ".join(one.job_id for one in found[:8]) + (", ..." if len(found) > 8 else "")
            click.confirm(f"Cancel {many(len(found), 'job')} ({names})?", abort=True, err=True)
        ended = [client.cancel(one) for one in found]
    if as_json:
        print_json([one.model_dump(mode="json") for one in ended])
    elif not ended:
        click.echo("No active job fits.")
    for one in () if as_json else ended:
        _say(one, as_json, "is cancelled.")


def _say(job: JobView, as_json: bool, text: str) -> None:
    if as_json:
        print_json(job.model_dump(mode="json"))
    else:
        click.echo(f"Job {job.job_id} {text}")
