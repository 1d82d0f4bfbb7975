"""`swell simulate`: run traces under policies and compare the results."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from swell.cli._when import INTERVAL

if TYPE_CHECKING:
    from swell.cli._runner import Run, Source
    from swell.domain import Cluster
    from swell.perf.profiles import ProfileSet

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

    from swell.cli._outputs import check_writable
    from swell.cli._report import print_table, results_table
    from swell.cli._runner import Run
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
        Run(
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


def _named_apart(sources: dict[Path, Source]) -> list[Source]:
    """The traces, called by their paths if two have the same name."""
    if len({source.trace.name for source in sources.values()}) == len(sources):
        return list(sources.values())
    return [replace(one, trace=replace(one.trace, name=str(path))) for path, one in sources.items()]


def _run(
    runs: list[Run], processes: int | None, html_path: Path | None, err: Any, *, keep_events: bool
) -> list[dict[str, Any]]:
    """Run all, with a display of how far they are, and write the report that is asked for."""
    from swell.cli._report import Display
    from swell.cli._runner import processors, run_all

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
) -> Source:
    """Read a trace with the profiles that go with it."""
    from swell.cli._runner import Source
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
    return Source(
        trace=trace,
        profiles=profiles,
        profiles_from="built-in" if found is None else str(found),
        cluster=cluster.shared_by(per_gpu),
        gpu_type=",".join(cluster.gpu_types),
    )


def _with_known_types(cluster: Cluster, profiles: ProfileSet) -> Cluster:
    """The cluster with its GPU types as the profiles spell them."""
    from swell.sim.models import known_gpu_type

    kinds = {kind: known_gpu_type(profiles, kind) for kind in cluster.gpu_types}
    return replace(cluster, nodes=tuple(replace(n, gpu_type=kinds[n.gpu_type]) for n in cluster.nodes))


def _announce(sources: list[Source], err: Any) -> None:
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


def _warn(runs: list[Run], records: list[dict[str, Any]], err: Any) -> None:
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
    pairs: list[tuple[Source, str]], events_path: Path | None, html_path: Path | None
) -> list[Path | None]:
    """The event log of each run; if only a page is wanted, a file beside the page until that is made."""
    wanted = events_path
    if wanted is None and html_path is not None:
        wanted = html_path.with_name(f".{html_path.name}.jsonl")
    return [_events_path(wanted, source, policy, several=len(pairs) > 1) for source, policy in pairs]


def _write_html(runs: list[Run], path: Path) -> None:
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


def _events_path(path: Path | None, source: Source, policy: str, *, several: bool) -> Path | None:
    """The file for the events of one run."""
    if path is None or not several:
        return path
    words = re.sub(r"[^\w.=-]+", "-", f"{source.trace.name}.{policy}")
    return path.with_name(f"{path.stem}.{words}{path.suffix}")
