"""What would have happened: a cluster's own event log simulated with other policies or another cluster.

The log of a live cluster says when jobs were submitted, how much work they had, and how fast they were on how
many workers. That is a trace and its profiles, so the simulator can run it again with the same policies. The
costs of a start and of a resize, the time in which the speed of a new job becomes known, and how many slots
share a GPU, are taken from the log too. What the log does not say is assumed, and the first record says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.optimize import nnls

from swell.domain import ANY_GPU, NO_RESERVATIONS, NORMAL, Cluster, Event, EventKind, InputError, JobSpec
from swell.domain.words import many
from swell.perf.profiles import MeasuredCounts, ProfileSet
from swell.policies import make_policy
from swell.sim.engine import simulate
from swell.sim.explore import Exploration
from swell.sim.logged import CHANGES, ENDS, Log, read_log
from swell.sim.metrics import Result

LIVE = "what happened"
"""What the live run's record has in place of a policy's name."""
LANES_MOST = 120
"""Jobs whose lanes a record has; of more jobs evenly some."""
_LEARN_S = 2.0
_ROUNDS = 2000
"""A replay has about this many rounds, for a policy with rounds: short ones, but few enough to be quick."""


@dataclass(frozen=True, slots=True)
class _Cost:
    """The true cost of changes. The start-up of each job is in its profile."""

    pause_s: float
    extra_s: float
    """Seconds that a start costs beyond the start-up itself, such as the time to leave its last GPUs."""

    def seconds(self, state_bytes: float, before: int, after: int, startup_s: float | None = None) -> float:
        return self.pause_s if before else (startup_s or 0.0) + self.extra_s


@dataclass(frozen=True, slots=True)
class _BelievedCost:
    """The cost of changes as it was believed when jobs were submitted; the live policy planned with it."""

    startup_s: float
    pause_s: float

    def seconds(self, state_bytes: float, before: int, after: int, startup_s: float | None = None) -> float:
        return self.pause_s if before else self.startup_s


def replay(
    events: Iterable[Event], policies: Sequence[str], cluster: Cluster | None = None
) -> list[dict[str, Any]]:
    """Figures of what happened, then of each policy, on the log's own cluster or on `cluster`.

    Each GPU of `cluster` is as many slots as those of the log's cluster are.
    """
    log = read_log(events)
    if not log.jobs:
        raise InputError(
            "nothing to replay: no job in the log has ended yet; try again when one has", field="events"
        )
    if cluster is not None and log.cluster is not None:
        cluster = cluster.shared_by(log.cluster.per_gpu)
    where = cluster or log.cluster
    if where is None:
        raise InputError("the log names no nodes: say which cluster, such as 1x4", field="cluster")
    live = log.cluster or where
    cost = _costs(log, live)
    assumed = _assumed(log, cluster)
    records = [_live_record(log, live) | {"assumed": assumed, "lanes": _live_lanes(log)}]
    for policy in policies:
        seen: list[Event] = []
        result = simulate(
            _specs(log),
            _profiles(log, where),
            where,
            policy,
            interval_s=_interval_s(log, policy),
            resize_cost=cost,
            planned_cost=_believed(log),
            explore=Exploration.of(_learn_s(log, cost), (job.job_id for job in log.jobs if not job.new)),
            failures=log.failures if cluster is None else (),
            calendar=log.calendar if cluster is None else NO_RESERVATIONS,
            demand=log.demand if cluster is None else (),
            on_event=seen.append,
        )
        records.append(_record(log, result, policy, where) | {"lanes": _lanes(log, seen)})
    return records


def _assumed(log: Log, cluster: Cluster | None) -> list[str]:
    """What the log does not say and the replay assumes, in sentences for people. `cluster`: another one."""
    if log.cluster is not None and not log.says_sharing:
        return ["The log does not say whether slots share GPUs: each slot is taken for a GPU of its own."]
    if log.cluster is None or log.cluster.per_gpu == 1:
        return []
    assumed = []
    if cluster is not None:
        slots = log.cluster.per_gpu
        assumed.append(
            f"Each GPU of {_in_gpus(cluster)} is taken to be {slots} slots, as on the real cluster."
        )
    if silent := sum(not job.says_fill for job in log.jobs):
        assumed.append(
            f"The log does not say of {many(silent, 'job')} which part of a GPU's time a worker uses when it"
            " is alone there. All of it is assumed, so that jobs on one GPU slow each other. If they use"
            " less, fewer jobs on each GPU would have helped less than shown."
        )
    return assumed


def _in_gpus(cluster: Cluster) -> str:
    """A cluster as people name it: by its GPUs, of which each may be several slots."""
    return str(Cluster(tuple(replace(node, gpus=node.real_gpus, per_gpu=1) for node in cluster.nodes)))


def _live_lanes(log: Log) -> list[dict[str, Any]]:
    """How many GPUs each job really had and when, in seconds from the first submission on."""
    lanes: dict[str, list[tuple[float, int]]] = {}
    for job in log.jobs:
        assert job.end is not None
        changes = [(change.time_s - log.began_s, change.gpus) for change in job.changes]
        lanes[job.job_id] = [*changes, (job.end.time_s - log.began_s, 0)] if changes else []
    return _thinned(log, lanes)


def _lanes(log: Log, events: Iterable[Event]) -> list[dict[str, Any]]:
    """The same, as it would have been: from the events of a simulation."""
    lanes: dict[str, list[tuple[float, int]]] = {}
    for event in events:
        if event.job_id is not None and (event.kind in CHANGES or event.kind in ENDS):
            held = len(event.data.get("gpus") or ()) if event.kind in CHANGES else 0
            lanes.setdefault(event.job_id, []).append((event.time_s, held))
    return _thinned(log, lanes)


def _thinned(log: Log, lanes: Mapping[str, list[tuple[float, int]]]) -> list[dict[str, Any]]:
    """Lanes in order of submission; of many jobs evenly some, the same ones for every policy."""
    step = -(-len(log.jobs) // LANES_MOST)
    return [
        {"name": str(job.submitted.data.get("name") or job.job_id), "changes": lanes.get(job.job_id, [])}
        for job in log.jobs[::step]
    ]


def _interval_s(log: Log, policy: str) -> float | None:
    """Length of the rounds: for the log's own policy as logged, for another its own, but shorter if need be.

    They are shorter if the log is so short that it would have only few rounds.
    """
    if policy == log.policy:
        return log.round_s
    own_s = make_policy(policy).interval_s
    span_s = max(job.end.time_s for job in log.jobs if job.end is not None) - log.began_s
    return None if not own_s else min(own_s, max(1.0, span_s / _ROUNDS))


def _specs(log: Log) -> list[JobSpec]:
    specs = []
    for job in log.jobs:
        asked: Mapping[str, Any] = job.submitted.data
        submit_s, deadline_s = job.submitted.time_s - log.began_s, job.deadline_s
        relative_s = None if deadline_s is None else deadline_s - log.began_s
        specs.append(
            JobSpec(
                job_id=job.job_id,
                submit_s=submit_s,
                model=job.job_id,
                batch_size=1,
                gpus=int(asked.get("gpus") or 1),
                work=job.work,
                deadline_s=relative_s if relative_s is not None and relative_s > submit_s else None,
                min_gpus=int(asked.get("min_gpus") or 1),
                max_gpus=asked.get("max_gpus"),
                gpus_per_replica=int(asked.get("gpus_per_replica") or 1),
                weight=float(asked.get("weight") or 1.0),
                priority=str(asked.get("priority") or NORMAL),
                fill=job.fill,
            )
        )
    return specs


def _profiles(log: Log, cluster: Cluster) -> ProfileSet:
    total = sum(node.gpus for node in cluster.nodes)
    counts = np.arange(1.0, total + 1)
    kinds = {*cluster.gpu_types, ANY_GPU}
    profiles = []
    for job in log.jobs:
        curve = job.curve(total, cluster.gpus_per_node)
        tables = {kind: (counts, {1: curve[1:]}) for kind in kinds}
        profiles.append(MeasuredCounts(job.job_id, tables, model_bytes=0.0, startup_s=job.startup_s))
    return ProfileSet(profiles, "the event log")


def _costs(log: Log, cluster: Cluster) -> _Cost:
    """What changes cost beyond start-ups, by least squares from the work that jobs missed on their GPUs."""
    rows, missed, reported_s = [], [], []
    widest = max(
        [sum(n.gpus for n in cluster.nodes)] + [change.gpus for job in log.jobs for change in job.changes]
    )
    for job in log.jobs:
        assert job.end is not None
        reported_s.append(float(job.end.data.get("pause_s") or 0.0))
        curve = job.curve(widest, cluster.gpus_per_node)
        held_s = sum(one.seconds for one in job.held)
        possible = sum(curve[one.gpus] * one.seconds * one.beside for one in job.held)
        if job.end.kind is EventKind.FINISHED and job.rates and possible > 0:
            rate = possible / held_s  # dividing by it makes a slow job count as much as a fast one
            start, resize = (
                sum(curve[one.gpus] * one.beside for one in job.held if one.kind is kind) / rate
                for kind in CHANGES[:2]
            )
            rows.append([start, resize])
            missed.append(max((possible - job.work) / rate - job.startup_s * start, 0.0))
    if not rows:
        return _Cost(float(np.mean(reported_s)), 0.0)
    (extra_s, pause_s), _ = nnls(np.array(rows), np.array(missed))
    if not any(resizes for _, resizes in rows):
        pause_s = np.mean(reported_s)
    return _Cost(float(pause_s), float(extra_s))


def _believed(log: Log) -> _BelievedCost:
    startups_s = [float(job.submitted.data.get("startup_s") or job.startup_s) for job in log.jobs]
    pauses_s = [float(job.end.data.get("pause_s") or 0.0) for job in log.jobs if job.end is not None]
    return _BelievedCost(float(np.median(startups_s)), float(np.median(pauses_s)))


def _learn_s(log: Log, cost: _Cost) -> float:
    """The shortest time after which a job of unknown speed got more GPUs than it started with."""
    grown = [j for j in log.jobs if j.new and len(j.changes) > 1 and j.changes[1].gpus > j.changes[0].gpus]
    times_s = [job.changes[1].time_s - job.changes[0].time_s - job.startup_s - cost.extra_s for job in grown]
    return max(min(times_s), 0.1) if times_s else _LEARN_S


def _live_record(log: Log, cluster: Cluster) -> dict[str, Any]:
    finished = [job for job in log.jobs if job.end is not None and job.end.kind is EventKind.FINISHED]
    jct_s = np.array([job.end.time_s - job.submitted.time_s for job in finished if job.end is not None])
    held_s = sum(one.gpus * one.seconds for job in log.jobs for one in job.held)
    makespan_s = max(job.end.time_s for job in log.jobs if job.end is not None) - log.began_s
    deadlines = [job for job in log.jobs if job.deadline_s is not None]
    met = sum(job.end is not None and job.end.data.get("met") is True for job in deadlines)
    capacity = sum(node.gpus for node in cluster.nodes) * makespan_s
    return {
        "policy": f"{LIVE} ({log.policy})" if log.policy else LIVE,
        "cluster": _in_gpus(cluster),
        "per_gpu": cluster.per_gpu,
        "jobs": len(log.jobs),
        "finished": len(finished),
        "refused": sum(job.end is not None and job.end.kind is EventKind.REJECTED for job in log.jobs),
        "avg_jct_s": float(jct_s.mean()) if len(jct_s) else None,
        "p99_jct_s": float(np.percentile(jct_s, 99)) if len(jct_s) else None,
        "makespan_s": makespan_s,
        "deadline_jobs": len(deadlines),
        "deadline_met": met,
        "utilisation": held_s / capacity if capacity else None,
        "resizes": sum(job.count(EventKind.RESIZED) for job in log.jobs),
        "left_out": log.unfinished,
    }


def _record(log: Log, result: Result, policy: str, cluster: Cluster) -> dict[str, Any]:
    ended_well = {
        job.job_id
        for job in log.jobs
        if job.end is not None and job.end.kind in (EventKind.FINISHED, EventKind.REJECTED)
    }
    # A job that failed or was cancelled does so in the replay too: it holds GPUs until then, but has no JCT.
    counts = np.array([job_id in ended_well for job_id in result.job_ids]) & ~np.isnan(result.finish_s)
    jct_s = (result.finish_s - result.submit_s)[counts]
    met = (result.finish_s <= result.deadline_s)[counts & np.isfinite(result.deadline_s)]
    figures = result.record()
    return {
        "policy": policy,
        "cluster": _in_gpus(cluster),
        "per_gpu": cluster.per_gpu,
        "jobs": len(result.job_ids),
        "finished": int(counts.sum()),
        "refused": int(result.rejected.sum()),
        "avg_jct_s": float(jct_s.mean()) if len(jct_s) else None,
        "p99_jct_s": float(np.percentile(jct_s, 99)) if len(jct_s) else None,
        "makespan_s": figures["makespan_s"],
        "deadline_jobs": figures["deadline_jobs"],
        "deadline_met": int(met.sum()),
        "utilisation": figures["gpu_utilisation"],
        "resizes": figures["resizes"],
        "left_out": log.unfinished,
    }
