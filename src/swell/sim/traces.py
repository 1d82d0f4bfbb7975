"""Reading traces: files of jobs in the formats of the Pollux and ElasticFlow artifacts, Philly, and our own.

The format is recognised by the header. Rows that cannot be simulated are refused before
anything runs, by file, line and field.
"""

from __future__ import annotations

import csv
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, TextIO

import numpy as np
import numpy.typing as npt

from swell.domain import (
    ANY_GPU,
    NORMAL,
    PRIORITIES,
    FloatArray,
    InputError,
    IntArray,
    JobSpec,
    nearest,
    packed_shape,
)
from swell.perf.profiles import Profile, ProfileSet

# A CSV file as columns. Every error message names the file, the line and the field.
#
# Columns are checked as whole arrays, so that tens of thousands of rows take well under a second; only bad
# values are looked at one by one. A row with several problems is reported with the first one found.


MAX_SHOWN = 40
"""Longer values are cut when they are quoted in a message."""


def shown(value: object) -> str:
    """A value as quoted in a message: on one line, and not too long."""
    text = repr(str(value))
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 4] + "...'"


@dataclass
class Table:
    """The rows of a file by column, and what is wrong with them."""

    path: Path
    header: list[str]
    columns: dict[str, Sequence[str]]
    lines: list[int]
    """The line of the file each row ends on."""
    problems: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Row -> (field, what is wrong), the first problem of each row."""

    def __len__(self) -> int:
        return len(self.lines)

    def refuse(self, row: int, name: str, what: str) -> None:
        """Record a problem of a row, unless the row has one already."""
        self.problems.setdefault(row, (name, what))

    def refuse_where(self, bad: npt.NDArray[np.bool_], name: str, allowed: str) -> None:
        """Record a problem of every row of a mask: its value in one field is not what is allowed."""
        for row in np.flatnonzero(bad).tolist():
            value = self.columns[name][row]
            got = "nothing" if value == "" else shown(value)
            self.refuse(row, name, f"must be {allowed}, got {got}")

    def message(self, row: int) -> str:
        """The error in a row, in one line."""
        name, what = self.problems[row]
        return f"{self.path}:{self.lines[row]}: {name}: {what}"

    def good_rows(self, *, skip_bad: bool) -> IntArray:
        """The rows without a problem; raises for the first row with one, unless `skip_bad`."""
        if self.problems and not skip_bad:
            row = min(self.problems)
            raise InputError(self.message(row), field=self.problems[row][0])
        good = np.ones(len(self), dtype=bool)
        good[list(self.problems)] = False
        return np.flatnonzero(good)

    def texts(self, name: str) -> Sequence[str]:
        """A column of texts; an empty text is a problem."""
        column = self.columns[name]
        if not all(column):
            self.refuse_where(np.array([not value for value in column]), name, "given")
        return column

    def numbers(
        self,
        name: str,
        allowed: str,
        *,
        least: float = -np.inf,
        above: float = -np.inf,
        optional: bool = False,
    ) -> FloatArray:
        """A column of finite numbers within bounds; an optional one is NaN where it is empty or absent."""
        if optional and name not in self.columns:
            return np.full(len(self), np.nan)
        column = self.columns[name]
        try:
            values = np.array(column, dtype=np.float64)
            empty = np.zeros(len(values), dtype=bool)
        except ValueError:
            values = np.array([_number(value) for value in column])
            empty = np.array([value == "" for value in column])
        with np.errstate(invalid="ignore"):
            fine = np.isfinite(values) & (values >= least) & (values > above)
        self.refuse_where(~fine & ~(empty & optional), name, allowed)
        return values

    def counts(self, name: str, *, optional: bool = False) -> FloatArray:
        """A column of whole numbers of at least 1 (written as 4 or 4.0)."""
        allowed = "a whole number of at least 1"
        values = self.numbers(name, allowed, least=1, optional=optional)
        self.refuse_where(np.isfinite(values) & (values != np.floor(values)), name, allowed)
        return values


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return np.nan


def read_header(path: Path) -> list[str]:
    """The column names of a CSV file."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            return _header(path, next(csv.reader(file), []))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        _unreadable(path, error)


