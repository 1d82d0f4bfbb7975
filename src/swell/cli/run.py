"""`swell run`, and `swell resize` of its jobs: an elastic job on this machine."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from swell.cli._common import DURATION
from swell.cli.submit import F, ScriptCommand, flag, launched, note_misplaced, variables
from swell.domain import InputError, JobRequest
from swell.domain.request import FIELDS, not_python
from swell.domain.words import many

# What happens to a job under `swell run`, in lines: who joined, left or died, and a summary at the end.


class Story:
    """Turns the events of a job's history into lines for people."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._members: list[str] = []
        self._before: list[str] = []
        self._step = 0
        self._begin_s: float | None = None
        self._since_s = 0.0
        self._worker_s = 0.0
        self._sizes: list[int] = []
        self._deaths = 0
        self._pauses: list[float] = []
        self._told_dead: set[str] = set()

    def tell(self, event: Mapping[str, Any]) -> str | None:
        """The line for an event, or None if it says nothing new."""
        kind = event["event"]
        if kind == "generation":
            return self._generation(event)
        if kind in ("switch", "recovery"):
            return self._changed(event, died=kind == "recovery")
        if kind == "confined" and event.get("workers", 1) > 1:
            return f"at most {event['workers']} workers from now on: {event['reason']}"
        if kind == "straggler" and event.get("link"):
            worker, times = event["worker"], event["times"]
            return f"the links to {worker} were {times:.1f} times slower than the others' and it is replaced"
        if kind == "straggler":
            return f"{event['worker']} was {event['times']:.1f} times slower than the others and is replaced"
        if kind == "exited" and event.get("code") == 75 and event["worker"] not in self._members:
            return f"{event['worker']} is started again"
        return None

    def summary(self, now_s: float, code: int) -> str:
        """The last line: how long, how far, and what was survived."""
        if self._begin_s is None:
            return "it never trained"
        self._count(now_s)
        took_s = max(now_s - self._begin_s, 1e-9)
        least, most = min(self._sizes), max(self._sizes)
        sizes = many(most, "worker")
        if least < most:
            sizes = f"{least} to {sizes} ({self._worker_s / took_s:.1f} on average)"
        parts = [f"{'done' if code == 0 else 'ended'} after {took_s:.1f} s of training", sizes]
        if len(self._sizes) > 1:
            parts.append(f"{many(len(self._sizes) - 1, 'change')} of membership")
        if self._deaths:
            parts.append(f"{many(self._deaths, 'death')} survived")
        if self._pauses:
            parts.append(f"{1000 * sum(self._pauses):.0f} ms paused in all")
        return ", ".join(parts)

    def _generation(self, event: Mapping[str, Any]) -> str | None:
        self._count(event["time_s"])
        self._before, self._members = self._members, [str(m) for m in event["members"]]
        self._sizes.append(len(self._members))
        self._step = int(event.get("step") or 0)
        if self._begin_s is None:
            self._begin_s = self._since_s = event["time_s"]
            where = f" from step {self._step}" if self._step else ""
            return f"training{where} with {many(len(self._members), 'worker')}: {', '.join(self._members)}"
        if self._before and not set(self._before) & set(self._members):  # nobody was left to recover
            self._deaths += len(self._before)
            where = f"goes on from step {self._step}" if self._step else "begins again"
            return f"{', '.join(self._before)} died; training {where} with {', '.join(self._members)}"
        return None

    def _changed(self, event: Mapping[str, Any], *, died: bool) -> str:
        gone = [m for m in self._before if m not in self._members]
        came = [m for m in self._members if m not in self._before]
        pause_s = float(event.get("pause_s") or 0.0)
        self._pauses.append(pause_s)
        self._deaths += len(gone) if died else 0
        what = [f"{', '.join(gone)} {'died' if died else 'left'}"] if gone else []
        what += [f"{', '.join(came)} joined"] if came else []
        how = "recovered in" if died else "paused for"
        told = "; ".join(what) or "the workers met again"
        size = many(len(self._members), "worker")
        return f"{told}; {how} {1000 * pause_s:.0f} ms, {size} at step {int(event.get('step') or self._step)}"

    def _count(self, now_s: float) -> None:
        if self._begin_s is not None:
            self._worker_s += len(self._members) * (now_s - self._since_s)
            self._since_s = now_s


RUNTIME = [field for field in FIELDS.values() if field.about.for_runtime]
"""The fields of a job that `swell run` has flags for too: the settings of the training runtime."""


def runtime_options(command: F) -> F:
    """Add a flag for each setting of the runtime."""
    for field in reversed(RUNTIME):
        command = flag(field)(command)
    return command


