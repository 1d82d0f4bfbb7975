"""`swell simulate`, `swell generate` and `swell policies`: traces under policies, compared."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from swell.cli._common import INTERVAL

if TYPE_CHECKING:
    from swell.domain import Cluster, Event, Teams
    from swell.perf.profiles import ProfileSet
    from swell.policies.by_user import UserLimits
    from swell.sim import ResizeCost
    from swell.sim.traces import Trace


EPILOG = """\b
Example:
  swell generate --jobs 100 --seed 1 --deadlines 0.5 -o jobs.csv
  swell simulate jobs.csv --cluster 8x4 --policy elasticflow --policy tiresias
"""


@click.command(epilog=EPILOG)
@click.argument("traces", nargs=-1, required=True, metavar="TRACE...", type=click.Path(path_type=Path))
@click.option(
    "--cluster", required=True, metavar="NxG", help="N nodes of G GPUs: 16x4, 16x4:t4, or a list with commas."
)
@click.option(
    "--per-gpu",
    default=1,
    show_default=True,
    metavar="N",
    type=click.IntRange(min=1),
    help="Slots of each GPU, for several small jobs on one GPU; see the column fill of traces.",
)
@click.option(
    "--policy",
    "policies",
    required=True,
    multiple=True,
    metavar="NAME",
    help="Name of a policy, with options behind a colon (pollux:p=-1). Give it again to compare.",
)
@click.option(
    "--interval",
    type=INTERVAL,
    help="Time between decisions, such as 60s; 0 decides at every event.  [default: the policy's own]",
)
@click.option(
    "--resize-cost",
    default="30",
    show_default=True,
    metavar="S",
    help="Seconds a job stands still when its GPUs change, or 'model' for a cost by the job's size.",
)
@click.option(
    "--seed", default=0, show_default=True, type=click.IntRange(min=0), help="Seed of all random choices."
)
@click.option(
    "--profiles",
    "profiles_path",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="How fast models train.  [default: profiles beside the trace, else those that come with swell]",
)
@click.option("--gpu-type", metavar="NAME", help="Type of the GPUs, as the profiles name it (A100, T4).")
@click.option(
    "--belief",
    type=click.Choice(["profiles", "fitted"]),
    help="What policies know about the speed of jobs: the truth, or a model fitted on what was seen."
    "  [default: the policy's own]",
)
@click.option(
    "--autoscale",
    metavar="OPTIONS",
    help="Rent the nodes of the cluster as they are worth it, such as price=3,start=120,spot=6,budget=40.",
)
@click.option(
    "--blind-to-types", is_flag=True, help="Treat all GPUs of a mixed cluster as if they were of one type."
)
@click.option(
    "--teams",
    metavar="NAME=SLOTS",
    help="Quotas of the teams that the trace names, such as vision=8,speech=4.",
)
@click.option(
    "--slots-per-user",
    metavar="N",
    type=click.IntRange(1),
    help="Most slots of a user's running jobs together, for the users that the trace names.",
)
@click.option(
    "--running-per-user",
    metavar="N",
    type=click.IntRange(1),
    help="Most jobs of a user that run at a time, for the users that the trace names.",
)
@click.option("--cluster-id", metavar="ID", help="Only the jobs of this virtual cluster (Philly traces).")
@click.option("--limit", metavar="N", type=click.IntRange(min=1), help="Only the first N jobs of each trace.")
@click.option("--skip-bad-rows", is_flag=True, help="Leave out rows that cannot be read, and count them.")
@click.option(
    "-j",
    "--jobs",
    "processes",
    metavar="N",
    type=click.IntRange(min=1),
    help="Simulations to run at once, as with make.  [default: one per processor]",
)
@click.option(
    "--json",
    "json_path",
    metavar="FILE",
    help="Also write the figures as a JSON list; - for standard output.",
)
@click.option(
    "--events",
    "events_path",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Also write all events, one per line. Of several runs each gets its own FILE.TRACE.POLICY.",
)
@click.option(
    "--html",
    "html_path",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Also write a report as one page to share, with the GPUs of each job over time.",
)
def simulate(
    traces: tuple[Path, ...],
    cluster: str,
    per_gpu: int,
    policies: tuple[str, ...],
    interval: float | None,
    resize_cost: str,
    seed: int,
    profiles_path: Path | None,
    gpu_type: str | None,
    belief: str | None,
    autoscale: str | None,
    blind_to_types: bool,
    teams: str | None,
    slots_per_user: int | None,
    running_per_user: int | None,
    cluster_id: str | None,
    limit: int | None,
    skip_bad_rows: bool,
    processes: int | None,
    json_path: str | None,
    events_path: Path | None,
    html_path: Path | None,
) -> None:
    """Run traces under one or more policies and compare.

    A TRACE is a CSV file in swell's own format, or in that of the Pollux, ElasticFlow or Philly traces; the
    header tells which. Every trace runs under every policy.
    """
    from rich.console import Console

    from swell.cli._report import print_table, results_table
    from swell.cli.report import check_writable
    from swell.domain import Cluster, Teams
    from swell.policies import make_policy
    from swell.policies.by_user import UserLimits
    from swell.sim import parse_cloud, parse_cost

    cost = parse_cost(resize_cost)
    largest = Cluster.parse(cluster).shared_by(per_gpu)
    if autoscale is not None:
        parse_cloud(autoscale, largest)
    quotas = Teams.parse(teams or "")
    quotas.check_fits(largest.capacity)
    policies = tuple(dict.fromkeys(policies))
    for policy in policies:
        make_policy(policy)
    for path in (None if json_path == "-" else json_path, events_path, html_path):
        if path is not None:
            check_writable(Path(path))

    sources = _named_apart(
        {
            path: _load(
                path, cluster, per_gpu, profiles_path, gpu_type, seed, cluster_id, skip_bad_rows, limit
            )
            for path in traces
        }
    )
    limits = UserLimits(slots=slots_per_user, running=running_per_user)
    for job in (job for source in sources for job in source.trace.jobs):
        limits.check_fits(job)
    pairs = [(source, policy) for source in sources for policy in policies]
    runs = [
        SimulatedRun(
            source=source,
            policy=policy,
            cluster_text=cluster,
            interval_s=interval,
            resize_cost=cost,
            seed=seed,
            belief=belief,
            autoscale=autoscale,
            blind_to_types=blind_to_types,
            teams=quotas,
            user_limits=limits,
            events=log,
        )
        for (source, policy), log in zip(pairs, _logs(pairs, events_path, html_path))
    ]

    err = Console(stderr=True, highlight=False)
    _announce(sources, err)
    records = _run(runs, processes, html_path, err, keep_events=events_path is not None)
    out = err if json_path == "-" else Console(highlight=False)
    print_table(results_table(records, out), out)
    _warn(runs, records, err)
    if json_path is not None:
        _write_json(records, json_path)


def _named_apart(sources: dict[Path, TraceSource]) -> list[TraceSource]:
    """The traces, called by their paths if two have the same name."""
    if len({source.trace.name for source in sources.values()}) == len(sources):
        return list(sources.values())
    return [replace(one, trace=replace(one.trace, name=str(path))) for path, one in sources.items()]


def _run(
    runs: list[SimulatedRun], processes: int | None, html_path: Path | None, err: Any, *, keep_events: bool
) -> list[dict[str, Any]]:
    """Run all, with a display of how far they are, and write the report that is asked for."""
    from swell.cli._report import Display

    display = Display([run.title for run in runs], [len(run.source.trace.jobs) for run in runs], err)
    try:
        records = run_all(
            runs, processes=processes or processors(), on_start=display.start, on_progress=display.update
        )
        if html_path is not None:
            _write_html(runs, html_path)
    finally:
        display.stop()
        if not keep_events:
            for run in runs:
                if run.events is not None:
                    run.events.unlink(missing_ok=True)
    return records


def _write_json(records: list[dict[str, Any]], path: str) -> None:
    """Write the figures to a file, or to standard output for '-'."""
    text = json.dumps(records, indent=2, allow_nan=False) + "\n"
    if path == "-":
        click.echo(text, nl=False)
    else:
        Path(path).write_text(text, encoding="utf-8")


def _load(
    path: Path,
    cluster_text: str,
    per_gpu: int,
    profiles_path: Path | None,
    gpu_type: str | None,
    seed: int,
    cluster_id: str | None,
    skip_bad_rows: bool,
    limit: int | None,
) -> TraceSource:
    """Read a trace with the profiles that go with it."""
    from swell.domain import ANY_GPU, Cluster
    from swell.perf.profiles import ProfileSet
    from swell.sim.traces import fitting_gpu_type, load_trace, sibling_profiles

    found = profiles_path or sibling_profiles(path)
    profiles = ProfileSet.load(found)
    cluster = Cluster.parse(cluster_text, gpu_type or ANY_GPU)
    if cluster.gpu_types == (ANY_GPU,):
        cluster = Cluster.parse(cluster_text, fitting_gpu_type(path, profiles))
    cluster = _with_known_types(cluster, profiles)
    trace = load_trace(
        path,
        profiles,
        seed=seed,
        cluster_id=cluster_id,
        gpu_type=cluster.gpu_types[0],
        gpus_per_node=cluster.gpus_per_node,
        skip_bad_rows=skip_bad_rows,
        limit=limit,
    )
    return TraceSource(
        trace=trace,
        profiles=profiles,
        profiles_from="built-in" if found is None else str(found),
        cluster=cluster.shared_by(per_gpu),
        gpu_type=",".join(cluster.gpu_types),
    )


def _with_known_types(cluster: Cluster, profiles: ProfileSet) -> Cluster:
    """The cluster with its GPU types as the profiles spell them."""
    from swell.sim.traces import known_gpu_type

    kinds = {kind: known_gpu_type(profiles, kind) for kind in cluster.gpu_types}
    return replace(cluster, nodes=tuple(replace(n, gpu_type=kinds[n.gpu_type]) for n in cluster.nodes))


def _announce(sources: list[TraceSource], err: Any) -> None:
    """Print which traces were read, and which profiles are used for them."""
    from swell.domain.words import many

    for source in sources:
        trace = source.trace
        skipped = ""
        if trace.skipped:
            skipped = f"; skipped {many(trace.skipped, 'bad row')}, the first: {trace.first_skipped}"
        err.print(
            f"{trace.name}: {len(trace.jobs):,} jobs ({trace.format}), profiles: {source.profiles_from}"
            f" ({source.gpu_type}){skipped}",
            markup=False,
            soft_wrap=True,
        )


def _warn(runs: list[SimulatedRun], records: list[dict[str, Any]], err: Any) -> None:
    """Print which runs ended with unfinished jobs."""
    for run, record in zip(runs, records):
        left = record["jobs"] - record["finished"] - record["rejected"]
        if left:
            err.print(
                f"{run.title}: {left:,} jobs never finished: the policy gave them no GPUs they can run on",
                markup=False,
                soft_wrap=True,
            )


def _logs(
    pairs: list[tuple[TraceSource, str]], events_path: Path | None, html_path: Path | None
) -> list[Path | None]:
    """The event log of each run; if only a page is wanted, a file beside the page until that is made."""
    wanted = events_path
    if wanted is None and html_path is not None:
        wanted = html_path.with_name(f".{html_path.name}.jsonl")
    return [_events_path(wanted, source, policy, several=len(pairs) > 1) for source, policy in pairs]


def _write_html(runs: list[SimulatedRun], path: Path) -> None:
    """The report on all runs, those of one trace side by side."""
    from swell.cli.report import write_report
    from swell.domain import read_events
    from swell.report.runs import Run as Reported

    groups: dict[str, list[Reported]] = {}
    for run in runs:
        assert run.events is not None
        with run.events.open(encoding="utf-8") as lines:
            reported = Reported.read(run.policy, read_events(lines))
        groups.setdefault(f"{run.source.trace.name}: {len(run.source.trace.jobs):,} jobs", []).append(
            reported
        )
    write_report([], path, f"Simulated on {runs[0].cluster_text}", groups=list(groups.items()))


def _events_path(path: Path | None, source: TraceSource, policy: str, *, several: bool) -> Path | None:
    """The file for the events of one run."""
    if path is None or not several:
        return path
    words = re.sub(r"[^\w.=-]+", "-", f"{source.trace.name}.{policy}")
    return path.with_name(f"{path.stem}.{words}{path.suffix}")


# Several simulations at once, in processes that report their progress and end with their parent.
#
# A single run is done in this process. For more runs, processes are forked before any thread starts. Each
# has a pipe: the number of a run goes in; progress and at the end a record come out. The pipe of a process
# that is killed is closed, so the parent never waits in vain.


Progress = Callable[[int, float, int, int], None]
"""Called with the number of the run, simulated seconds, jobs ended and jobs in all."""

_REPORT_EVERY_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSource:
    """A trace, with the profiles and the cluster it runs on."""

    trace: Trace
    profiles: ProfileSet
    profiles_from: str
    cluster: Cluster
    gpu_type: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """One trace under one policy."""

    source: TraceSource
    policy: str
    cluster_text: str
    interval_s: float | None
    resize_cost: ResizeCost
    seed: int
    belief: str | None
    autoscale: str | None = None
    """Options of the autoscaler, if there is one."""
    blind_to_types: bool = False
    teams: Teams
    user_limits: UserLimits
    events: Path | None = None

    @property
    def title(self) -> str:
        """The name of the run for people."""
        return f"{self.source.trace.name} {self.policy}"

    def execute(self, on_progress: Callable[[float, int, int], None] | None = None) -> dict[str, Any]:
        """Simulate, and return the figures as a record."""
        from swell.sim import parse_cloud
        from swell.sim import simulate as simulated

        cluster, cloud = self.source.cluster, None
        if self.autoscale is not None:
            cloud = parse_cloud(self.autoscale, cluster, self.seed)
        with _event_file(self.events) as on_event:
            result = simulated(
                self.source.trace.jobs,
                self.source.profiles,
                cluster,
                self.policy,
                interval_s=self.interval_s,
                resize_cost=self.resize_cost,
                seed=self.seed,
                belief=self.belief,
                cloud=cloud,
                blind_to_types=self.blind_to_types,
                teams=self.teams,
                user_limits=self.user_limits,
                on_event=on_event,
                on_progress=on_progress,
            )
        figures = {key: _plain(value) for key, value in result.record().items()}
        named = {"trace": self.source.trace.name, "policy": self.policy, "cluster": self.cluster_text}
        settings = {
            "seed": self.seed,
            "interval_s": self.interval_s,
            "profiles": self.source.profiles_from,
            "gpu_type": self.source.gpu_type,
            "per_gpu": self.source.cluster.per_gpu,
            "autoscale": self.autoscale,
            "teams": self.teams.quotas or None,
            "slots_per_user": self.user_limits.slots,
            "running_per_user": self.user_limits.running,
            "skipped_rows": self.source.trace.skipped,
        }
        return {**named, **{k: v for k, v in figures.items() if k not in named}, **settings}


def run_all(
    runs: Sequence[SimulatedRun], *, processes: int, on_start: Callable[[], None], on_progress: Progress
) -> list[dict[str, Any]]:
    """Do all runs, at most `processes` at a time, and return their records in the same order.

    `on_start` is called once the processes are forked: from then on threads may be started.
    """
    try:
        if min(processes, len(runs)) == 1:
            on_start()
            return [_one(run, index, on_progress) for index, run in enumerate(runs)]
        return _in_workers(runs, min(processes, len(runs)), on_start, on_progress)
    finally:
        for run in runs:
            if run.events is not None:
                _unfinished(run.events).unlink(missing_ok=True)


def processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _one(run: SimulatedRun, index: int, on_progress: Progress) -> dict[str, Any]:
    record = run.execute(_seldom(partial(on_progress, index)))
    _over(index, record, on_progress)
    return record


def _over(index: int, record: dict[str, Any], on_progress: Progress) -> None:
    on_progress(index, record["makespan_s"] or 0.0, record["jobs"], record["jobs"])


def _in_workers(
    runs: Sequence[SimulatedRun], count: int, on_start: Callable[[], None], on_progress: Progress
) -> list[dict[str, Any]]:
    context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    records: dict[int, dict[str, Any]] = {}
    waiting = iter(range(len(runs)))
    busy: dict[Connection, int] = {}
    workers: dict[Connection, BaseProcess] = {}
    try:
        for _ in range(count):
            ours, theirs = context.Pipe()
            worker = context.Process(target=_work, args=(theirs, runs), daemon=True)
            worker.start()
            theirs.close()
            workers[ours] = worker
        on_start()
        for pipe in workers:
            _hand_out(pipe, waiting, busy)
        while busy:
            ready: list[Any] = wait(list(busy))
            for pipe in ready:
                try:
                    kind, content = pipe.recv()
                except (EOFError, OSError):
                    workers[pipe].join(timeout=5)
                    _died(runs[busy[pipe]], workers[pipe].exitcode)
                if kind == "progress":
                    on_progress(busy[pipe], *content)
                elif kind == "record":
                    index = busy.pop(pipe)
                    records[index] = content
                    _over(index, content, on_progress)
                    _hand_out(pipe, waiting, busy)
                elif kind == "refused":
                    raise content
                else:
                    raise RuntimeError(f"{runs[busy[pipe]].title} failed:\n{content}")
    finally:
        for worker in workers.values():
            worker.terminate()
        for pipe, worker in workers.items():
            worker.join(timeout=5)
            pipe.close()
    return [records[index] for index in range(len(runs))]


def _hand_out(pipe: Connection, waiting: Iterator[int], busy: dict[Connection, int]) -> None:
    index = next(waiting, None)
    if index is not None:
        pipe.send(index)
        busy[pipe] = index


def _died(run: SimulatedRun, exitcode: int | None) -> NoReturn:
    from swell.domain import SwellError

    how = f"was killed by signal {-exitcode}" if exitcode is not None and exitcode < 0 else "ended early"
    raise SwellError(
        f"the process simulating {run.title} {how}; out of memory? Try fewer at once with --jobs 1"
    )


def _work(pipe: Connection, runs: Sequence[SimulatedRun]) -> None:
    """The main function of a process: do the runs that the parent asks for, until the pipe is closed."""
    from swell.domain import InputError

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted too, and ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def report(now_s: float, ended: int, jobs: int) -> None:
        pipe.send(("progress", (now_s, ended, jobs)))

    while True:
        try:
            index = pipe.recv()
            try:
                answer: tuple[str, Any] = ("record", runs[index].execute(_seldom(report)))
            except InputError as error:
                answer = ("refused", InputError(str(error), field=error.field))
            except BrokenPipeError:
                raise
            except Exception:
                answer = ("failed", traceback.format_exc())
            pipe.send(answer)
        except (EOFError, OSError):
            return


def _seldom(report: Callable[[float, int, int], None]) -> Callable[[float, int, int], None]:
    """The same function, called at most every `_REPORT_EVERY_S` seconds."""
    due = 0.0

    def maybe(now_s: float, ended: int, jobs: int) -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + _REPORT_EVERY_S
            report(float(now_s), int(ended), int(jobs))

    return maybe


@contextmanager
def _event_file(path: Path | None) -> Iterator[Callable[[Event], None] | None]:
    """A function that writes events to a file, which gets its name only when it is complete."""
    if path is None:
        yield None
        return
    with _unfinished(path).open("w", encoding="utf-8") as file:

        def write(event: Event) -> None:
            file.write(event.to_json() + "\n")

        yield write
    _unfinished(path).replace(path)


def _unfinished(path: Path) -> Path:
    return path.with_name(path.name + ".part")


def _plain(value: Any) -> Any:
    """The value for JSON: None in place of infinity and NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


