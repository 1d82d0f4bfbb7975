"""Reading traces: files of jobs in the formats of the Pollux and ElasticFlow artifacts, Philly, and our own.

The format is recognised by the header (see `formats`). Rows that cannot be simulated are refused before
anything runs, by file, line and field.
"""

from __future__ import annotations

import csv
import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from swell.domain import ANY_GPU, InputError, JobSpec
from swell.perf.profiles import ProfileSet
from swell.sim.formats import OWN_COLUMNS, detect_format, read_philly
from swell.sim.models import Models
from swell.sim.table import Table, read_header, read_table


@dataclass(frozen=True, slots=True)
class Trace:
    """The jobs of a file, in order of submission."""

    name: str
    jobs: list[JobSpec]
    format: str
    skipped: int = 0
    """The number of bad rows that were left out, if that was allowed."""
    first_skipped: str = ""
    """The problem of the first bad row."""


def trace_format(path: Path) -> str:
    """The name of a file's format, recognised by its header."""
    return detect_format(path, read_header(path)).name


def sibling_profiles(path: Path) -> Path | None:
    """The measured profiles that were published with a trace, if they are beside it; else None."""
    kind = trace_format(path)
    folder = path.resolve().parent
    if kind == "pollux":
        for place in (folder.parent / "profiles", folder / "profiles"):
            if next(place.glob("*/placements.csv"), None) is not None:
                return place
    if kind == "elasticflow" and next(folder.glob("throughputs_*/*.csv"), None) is not None:
        return folder
    return None


def load_trace(
    path: Path,
    profiles: ProfileSet,
    *,
    seed: int = 0,
    cluster_id: str | None = None,
    gpu_type: str = ANY_GPU,
    gpus_per_node: int = 4,
    skip_bad_rows: bool = False,
    limit: int | None = None,
) -> Trace:
    """Read the jobs of a file; a bad row is an InputError, or is counted if `skip_bad_rows`.

    `seed`, `gpu_type` and `gpus_per_node` matter only for a trace that names no models (Philly): each job
    then gets a random model, and the work that the model does in the job's duration on its GPUs.
    """
    path = Path(path)
    with _uncollected():
        return _load(path, profiles, seed, cluster_id, gpu_type, gpus_per_node, skip_bad_rows, limit)


def _load(
    path: Path,
    profiles: ProfileSet,
    seed: int,
    cluster_id: str | None,
    gpu_type: str,
    gpus_per_node: int,
    skip_bad_rows: bool,
    limit: int | None,
) -> Trace:
    table = read_table(path)
    kind = detect_format(path, table.header)
    if not len(table):
        raise InputError(f"{path}: has a header but no rows; 'swell generate' writes a trace")
    if cluster_id is not None and kind.name != "philly":
        raise InputError(
            f"{path}: a cluster id was given, but only philly traces have one; leave it out for {kind.name}",
            field="cluster-id",
        )
    models = Models(profiles, gpu_type, gpus_per_node)
    if kind.name == "philly":
        jobs = read_philly(table, models, skip_bad_rows, seed, cluster_id)
    else:
        jobs = kind.read(table, models, skip_bad_rows)
    if not jobs:
        raise InputError(f"{path}: no job is left; all {len(table.problems)} rows are bad: {_first(table)}")
    jobs.sort(key=_by_submission)
    return Trace(
        name=path.stem if cluster_id is None else f"{path.stem}/{cluster_id}",
        jobs=jobs[:limit],
        format=kind.name,
        skipped=len(table.problems),
        first_skipped=_first(table),
    )


@contextmanager
def _uncollected() -> Iterator[None]:
    """Switch garbage collection off: it would look at every row again and again and find nothing to free."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def fitting_gpu_type(path: Path, profiles: ProfileSet) -> str:
    """The default GPU type: the first one of the profiles on which every job of a file can run."""
    types = profiles.gpu_types
    if len(types) > 1 and trace_format(path) != "philly":  # philly names no models: any type will do
        skipped = {}
        for kind in types:
            try:
                skipped[kind] = load_trace(path, profiles, gpu_type=kind, skip_bad_rows=True).skipped
            except InputError:
                continue
            if skipped[kind] == 0:
                break
        if skipped:
            return min(skipped, key=lambda kind: skipped[kind])
    return types[0]


def write_jobs(jobs: Iterable[JobSpec], file: TextIO) -> None:
    """Write jobs in our own format; what `load_trace` reads back is equal to them."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(OWN_COLUMNS)
    for job in jobs:
        values = (getattr(job, name) for name in OWN_COLUMNS)
        writer.writerow("" if value is None else value for value in values)


def _by_submission(job: JobSpec) -> float:
    return job.submit_s


def _first(table: Table) -> str:
    return table.message(min(table.problems)) if table.problems else ""