def _workers(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    try:
        minimum = int(low)
        maximum = int(high) if high else minimum
    except ValueError:
        raise click.BadParameter(f"got {text!r}, must be a number or MIN:MAX, for example 1:4") from None
    if not 1 <= minimum <= maximum:
        raise click.BadParameter(f"got {text!r}, must be MIN:MAX with 1 <= MIN <= MAX")
    return minimum, maximum


@click.command(cls=ScriptCommand)
@click.option(
    "--workers",
    default=None,
    metavar="MIN:MAX",
    help="How many workers the job may have [default: 1; with --auto 1 up to the cores, at most 4].",
)
@click.option("--start", type=int, default=None, help="Workers to begin with [default: MAX].")
@click.option("--name", default=None, help="Name of the job [default: made from the script's name].")
@click.option("--spares", type=click.IntRange(0), default=0, help="Prepared workers to keep waiting.")
@click.option("--threads", type=click.IntRange(1), default=None, help="CPU threads for each worker.")
@click.option(
    "--silent-after",
    type=DURATION,
    default="5s",
    show_default=True,
    help="Give a worker up after this long without a sign of life.",
)
@runtime_options
@click.option("--cold", is_flag=True, help="Start workers as new processes, not by forking a prepared one.")
@click.option("--quiet", is_flag=True, help="Do not show the workers' output.")
@click.argument("script", type=click.Path(dir_okay=False))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def run(
    ctx: click.Context,
    /,
    workers: str | None,
    start: int | None,
    name: str | None,
    spares: int,
    threads: int | None,
    silent_after: float,
    cold: bool,
    quiet: bool,
    script: str,
    arguments: tuple[str, ...],
    **flags: Any,
) -> None:
    """Run SCRIPT elastically on this machine.

    \b
    Example:
      swell run --workers 1:4 --start 2 --name digits train.py --epochs 10
      swell run --auto -- torchrun --nproc-per-node 8 train_ddp.py
      swell resize digits 3        (from a second terminal)
    """
    from swell.train.agent.errors import TrainError
    from swell.train.agent.launcher import Launcher
    from swell.train.agent.run_config import RunConfig

    if workers is None:
        least = flags["workers_per_replica"] or 1
        workers = f"1:{min(os.cpu_count() or 1, 4)}" if flags["auto"] else str(least)
    minimum, maximum = _workers(workers)
    try:
        line = launched({"script": script, "arguments": arguments, **flags})
    except InputError as error:
        raise click.UsageError(str(error)) from None
    script, arguments = line["script"], line["arguments"]
    note_misplaced(ctx, script, arguments)
    settings = {field.name: flags[field.spoken] for field in RUNTIME if flags[field.spoken]}
    if settings.get("command") and not Path(script).is_file():
        script = shutil.which(script) or script
    try:
        settings = JobRequest(name="job", script=script, **settings).for_runtime()
    except InputError as error:
        raise click.UsageError(str(error)) from None
    if not settings.get("command") and Path(script).is_file():
        with Path(script).open("rb") as file:
            if why := not_python(script, file.read(256)):
                raise click.UsageError(why)
    try:
        config = RunConfig(
            script=script,
            arguments=list(arguments),
            minimum=minimum,
            maximum=maximum,
            workers=start,
            spares=spares,
            name=name,
            silent_after_s=silent_after,
            threads=threads or _threads_asked(),
            cold=cold,
            env=variables(line.get("env", ())),
            settings=settings,
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from None

    def say(line: str) -> None:
        if not quiet or not line.startswith("w"):
            click.echo(line)

    try:
        launcher = Launcher(config, say)
    except TrainError as error:
        raise click.ClickException(str(error)) from None
    begun = config.workers or maximum
    more = f"; change that with `swell resize {launcher.name} N`, N from {minimum} to {maximum}"
    click.echo(f"job {launcher.name}: {begun} worker{'s' * (begun != 1)}{more if maximum > minimum else ''}")
    story, told = Story(launcher.name), 0

    def tell() -> None:
        nonlocal told
        events = launcher.job.events()
        for event in events[told:]:
            if line := story.tell(event):
                click.echo(f"job {launcher.name}: {line}")
        told = len(events)

    changed = _Changed(launcher.job.path / "events.jsonl")
    code = launcher.run(lambda: tell() if changed() else None)
    tell()
    if quiet and launcher.failure:  # otherwise the traceback was among its worker's lines
        click.echo(launcher.failure)
    click.echo(f"job {launcher.name}: {story.summary(time.time(), code)}")
    ctx.exit(code)


class _Changed:
    """Whether a file has grown since the last call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._bytes = 0

    def __call__(self) -> bool:
        try:
            size = self._path.stat().st_size
        except OSError:
            return False
        before, self._bytes = self._bytes, size
        return size != before


def _threads_asked() -> int | None:
    """The threads that a person has set for programs of this shell, if any."""
    text = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(text) if text.isdigit() and int(text) > 0 else None


def resize_run(job: str, workers: int) -> None:
    """Change the number of workers of a running job of `swell run`, found by its whole name."""
    from swell.train.agent.client import JobClient
    from swell.train.agent.errors import TrainError
    from swell.train.agent.jobdir import JobDirectory

    try:
        JobDirectory.find(job)
    except TrainError as error:
        raise click.ClickException(f"{error}; bound a submitted job with --min and --max") from None
    try:
        with JobClient.find(job) as client:
            client.resize(workers)
    except OSError:
        ends = [e for e in JobDirectory.find(job).events() if e["event"] == "finish"]
        why = f"is over: {ends[-1]['reason']}" if ends else "does not answer; it is starting, or was killed"
        raise click.ClickException(
            f"job {job!r} {why}; start it again with `swell run --name {job} ...`"
        ) from None
    except TrainError as error:
        raise click.ClickException(str(error)) from None
    click.echo(f"job {job}: {workers} workers wanted")
