"""The formats of traces: which columns each has, and what they mean.

    pollux       name, time, application, num_replicas, batch_size
    elasticflow  job_id, submission_time, num_iteration, model_name, deadline, batch_size, num_gpu
    elasticflow  job_id, submit_time, iteration, model_name, ddl, batch_size, num_gpu
    philly       timestamp, duration, num_gpus, cluster
    swell        job_id, submit_s, model, batch_size [, gpus, work, deadline_s, min_gpus, max_gpus,
                 gpus_per_replica, weight, user, team, priority, fill]

A reader checks every row before it makes the first job. docs/reference/simulator.md describes the formats.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from swell.domain import NORMAL, PRIORITIES, FloatArray, InputError, IntArray, JobSpec, nearest
from swell.sim.models import Models
from swell.sim.table import Table, shown

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