def read_table(path: Path) -> Table:
    """Read a CSV file. Lines without any value are left out."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            header = _header(path, next(reader, []))
            rows: list[list[str]] = []
            lines: list[int] = []
            for row in reader:
                if row and (row[0] or any(row)):
                    rows.append(row)
                    lines.append(reader.line_num)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        _unreadable(path, error)
    wrong = {i: len(row) for i, row in enumerate(rows) if len(row) != len(header)}
    for i in wrong:
        rows[i] = (rows[i] + [""] * len(header))[: len(header)]
    columns: dict[str, Sequence[str]] = {
        name: [value.strip() for value in values] for name, values in zip(header, zip(*rows))
    }
    table = Table(path, header, columns, lines)
    for i, found in wrong.items():
        name = header[found] if found < len(header) else header[-1]
        table.refuse(i, name, f"the row has {found} values, the header names {len(header)} columns")
    return table


def _header(path: Path, row: list[str]) -> list[str]:
    header = [name.strip() for name in row]
    if not any(header):
        raise InputError(f"{path}: is empty; need a CSV file with a header line")
    twice = {name for name in header if header.count(name) > 1}
    if twice:
        raise InputError(
            f"{path}:1: column {shown(min(twice))} appears twice; remove or rename one", field=min(twice)
        )
    return header


def _unreadable(path: Path, error: Exception) -> NoReturn:
    if isinstance(error, IsADirectoryError):
        reason = "is a directory; need a CSV file"
    elif isinstance(error, FileNotFoundError):
        reason = "no such file; check the path"
    elif isinstance(error, UnicodeDecodeError):
        reason = "is not a text file; need CSV in UTF-8"
    elif isinstance(error, OSError):
        reason = f"cannot be read: {error.strerror or error}"
    else:
        reason = f"is not CSV: {error}"
    raise InputError(f"{path}: {reason}") from error


# What the trace readers and the generator need of the performance profiles: what can run, and how fast.


Menu = list[tuple[str, list[tuple[int, float]]]]
"""Models by name, each with its (batch size, rate) pairs."""


@dataclass(frozen=True, slots=True)
class Models:
    """The profiles as seen from one kind of cluster."""

    profiles: ProfileSet
    gpu_type: str
    gpus_per_node: int

    def measured(self, profile: Profile) -> bool:
        """Whether the profile was measured on the cluster's GPU type."""
        return self.gpu_type == ANY_GPU or self.gpu_type in profile.gpu_types

    def rate(self, profile: Profile, batch_size: int, gpus: int) -> float:
        """Iterations per second on packed GPUs; 0 if the job cannot run there."""
        return profile.rate(packed_shape(gpus, self.gpus_per_node), batch_size, self.gpu_type)

    def runs(self, profile: Profile, batch_size: int) -> bool:
        """Whether a job can run at that batch size on some number of GPUs up to 1,024."""
        return any(self.rate(profile, batch_size, 2**i) > 0 for i in range(11))

    def batch_sizes(self, profile: Profile, gpus: int) -> list[tuple[int, float]]:
        """The usual (batch size, rate) pairs on `gpus` GPUs: the initial batch and its doublings that run."""
        limits, found = profile.limits, []
        batch_size = limits.init_batch
        while batch_size <= limits.max_batch:
            rate = self.rate(profile, batch_size, gpus)
            if rate > 0:
                found.append((batch_size, rate))
            batch_size *= 2
        return found

    def menu(self, gpus: int) -> Menu:
        """The models that run on `gpus` GPUs, each with its batch sizes and rates."""
        known = ((name, self.profiles.get(name)) for name in self.profiles.names)
        offers = ((name, self.batch_sizes(p, gpus)) for name, p in known if self.measured(p))
        return [(name, batches) for name, batches in offers if batches]


def known_gpu_type(profiles: ProfileSet, given: str) -> str:
    """A GPU type as the profiles spell it; case does not matter."""
    for kind in profiles.gpu_types:
        if kind.lower() == given.lower():
            return kind
    known = list(profiles.gpu_types)
    raise InputError(
        f"GPU type '{given}' is not in {profiles.source}.{nearest(given, known)} Known: {', '.join(known)}",
        field="gpu-type",
    )