# `swell generate`: a synthetic workload in swell's own format.


GENERATE_EPILOG = """\b
Example:
  swell generate --jobs 160 --hours 8 --seed 1 --deadlines 0.5 -o jobs.csv
"""


@click.command(epilog=GENERATE_EPILOG)
@click.option("--jobs", default=160, show_default=True, metavar="N", type=int, help="How many jobs.")
@click.option(
    "--hours", default=8.0, show_default=True, metavar="H", help="Time over which they are submitted."
)
@click.option("--seed", default=0, show_default=True, metavar="N", help="The same seed gives the same file.")
@click.option(
    "--deadlines", default=0.0, show_default=True, metavar="SHARE", help="Share of the jobs with a deadline."
)
@click.option(
    "--max-gpus",
    default=32,
    show_default=True,
    metavar="N",
    help="Most GPUs that a job asks for; usually the size of the cluster.",
)
@click.option(
    "--max-gpu-hours",
    default=1000.0,
    show_default=True,
    metavar="H",
    help="Largest size of a job, in GPU-hours.",
)
@click.option(
    "--start-hour", default=3.0, show_default=True, metavar="H", help="Hour of the day at which they begin."
)
@click.option(
    "--profiles",
    "profiles_path",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Models to draw from.  [default: those that come with swell]",
)
@click.option("--teams", metavar="A,B", help="Names of teams; each job is of one of them, at random.")
@click.option("--users", metavar="A,B", help="Names of users; each job is of one of them, at random.")
@click.option(
    "--fill",
    default="1:1",
    show_default=True,
    metavar="LOW:HIGH",
    help="Which part of a GPU each worker uses alone, at random between these; see simulate --per-gpu.",
)
@click.option("--gpu-type", metavar="NAME", help="Type of the GPUs that run times refer to.")
@click.option(
    "-o", "--output", default="-", metavar="FILE", help="Where to write.  [default: standard output]"
)
def generate(
    jobs: int,
    hours: float,
    seed: int,
    deadlines: float,
    max_gpus: int,
    max_gpu_hours: float,
    start_hour: float,
    profiles_path: Path | None,
    teams: str | None,
    users: str | None,
    fill: str,
    gpu_type: str | None,
    output: str,
) -> None:
    """Write a synthetic workload with the statistics of real clusters.

    Sizes, GPU counts and arrivals by hour of day follow the Philly trace, deadlines follow ElasticFlow.
    """
    from swell.domain import ANY_GPU, InputError, Team
    from swell.perf.profiles import ProfileSet
    from swell.sim.generate import generate_jobs
    from swell.sim.traces import write_jobs

    specs = generate_jobs(
        ProfileSet.load(profiles_path),
        jobs=jobs,
        hours=hours,
        seed=seed,
        deadlines=deadlines,
        max_gpus=max_gpus,
        max_gpu_hours=max_gpu_hours,
        start_hour=start_hour,
        gpu_type=gpu_type or ANY_GPU,
        teams=[Team(name=name.strip(), slots=0).name for name in (teams or "").split(",") if name.strip()],
        users=[name.strip() for name in (users or "").split(",") if name.strip()],
        fill=_range(fill),
    )
    if output == "-":
        write_jobs(specs, sys.stdout)
        return
    try:
        with Path(output).open("w", encoding="utf-8", newline="") as file:
            write_jobs(specs, file)
    except OSError as error:
        raise InputError(
            f"{output}: cannot be written ({error.strerror}); give another --output", field="output"
        ) from error
    deadline_jobs = sum(spec.deadline_s is not None for spec in specs)
    click.echo(f"{output}: {len(specs):,} jobs over {hours:g} h, {deadline_jobs:,} with a deadline", err=True)


def _range(text: str) -> tuple[float, float]:
    """The two numbers of LOW:HIGH; one number alone is both."""
    from swell.domain import InputError

    low, _, high = text.partition(":")
    try:
        return float(low), float(high or low)
    except ValueError:
        raise InputError(
            f"fill must be LOW:HIGH, two numbers of more than 0 and at most 1 such as 0.1:0.4, got '{text}'",
            field="fill",
        ) from None


# `swell policies`: the list of policies.


POLICIES_EPILOG = """\b
Example:
  swell policies
"""


@click.command(epilog=POLICIES_EPILOG)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list, for programs.")
def policies(as_json: bool) -> None:
    """List the policies: paper, goal, what they know about jobs, and their options with defaults.

    An option is given behind the name: --policy pollux:p=-1
    """
    from swell.policies import described

    rows = described()
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
