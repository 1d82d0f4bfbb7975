"""`swell describe`: why a job runs or waits, when it will be done, and how it was resized."""

from __future__ import annotations

from typing import Any

import click

from swell.cli._common import (
    admin_option,
    bar,
    connect,
    find_job,
    home_option,
    job_argument,
    json_option,
    print_json,
)
from swell.cli._terminal import clean
from swell.cli._when import say_duration, say_moment, say_until


@click.command(epilog="\b\nExample:\n  swell describe train\n")
@job_argument
@admin_option
@json_option
@home_option
def describe(job: str, admin: bool, as_json: bool, home: str | None) -> None:
    """Show why a JOB runs or waits, when it will be done (with a range), and how it was resized."""
    with connect(home, admin=admin) as client:
        found = find_job(client, job)
        explained = client.explain(found)
        curves = client.series(found)
    if as_json:
        print_json(
            {
                "job": found.model_dump(mode="json"),
                "explanation": explained,
                "series": curves.model_dump(mode="json"),
            }
        )
        return
    for name, value in _facts(found, explained):
        click.echo(f"{name + ':':<11} {clean(value)}")
    _curves(curves)
    _allocations(explained["allocations"], found.submitted_s)
    if not found.over:
        click.echo(f"\nNext:\n  swell logs -f {found.job_id}\n  swell top")
    elif found.phase.value == "failed":
        click.echo(f"\nNext:\n  swell logs {found.job_id}")


def _facts(job: Any, explained: dict[str, Any]) -> list[tuple[str, str]]:
    from swell.api.schemas import EstimateView
    from swell.cli._answers import estimate

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