# The formats of traces: which columns each has, and what they mean.
#
#     pollux       name, time, application, num_replicas, batch_size
#     elasticflow  job_id, submission_time, num_iteration, model_name, deadline, batch_size, num_gpu
#     elasticflow  job_id, submit_time, iteration, model_name, ddl, batch_size, num_gpu
#     philly       timestamp, duration, num_gpus, cluster
#     swell        job_id, submit_s, model, batch_size [, gpus, work, deadline_s, min_gpus, max_gpus,
#                  gpus_per_replica, weight, user, team, priority, fill]
#
# A reader checks every row before it makes the first job. docs/reference/simulator.md describes the formats.


OWN_COLUMNS = (
    "job_id",
    "submit_s",
    "model",
    "batch_size",
    "gpus",
    "work",
    "deadline_s",
    "min_gpus",
    "max_gpus",
    "gpus_per_replica",
    "weight",
    "user",
    "team",
    "priority",
    "fill",
)


def _pollux(table: Table, models: Models, skip_bad: bool) -> list[JobSpec]:
    ids = _ids(table, "name")
    submit = table.numbers("time", "a time of at least 0 s", least=0)
    gpus = table.counts("num_replicas")
    batch = table.counts("batch_size")
    _check_models(table, models, "application", "batch_size", batch, np.full(len(table), np.nan))
    apps = table.columns["application"]
    return [
        JobSpec(
            job_id=ids[i],
            submit_s=float(submit[i]),
            model=apps[i],
            batch_size=int(batch[i]),
            gpus=int(gpus[i]),
        )
        for i in table.good_rows(skip_bad=skip_bad)
    ]


def _elasticflow(submit_name: str, iteration_name: str, deadline_name: str) -> Reader:
    """A reader for one of the two header families. Times are absolute; the first submission becomes 0."""

    def read(table: Table, models: Models, skip_bad: bool) -> list[JobSpec]:
        ids = _ids(table, "job_id")
        submit = table.numbers(submit_name, "a time of at least 0 s", least=0)
        work = table.numbers(iteration_name, "a positive number of iterations", above=0)
        deadline = table.numbers(deadline_name, "a time in seconds")
        _check_deadlines(table, deadline_name, submit, deadline)
        gpus = table.counts("num_gpu")
        batch = table.counts("batch_size")
        if "duration" in table.columns:  # not used, but a bad value means that the row cannot be trusted
            table.numbers("duration", "a positive number of seconds", above=0)
        _check_models(table, models, "model_name", "batch_size", batch, work)
        rows = table.good_rows(skip_bad=skip_bad)
        start = float(submit[rows].min()) if len(rows) else 0.0
        names = table.columns["model_name"]
        return [
            JobSpec(
                job_id=ids[i],
                submit_s=float(submit[i]) - start,
                model=names[i],
                batch_size=int(batch[i]),
                gpus=int(gpus[i]),
                work=float(work[i]),
                deadline_s=float(deadline[i]) - start,
            )
            for i in rows
        ]

    return read


def read_philly(
    table: Table, models: Models, skip_bad: bool, seed: int = 0, cluster_id: str | None = None
) -> list[JobSpec]:
    """Read a Philly trace. It names no models, so each job gets a random one, and its iterations from that.

    The iterations are those that the model makes in the job's duration. The random draw depends on the seed
    and the row of the file, so that a job is the same whichever other rows are kept.
    """
    submit = _timestamps(table, "timestamp")
    duration = table.numbers("duration", "a positive number of seconds", above=0)
    gpus = table.counts("num_gpus")
    clusters = np.array(table.texts("cluster"))
    draws = np.random.default_rng(seed).random((len(table), 2))
    if cluster_id is not None:
        keep = clusters == cluster_id
        if not keep.any():
            known = sorted(set(table.columns["cluster"]))
            raise InputError(
                f"{table.path}: no cluster '{cluster_id}'.{nearest(cluster_id, known)}"
                f" There are: {', '.join(known[:20])}",
                field="cluster-id",
            )
        table.problems = {row: what for row, what in table.problems.items() if keep[row]}
    else:
        keep = np.ones(len(table), dtype=bool)

    menus = {
        int(count): models.menu(int(count))
        for count in np.unique(gpus[keep & np.isfinite(gpus) & (gpus >= 1)])
    }
    for count, menu in menus.items():
        if not menu:
            what = "a number of GPUs on which one of the profiles can run"
            table.refuse_where(keep & (gpus == count), "num_gpus", what)
    rows = table.good_rows(skip_bad=skip_bad)
    rows = rows[keep[rows]]
    start = float(submit[rows].min()) if len(rows) else 0.0
    jobs = []
    for i, at, seconds, count, (u, v) in zip(
        rows.tolist(),
        (submit[rows] - start).tolist(),
        duration[rows].tolist(),
        gpus[rows].astype(int).tolist(),
        draws[rows].tolist(),
    ):
        menu = menus[count]
        model, batches = menu[int(u * len(menu))]
        batch_size, rate = batches[int(v * len(batches))]
        jobs.append(
            JobSpec(
                job_id=f"philly-{i}",
                submit_s=at,
                model=model,
                batch_size=batch_size,
                gpus=count,
                work=seconds * rate,
            )
        )
    return jobs


