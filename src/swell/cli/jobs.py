"""Commands about jobs: list, describe, read output and events, pause, resume, bound, end."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import click

from swell.cli._common import (
    active_jobs,
    add_row,
    admin_option,
    bar,
    clean,
    complete_job,
    connect,
    estimate,
    find_job,
    follow_logs,
    home_option,
    job_argument,
    json_option,
    new_table,
    one_line,
    output,
    print_json,
    print_rich,
    say_duration,
    say_moment,
    say_until,
)
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


# `swell describe`: why a job runs or waits, when it will be done, and how it was resized.


@click.command(epilog="\b\nExample:\n  swell describe train\n")
@job_argument
@click.option("--story", is_flag=True, help="Show also what swell decided last about its workers.")
@admin_option
@json_option
@home_option
def describe(job: str, story: bool, admin: bool, as_json: bool, home: str | None) -> None:
    """Show why a JOB runs or waits, when it will be done (with a range), and how it was resized."""
    with connect(home, admin=admin) as client:
        found = find_job(client, job)
        explained = client.explain(found)
        curves = client.series(found)
        lines = client.story(found) if story else []
    if as_json:
        shown = {
            "job": found.model_dump(mode="json"),
            "explanation": explained,
            "series": curves.model_dump(mode="json"),
        }
        print_json(shown | ({"story": lines} if story else {}))
        return
    for name, value in _facts(found, explained):
        click.echo(f"{name + ':':<11} {clean(value)}")
    _curves(curves)
    _allocations(explained["allocations"], found.submitted_s)
    if story:
        click.echo("\nStory, the latest last:")
        for line in lines or ["no processes of this job are known here"]:
            click.echo(f"  {clean(line)}")
    if not found.over:
        click.echo(f"\nNext:\n  swell logs -f {found.job_id}\n  swell top")
    elif found.phase.value == "failed":
        click.echo(f"\nNext:\n  swell logs {found.job_id}")


def _facts(job: Any, explained: dict[str, Any]) -> list[tuple[str, str]]:
    from swell.api.schemas import EstimateView

    request = job.request
    facts = [
        ("Job", f"{job.job_id}, {job.phase.value}"),
        ("Script", " ".join([request.script, *request.args])),
        ("Why", explained["why"]),
    ]
    if job.wanted:
        slots, nodes = ", ".join(map(str, explained["slots"])), ", ".join(explained["nodes"])
        types = "" if len(explained["types"]) < 2 else f" ({', '.join(explained['gpu_types'])})"
        facts.append(("Workers", f"{len(job.wanted)}, on slots {slots} of {nodes}{types}"))
    facts.append(("Progress", _progress(job, explained)))
    facts.append(("Submitted", say_until(job.submitted_s)))
    if request.deadline_s is not None:
        facts.append(("Deadline", f"{say_until(request.deadline_s)}{_promised(job)}"))
    if request.weight != 1:
        facts.append(("Weight", f"counts as {request.weight} jobs, with policies that obey weights"))
    if request.priority != "normal":
        facts.append(("Priority", f"{request.priority}, among the jobs of its team"))
    if team := explained.get("team"):
        borrowed = f", {team['borrowed']} of them borrowed" if team["borrowed"] else ""
        whose = team["name"] or "none"
        facts.append(
            ("Team", f"{whose}, which has {team['used']} slots now{borrowed}; {team['own']} are its own")
        )
    if explained.get("estimate"):
        facts.append(("Estimate", estimate(EstimateView.model_validate(explained["estimate"]))))
    if job.ended_s is not None:
        facts.append(
            ("Ended", f"{say_until(job.ended_s)}, {say_duration(job.ended_s - job.submitted_s)} in all")
        )
    if job.promise.earliest_deadline_s is not None:
        facts.append(("Possible", f"{say_until(job.promise.earliest_deadline_s)} would have been promised"))
    if len(explained["types"]) > 1:
        for one in explained["types"]:
            how = "measured" if one["measured"] else "carried over from another type"
            facts.append(("Speed", f"on {one['gpu_type']}, {how}: {_rates(one['curve'])}"))
    elif explained.get("curve"):
        facts.append(("Speed", _rates(explained["curve"], explained.get("tried"))))
    pauses = f", {say_duration(job.pause_s / job.resizes)} pause each" if job.resizes else ""
    facts.append(("Resizes", f"{job.resizes}{pauses}"))
    # Why the job can have no more workers is in the line on why it runs.
    notices = [n for n in explained.get("notices", []) if not job.confined or job.confined not in n["text"]]
    facts += [("Noticed", f"{say_until(notice['time_s'])}: {notice['text']}") for notice in notices]
    if job.restarts:
        facts.append(("Restarts", f"{job.restarts} of at most {request.max_restarts}"))
    return facts


def _rates(curve: list[float], tried: list[int] | None = None) -> str:
    """A curve at 1, 2, 4 ... workers; `tried`: the numbers that it was measured with, None if not known."""
    rates = [
        f"{n}: {rate:.3g}{'' if tried is None or n in tried else ' (never tried)'}"
        for n, rate in enumerate(curve)
        if n and (n & (n - 1)) == 0
    ]
    return f"steps/s by workers {{{', '.join(rates)}}}"


def _progress(job: Any, explained: dict[str, Any]) -> str:
    expected = explained.get("expected")
    if job.of or not expected or job.over:
        return bar(job.done, job.of) + (f" ({job.done:g} of {job.of:g} steps)" if job.of else "")
    kin = (explained.get("estimate") or {}).get("source") == "kin"
    whose = "a run with other arguments" if kin else "an earlier run"
    return f"{bar(job.done, expected)} ({job.done:g} of about {expected:g} steps, as many as {whose} made)"


def _promised(job: Any) -> str:
    if job.promise.pending:
        return ", decided after a short profiling run"
    return ", promised" if job.promise.guaranteed_s is not None else ", not promised"


def _curves(series: Any) -> None:
    """Print loss and metrics over time, each as one line, from the first to the last value."""
    from swell.cli._common import figure, sparkline

    curves = {name: series.curves[name] for name in ("loss", "lr", "batch_size") if name in series.curves}
    shown = {name: [v for v in values if v is not None] for name, values in (curves | series.metrics).items()}
    shown = {name: values for name, values in shown.items() if len(values) > 1}
    if shown:
        click.echo("\nHow it trains:")
    for name, values in shown.items():
        click.echo(f"  {clean(name):<12} {sparkline(values)}  {figure(values[0])} -> {figure(values[-1])}")


def _allocations(changes: list[dict[str, Any]], submitted_s: float) -> None:
    """Print the latest changes of the job's allocation, one per line."""
    shown = changes[-12:]
    if shown:
        click.echo("\nHow it was resized:")
    if len(changes) > len(shown):
        click.echo(f"  ... {len(changes) - len(shown)} earlier changes")
    for change in shown:
        after = say_duration(change["time_s"] - submitted_s)
        workers = len(change["gpus"])
        click.echo(f"  {say_moment(change['time_s'])}  after {after:>7}  {'█' * workers or '-'} {workers}")


# `swell events`: past events, and events as they happen.


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
    from swell.cli._common import line, subject
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
