"""`swell submit` and `swell quote`: hand a job in, or ask what would be answered."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from swell.cli._common import connect, follow_logs, home_option, json_option, print_json
from swell.cli._when import BYTES, DEADLINE, DURATION

if TYPE_CHECKING:
    from swell.api.calls import JobOptions
    from swell.api.client import Client
    from swell.api.schemas import JobView

F = TypeVar("F", bound=Callable[..., Any])

SUBMIT_EPILOG = """\b
The script's own arguments follow its name; flags of swell stand before it. Exit codes: 0 finished (or
handed in, with -d), 1 failed or cancelled, 3 the deadline was refused.

\b
Example:
  swell submit --deadline 2h train.py --epochs 2
"""
QUOTE_EPILOG = """\b
Exit code 3: the deadline would be refused.

\b
Example:
  swell quote --deadline 2h train.py --epochs 2
"""


def job_options(command: F) -> F:
    """The flags that describe a job, for `submit` and `quote` alike."""
    flags = [
        click.option("--name", help="Name for people [default: the script's]."),
        click.option("--deadline", type=DEADLINE, help="2h, 18:30, 'tomorrow 09:00' or 2026-03-01T09:00."),
        click.option("--workdir", type=click.Path(file_okay=False), help="Where it runs [default: here]."),
        click.option("--env", multiple=True, metavar="NAME=VALUE", help="Extra environment variable."),
        click.option("--auto", is_flag=True, help="A plain PyTorch script: make it elastic."),
        click.option("--min-workers", type=click.IntRange(1), help="Least workers."),
        click.option("--max-workers", type=click.IntRange(1), help="Most workers."),
        click.option("--workers", type=click.IntRange(1), help="What policies that do not resize give it."),
        click.option("--memory", type=BYTES, help="Most memory for each worker, such as 4GiB."),
        click.option("--checkpoint", type=DURATION, help="How often its state is saved [default: 60s]."),
        click.option("--max-restarts", type=click.IntRange(0), help="After its workers died [default: 3]."),
        click.option("--pip", multiple=True, metavar="REQUIREMENT", help="Install for it (engine ray only)."),
        click.argument("script"),
        click.argument("arguments", nargs=-1, type=click.UNPROCESSED),
    ]
    for flag in reversed(flags):
        command = flag(command)
    return command


_SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}


@click.command(epilog=SUBMIT_EPILOG, context_settings=_SETTINGS)
@click.option("-d", "--detach", is_flag=True, help="Do not wait: hand it in and return.")
@job_options
@json_option
@home_option
@click.pass_context
def submit(ctx: click.Context, /, detach: bool, as_json: bool, home: str | None, **flags: Any) -> None:
    """Hand in a training SCRIPT, or a job file (.toml, .yaml). Shows the promise, then the job's output.

    Ctrl-C stops watching; the job trains on.
    """
    from swell.cli._answers import REFUSED, outcome, promise_lines

    script, options = wanted(**flags)
    with connect(home) as client:
        job = client.submit(script, **options)
        if as_json:
            job = job if detach or job.over else client.wait(job)
            print_json(job.model_dump(mode="json"))
            ctx.exit(_code(job, detach))
        if job.promise.admitted:
            click.echo(f"Job {job.job_id} is in.")
        for line in promise_lines(job.promise, job.request.deadline_s):
            click.echo(line, err=not job.promise.admitted)
        if not job.promise.admitted:
            ctx.exit(REFUSED)
        if detach:
            _next_steps(job.job_id)
            return
        if not _follow(client, home, job):
            click.echo(f"\nStopped watching; {job.job_id} trains on.")
            _next_steps(job.job_id)
            ctx.exit(130)
        job = client.job(job)
        if job.phase.value == "refused":
            for line in promise_lines(job.promise, job.request.deadline_s):
                click.echo(line, err=True)
        else:
            click.echo(outcome(job), err=job.phase.value != "finished")
        click.echo(f"\nNext:\n  swell describe {job.job_id}\n  swell logs {job.job_id}")
        ctx.exit(_code(job, detach))


@click.command(epilog=QUOTE_EPILOG, context_settings=_SETTINGS)
@job_options
@json_option
@home_option
@click.pass_context
def quote(ctx: click.Context, /, as_json: bool, home: str | None, **flags: Any) -> None:
    """Ask what submitting a SCRIPT or a job file would be answered, without submitting it."""
    from swell.cli._answers import REFUSED, promise_lines

    script, options = wanted(**flags)
    with connect(home) as client:
        promise = client.quote(script, **options)
    if as_json:
        print_json(promise.model_dump(mode="json"))
    else:
        for line in promise_lines(promise, options.get("deadline_s")) or ["It would be admitted."]:
            click.echo(line)
    ctx.exit(0 if promise.admitted else REFUSED)


def wanted(
    script: str,
    arguments: tuple[str, ...],
    name: str | None,
    deadline: float | None,
    workdir: str | None,
    env: tuple[str, ...],
    auto: bool,
    min_workers: int | None,
    max_workers: int | None,
    workers: int | None,
    memory: int | None,
    checkpoint: float | None,
    max_restarts: int | None,
    pip: tuple[str, ...],
) -> tuple[str, JobOptions]:
    """Script and options from the flags, over those of a job file where one is given."""
    from swell.cli._jobfile import SUFFIXES, read_job
    from swell.domain import InputError

    options: JobOptions = {}
    if Path(script).suffix in SUFFIXES:
        script, options = read_job(Path(script))
    else:
        where = Path(workdir or ".").absolute()
        if not (where / script).is_file():
            raise InputError(f"script: there is no file '{where / script}'", field="script")
        options["workdir"] = str(where)
        script = str(where / script)
    given: dict[str, Any] = {
        "name": name,
        "deadline_s": deadline,
        "workdir": None if workdir is None else str(Path(workdir).absolute()),
        "auto": auto or None,
        "args": list(arguments) or None,
        "env": (dict(options.get("env", {})) | _environment(env)) if env else None,
        "min_workers": min_workers,
        "max_workers": max_workers,
        "workers": workers,
        "memory_bytes": memory,
        "checkpoint_s": checkpoint,
        "max_restarts": max_restarts,
        "pip": list(pip) or None,
    }
    options.update({key: value for key, value in given.items() if value is not None})  # type: ignore[typeddict-item]
    return script, options


def _environment(pairs: tuple[str, ...]) -> dict[str, str]:
    from swell.domain import InputError

    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise InputError(f"env must be NAME=VALUE, got '{pair}'", field="env")
        found[name] = value
    return found


def _follow(client: Client, home: str | None, job: JobView) -> bool:
    """Show a job's output until it is over, with what happens to it in between; False on Ctrl-C."""
    threading.Thread(target=_tell, args=(home, job), daemon=True).start()
    try:
        follow_logs(client, job)
    except KeyboardInterrupt:
        return False
    return True


def _tell(home: str | None, job: JobView) -> None:
    """What happens to a job, on standard error, until this process ends."""
    from swell.cli._events import line
    from swell.domain import SwellError

    try:
        with connect(home) as client:
            for event in client.events(job=job, since=0):
                if event.kind not in ("submitted", "progress", "finished"):
                    text = line(event.time_s, event.kind, "--", event.data)
                    click.secho(text, err=True, dim=True)
    except SwellError:
        return  # whoever shows the output says what is wrong


def _code(job: JobView, detach: bool) -> int:
    from swell.cli._answers import REFUSED

    if job.phase.value == "refused":
        return REFUSED
    return 0 if detach or job.phase.value == "finished" else 1


def _next_steps(job_id: str) -> None:
    steps = {
        f"swell logs -f {job_id}": "its output",
        f"swell describe {job_id}": "why it is where it is, and when it will be done",
        f"swell cancel {job_id}": "end it",
        "swell top": "everything, live",
    }
    width = max(map(len, steps))
    click.echo("\nNext:\n" + "\n".join(f"  {command:<{width}}   {what}" for command, what in steps.items()))