def _own(table: Table, models: Models, skip_bad: bool) -> list[JobSpec]:
    unknown = [name for name in table.header if name not in OWN_COLUMNS]
    if unknown:
        hint = nearest(unknown[0], list(OWN_COLUMNS))
        raise InputError(
            f"{table.path}:1: unknown column {shown(unknown[0])}.{hint} Known: {', '.join(OWN_COLUMNS)}",
            field=unknown[0],
        )
    ids = _ids(table, "job_id")
    submit = table.numbers("submit_s", "a time of at least 0 s", least=0)
    batch = table.counts("batch_size")
    gpus = table.counts("gpus", optional=True)
    work = table.numbers("work", "a positive number of iterations, or empty", above=0, optional=True)
    deadline = table.numbers("deadline_s", "a time in seconds, or empty", optional=True)
    _check_deadlines(table, "deadline_s", submit, deadline)
    least = np.nan_to_num(table.counts("min_gpus", optional=True), nan=1.0)
    most = table.counts("max_gpus", optional=True)
    table_most = np.isfinite(most) & (most < least)
    if table_most.any():
        table.refuse_where(table_most, "max_gpus", "at least min_gpus")
    replica = np.nan_to_num(table.counts("gpus_per_replica", optional=True), nan=1.0)
    weight = table.numbers("weight", "a positive number, or empty", above=0, optional=True)
    none = [""] * len(table)
    user, team = table.columns.get("user", none), table.columns.get("team", none)
    priority = [given or NORMAL for given in table.columns.get("priority", none)]
    wrong = np.array([given not in PRIORITIES for given in priority], dtype=np.bool_)
    table.refuse_where(wrong, "priority", f"{', '.join(PRIORITIES)}, or empty")
    allowed = "more than 0 and at most 1, or empty"
    fill = table.numbers("fill", allowed, above=0, optional=True)
    table.refuse_where(fill > 1, "fill", allowed)
    _check_models(table, models, "model", "batch_size", batch, work)
    names = table.columns["model"]
    return [
        JobSpec(
            job_id=ids[i],
            submit_s=float(submit[i]),
            model=names[i],
            batch_size=int(batch[i]),
            gpus=1 if np.isnan(gpus[i]) else int(gpus[i]),
            work=_optional(work[i]),
            deadline_s=_optional(deadline[i]),
            min_gpus=int(least[i]),
            max_gpus=None if np.isnan(most[i]) else int(most[i]),
            gpus_per_replica=int(replica[i]),
            weight=1.0 if np.isnan(weight[i]) else float(weight[i]),
            user=user[i],
            team=team[i],
            priority=priority[i],
            fill=1.0 if np.isnan(fill[i]) else float(fill[i]),
        )
        for i in table.good_rows(skip_bad=skip_bad)
    ]


Reader = Callable[[Table, Models, bool], list[JobSpec]]


@dataclass(frozen=True, slots=True)
class Format:
    """A kind of trace, known by the columns it must have."""

    name: str
    required: tuple[str, ...]
    read: Reader


