"""`swell generate`: a synthetic workload in swell's own format."""

from __future__ import annotations

import sys
from pathlib import Path

import click

EPILOG = """\b
Example:
  swell generate --jobs 160 --hours 8 --seed 1 --deadlines 0.5 -o jobs.csv
"""


@click.command(epilog=EPILOG)
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