_FORMATS = (
    Format("pollux", ("name", "time", "application", "num_replicas", "batch_size"), _pollux),
    Format(
        "elasticflow",
        ("job_id", "submission_time", "num_iteration", "model_name", "deadline", "batch_size", "num_gpu"),
        _elasticflow("submission_time", "num_iteration", "deadline"),
    ),
    Format(
        "elasticflow",
        ("job_id", "submit_time", "iteration", "model_name", "ddl", "batch_size", "num_gpu"),
        _elasticflow("submit_time", "iteration", "ddl"),
    ),
    Format("philly", ("timestamp", "duration", "num_gpus", "cluster"), read_philly),
    Format("swell", ("job_id", "submit_s", "model", "batch_size"), _own),
)


def detect_format(path: Path, header: list[str]) -> Format:
    """The format whose columns are all in the header; else an error names what the nearest format lacks."""
    names = set(header)
    for kind in _FORMATS:
        if names.issuperset(kind.required):
            return kind
    near = max(_FORMATS, key=lambda kind: len(names.intersection(kind.required)) / len(kind.required))
    missing = [name for name in near.required if name not in names]
    if len(missing) * 2 <= len(near.required):
        raise InputError(
            f"{path}:1: missing column '{missing[0]}'; a {near.name} trace has {', '.join(near.required)}",
            field=missing[0],
        )
    kinds = ", ".join(dict.fromkeys(kind.name for kind in _FORMATS))
    raise InputError(
        f"{path}:1: not the header of a trace: {shown(','.join(header))};"
        f" known formats are {kinds} (swell's own has the columns {', '.join(OWN_COLUMNS)})"
    )


# --- checks ----------------------------------------------------------------------------------------------


def _optional(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def _ids(table: Table, name: str) -> list[str]:
    """The column of job names; a name that appears twice is refused."""
    ids = list(table.texts(name))
    if len(set(ids)) < len(ids):
        first: dict[str, int] = {}
        for row, job_id in enumerate(ids):
            if first.setdefault(job_id, row) != row:
                line = table.lines[first[job_id]]
                table.refuse(row, name, f"{shown(job_id)} is already the job on line {line}")
    return ids


def _check_deadlines(table: Table, name: str, submit: FloatArray, deadline: FloatArray) -> None:
    with np.errstate(invalid="ignore"):
        late = deadline <= submit
    if late.any():
        for row in np.flatnonzero(late).tolist():
            given = shown(table.columns[name][row])
            what = f"the deadline must be after the submission at {submit[row]:.12g} s, got {given}"
            table.refuse(row, name, what)


def _check_models(
    table: Table, models: Models, model_name: str, batch_name: str, batch: FloatArray, work: FloatArray
) -> None:
    """Refuse rows whose model is unknown, cannot run at its batch size, or has no length of its own."""
    names = table.texts(model_name)
    verdicts: dict[tuple[str, float, bool], tuple[str, str] | None] = {}
    for row, key in enumerate(zip(names, batch.tolist(), np.isnan(work).tolist())):
        if row in table.problems:
            continue
        if key not in verdicts:
            verdicts[key] = _model_problem(models, model_name, batch_name, *key)
        verdict = verdicts[key]
        if verdict is not None:
            table.refuse(row, *verdict)


def _model_problem(
    models: Models, model_name: str, batch_name: str, model: str, batch: float, whole: bool
) -> tuple[str, str] | None:
    try:
        profile = models.profiles.get(model)
    except InputError as error:
        return model_name, str(error)
    if not models.measured(profile):
        types = ", ".join(profile.gpu_types)
        return model_name, f"'{model}' was not measured on GPU type '{models.gpu_type}', only on {types}"
    if whole and profile.epochs is None:
        return model_name, f"the profile of '{model}' gives no length in epochs, so the job must say its work"
    if not models.runs(profile, int(batch)):
        return batch_name, f"'{model}' cannot run at a batch size of {int(batch)} on any number of GPUs"
    return None


def _timestamps(table: Table, name: str) -> FloatArray:
    """A column of moments such as 2017-10-09 07:01:55, as seconds."""
    column = table.columns[name]
    try:
        moments = np.array(column, dtype="datetime64[s]")
    except ValueError:
        moments = np.array([_moment(text) for text in column])
    table.refuse_where(np.isnat(moments), name, "a moment such as 2017-10-09 07:01:55")
    seconds: IntArray = moments.astype(np.int64)
    return seconds.astype(np.float64)


def _moment(text: str) -> np.datetime64:
    try:
        return np.datetime64(text, "s")
    except ValueError:
        return np.datetime64("NaT", "s")


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
