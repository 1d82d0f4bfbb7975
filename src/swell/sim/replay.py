"""Replays a cluster's own event log with other policies or on another cluster.

The log of a live cluster has when jobs were submitted, how much work they had, and how fast they were on how
many workers. That is a trace and its profiles, so the simulator can run it again with the same policies. The
costs of a start and of a resize, the time in which the speed of a new job becomes known, and how many slots
share a GPU, are taken from the log too. What the log lacks is assumed, and listed in the first record.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import nnls

from swell.domain import (
    ANY_GPU,
    NO_RESERVATIONS,
    NORMAL,
    Calendar,
    Cluster,
    Event,
    EventKind,
    FloatArray,
    InputError,
    JobSpec,
    Node,
    Placement,
    Reservation,
)
from swell.domain.events import was_withdrawn
from swell.domain.words import many
from swell.perf.belief import JobBelief
from swell.perf.profiles import MeasuredCounts, ProfileSet
from swell.policies import make_policy
from swell.sim.capacity import DemandChange, NodeFailure
from swell.sim.engine import Exploration, simulate
from swell.sim.metrics import SimulationResult
from swell.sim.workload import SharedGpus

# A cluster's event log, sorted by job and node, for replays.
#
# Where slots share GPUs, a job's speed was measured beside its neighbours of that time. The log says who
# they were. From that and from the jobs' fills we compute how fast each job would have been alone, by the
# rule that simulated jobs follow (`sim.sharing`).


ENDS = (EventKind.FINISHED, EventKind.FAILED, EventKind.CANCELLED, EventKind.REJECTED)
CHANGES = (EventKind.ALLOCATED, EventKind.RESIZED, EventKind.PREEMPTED)


class GpuChange(NamedTuple):
    time_s: float
    placement: Placement
    """The job's GPUs from then on."""
    kind: EventKind

    @property
    def gpus(self) -> int:
        return len(self.placement)


class HeldPeriod(NamedTuple):
    """A period in which a job held GPUs."""

    gpus: int
    seconds: float
    beside: float
    """How fast the job was beside its neighbours on these GPUs, relative to workers alone on their GPUs."""
    kind: EventKind
    """The state at its beginning."""


@dataclass(slots=True)
class LoggedJob:
    """One job, as recorded in the log."""

    job_id: str
    submitted: Event
    changes: list[GpuChange] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    """For each change: the speed beside neighbours until the next; empty where slots share no GPUs."""
    end: Event | None = None

    @property
    def has_fill(self) -> bool:
        """Whether the log has the part of a GPU's time that a worker of the job uses alone."""
        return bool(self.submitted.data.get("fill"))

    @property
    def fill(self) -> float:
        """That part, or all of it if the log does not have it."""
        return float(self.submitted.data.get("fill") or 1.0)

    @property
    def held(self) -> list[HeldPeriod]:
        """The periods in which the job held GPUs."""
        assert self.end is not None
        ends = [*(change.time_s for change in self.changes[1:]), self.end.time_s]
        beside = self.beside or [1.0] * len(ends)
        return [
            HeldPeriod(change.gpus, until - change.time_s, speed, change.kind)
            for change, until, speed in zip(self.changes, ends, beside)
            if change.gpus
        ]

    @property
    def rates(self) -> dict[int, float]:
        """Iterations per second, by number of workers that are each alone on a GPU.

        They were measured beside the neighbours that the job had then; what those cost it is undone.
        """
        assert self.end is not None
        made_s, held_s = dict[int, float](), dict[int, float]()
        for gpus, seconds, beside, _ in self.held:
            made_s[gpus] = made_s.get(gpus, 0.0) + seconds * beside
            held_s[gpus] = held_s.get(gpus, 0.0) + seconds
        measured = {int(n): float(rate) for n, rate in (self.end.data.get("rates") or {}).items()}
        return {
            n: rate * held_s[n] / made_s[n] if made_s.get(n) else rate
            for n, rate in measured.items()
            if rate > 0
        }

    @property
    def work(self) -> float:
        """Iterations that the job did or, if it never reported progress, the seconds it held GPUs.

        A second beside neighbours counts as much as the job was slower than alone.
        """
        assert self.end is not None
        work = float(self.end.data.get("work") or 0.0)
        if work > 0 and (self.rates or self.end.data.get("params")):
            return work
        return sum(one.seconds * one.beside for one in self.held)

    @property
    def startup_s(self) -> float:
        """Measured seconds from getting GPUs to the first step; 0 for a job that never reported progress.

        The work of such a job is the time in which it held GPUs, which includes its start.
        """
        assert self.end is not None
        return float(self.end.data.get("startup_s") or 0.0) if self.rates else 0.0

    @property
    def deadline_s(self) -> float | None:
        """The job's deadline; None if it has none or a person cancelled it."""
        deadline_s = self.submitted.data.get("deadline_s")
        withdrawn = self.end is not None and was_withdrawn(self.end)
        return None if deadline_s is None or withdrawn else float(deadline_s)

    @property
    def new(self) -> bool:
        """Whether the job's speed was unknown at its submission; jobs with a deadline are profiled first."""
        return (
            self.submitted.data.get("source") != "history" and self.submitted.data.get("deadline_s") is None
        )

    def count(self, kind: EventKind) -> int:
        """The number of events of this kind for the job."""
        return sum(change.kind is kind for change in self.changes)

    def curve(self, max_gpus: int, gpus_per_node: int) -> FloatArray:
        """Iterations per second on 0 to `max_gpus` GPUs: the job's model, corrected by measured rates."""
        assert self.end is not None
        counts = np.arange(max_gpus + 1, dtype=np.float64)
        rates, params = self.rates, self.end.data.get("params")
        if params is None and not rates:
            return np.minimum(counts, 1.0)
        if params is None:
            seen = np.array(sorted(rates), dtype=np.float64)
            curve = np.interp(counts, seen, [rates[int(n)] for n in seen])
            return np.where(counts < seen[0], curve * counts / seen[0], curve)
        curve = np.array(JobBelief.from_figures(self.end.data).curve(max_gpus, gpus_per_node))
        ratios = {n: rates[n] / curve[n] for n in sorted(rates) if n <= max_gpus and curve[n] > 0}
        if ratios:
            at, ratio = np.log2(list(ratios)), list(ratios.values())
            curve[1:] *= np.interp(np.log2(counts[1:]), at, ratio)
        return curve


@dataclass(frozen=True, slots=True)
class Log:
    """The content of a log: the jobs that ended, the nodes, and the failures of nodes."""

    jobs: list[LoggedJob]
    unfinished: int
    """The number of jobs that have not ended yet and so cannot be replayed."""
    cluster: Cluster | None
    failures: list[NodeFailure]
    policy: str
    """The policy of the last submission."""
    round_s: float | None = None
    """Length of that policy's rounds."""
    calendar: Calendar = NO_RESERVATIONS
    """Reservations, in seconds since the first submission."""
    demand: tuple[DemandChange, ...] = ()
    has_sharing: bool = True
    """Whether the log has for all nodes how many of their slots share a GPU."""

    @property
    def began_s(self) -> float:
        """The time of the first submission."""
        return min(job.submitted.time_s for job in self.jobs)


def read_log(events: Iterable[Event]) -> Log:
    """Sort an event log by job and node."""
    jobs: dict[str, LoggedJob] = {}
    nodes = _Nodes()
    policy, round_s = "", None
    most: dict[str, int] = {}
    held: dict[str, list[tuple[float, int]]] = {}
    for event in events:
        if event.node is not None:
            nodes.follow(event)
        elif event.kind is EventKind.RESERVED:
            most[event.data["reservation"]] = int(event.data.get("most") or 0)
        elif event.kind is EventKind.HELD:
            held.setdefault(event.data["reservation"], []).append((event.time_s, len(event.data["gpus"])))
        elif event.kind is EventKind.SUBMITTED and event.job_id is not None:
            jobs[event.job_id] = LoggedJob(event.job_id, event)
            policy = str(event.data.get("policy", policy))
            round_s = event.data.get("round_s")
        elif event.job_id in jobs:
            job = jobs[event.job_id]
            if event.kind in CHANGES:
                placement = tuple(event.data.get("gpus", ()))
                job.changes.append(GpuChange(event.time_s, placement, event.kind))
            elif event.kind in ENDS:
                job.end = event
    if nodes.known and (everything := Cluster(tuple(nodes.known.values()))).per_gpu > 1:
        _find_neighbours(list(jobs.values()), everything)
    ended = [job for job in jobs.values() if job.end is not None and job.work > 0]
    began_s = min((job.submitted.time_s for job in ended), default=0.0)
    cluster, failures = nodes.since(began_s)
    calendar, demand = _reserved(held, most, began_s)
    unfinished = sum(job.end is None for job in jobs.values())
    return Log(
        ended, unfinished, cluster, failures, policy, round_s, calendar, demand, nodes.all_have_sharing
    )


@dataclass(slots=True)
class _Nodes:
    """The nodes that a log names, in the order in which their slots are numbered, and when they were away."""

    known: dict[str, Node] = field(default_factory=dict)
    lost: list[tuple[str, float, float]] = field(default_factory=list)
    """Name, from when, until when."""
    all_have_sharing: bool = True

    def follow(self, event: Event) -> None:
        """Enter that a node joined or was lost."""
        assert event.node is not None
        if event.kind is EventKind.NODE_JOINED:
            self.all_have_sharing &= "per_gpu" in event.data
            # The GPU type is left out, because the jobs' speed was measured on these very nodes.
            gpus, per_gpu = int(event.data["gpus"]), int(event.data.get("per_gpu", 1))
            self.known[event.node] = Node(event.node, gpus, per_gpu=per_gpu)
            self.lost = [
                (name, at_s, event.time_s if name == event.node and back_s == np.inf else back_s)
                for name, at_s, back_s in self.lost
            ]
        elif event.kind is EventKind.NODE_LOST:
            self.lost.append((event.node, event.time_s, np.inf))

    def since(self, began_s: float) -> tuple[Cluster | None, list[NodeFailure]]:
        """The nodes that were there from then on, and their failures."""
        gone = {name for name, at_s, back_s in self.lost if at_s < began_s and back_s == np.inf}
        names = [name for name in self.known if name not in gone]
        failures = [
            NodeFailure(names.index(name), max(at_s - began_s, 0.0), back_s - max(at_s, began_s))
            for name, at_s, back_s in self.lost
            if name in names and back_s > began_s
        ]
        return Cluster(tuple(self.known[name] for name in names)) if names else None, failures


def _find_neighbours(jobs: Sequence[LoggedJob], cluster: Cluster) -> None:
    """Enter how fast each job was beside its neighbours, from each of its changes to the next."""
    total = sum(node.gpus for node in cluster.nodes)
    moments = [
        (change.time_s, row, tuple(slot for slot in change.placement if slot < total))
        for row, job in enumerate(jobs)
        for change in job.changes
    ]
    moments += [(job.end.time_s, row, ()) for row, job in enumerate(jobs) if job.end is not None]
    shared = SharedGpus(cluster, [job.fill for job in jobs])
    # For each job: when its speed last changed, its speed since then, and until then its progress, counted in
    # seconds alone.
    since_s, speed, made_s = [0.0] * len(jobs), [1.0] * len(jobs), [0.0] * len(jobs)
    reached: list[list[tuple[float, float]]] = [[] for _ in jobs]  # at each change: its time, and `made_s`
    for time_s, row, placement in sorted(moments, key=lambda moment: moment[0]):
        for other in {row, *shared.place([(row, placement)])}:
            made_s[other] += speed[other] * (time_s - since_s[other])
            since_s[other], speed[other] = time_s, shared.speed(other)
        reached[row].append((time_s, made_s[row]))
    for job, steps in zip(jobs, reached):
        job.beside = [
            (made - made_before) / (at_s - before_s) if at_s > before_s else 1.0
            for (before_s, made_before), (at_s, made) in pairwise(steps)
        ]


def _reserved(
    held: Mapping[str, list[tuple[float, int]]], most: Mapping[str, int], began_s: float
) -> tuple[Calendar, tuple[DemandChange, ...]]:
    """Slots that reservations held, and when: fixed hours, and services that are followed."""
    hours, demand = list[Reservation](), list[DemandChange]()
    for name, steps in held.items():
        if most.get(name):
            hours.append(Reservation(name=name, most=max(most[name], *(gpus for _, gpus in steps))))
            demand += [DemandChange(name, max(at_s - began_s, 0.0), gpus) for at_s, gpus in steps]
            continue
        for i, (at_s, gpus) in enumerate(steps):
            end_s = steps[i + 1][0] - began_s if i + 1 < len(steps) else None
            if gpus and (end_s is None or end_s > at_s - began_s):
                hours.append(
                    Reservation(name=f"{name[:100]}.{i}", gpus=gpus, start_s=at_s - began_s, end_s=end_s)
                )
    return Calendar(tuple(hours)), tuple(demand)


LIVE = "what happened"
"""Stands for a policy's name in the record of the live run."""
LANES_MOST = 120
"""Jobs whose lanes a record has; of more jobs evenly some."""
_LEARN_S = 2.0
_ROUNDS = 2000
"""A replay has about this many rounds, for a policy with rounds: short ones, but few enough to be quick."""


@dataclass(frozen=True, slots=True)
class _PauseCost:
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
    """Assumptions where the log has no facts, in sentences for people. `cluster`: another one."""
    if log.cluster is not None and not log.has_sharing:
        return ["The log does not say whether slots share GPUs: each slot is taken for a GPU of its own."]
    if log.cluster is None or log.cluster.per_gpu == 1:
        return []
    assumed = []
    if cluster is not None:
        slots = log.cluster.per_gpu
        assumed.append(
            f"Each GPU of {_in_gpus(cluster)} is taken to be {slots} slots, as on the real cluster."
        )
    if silent := sum(not job.has_fill for job in log.jobs):
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
        request: Mapping[str, Any] = job.submitted.data
        submit_s, deadline_s = job.submitted.time_s - log.began_s, job.deadline_s
        relative_s = None if deadline_s is None else deadline_s - log.began_s
        specs.append(
            JobSpec(
                job_id=job.job_id,
                submit_s=submit_s,
                model=job.job_id,
                batch_size=1,
                gpus=int(request.get("gpus") or 1),
                work=job.work,
                deadline_s=relative_s if relative_s is not None and relative_s > submit_s else None,
                min_gpus=int(request.get("min_gpus") or 1),
                max_gpus=request.get("max_gpus"),
                gpus_per_replica=int(request.get("gpus_per_replica") or 1),
                weight=float(request.get("weight") or 1.0),
                priority=str(request.get("priority") or NORMAL),
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


def _costs(log: Log, cluster: Cluster) -> _PauseCost:
    """Cost of changes beyond start-ups, by least squares from the work that jobs missed on their GPUs."""
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
        return _PauseCost(float(np.mean(reported_s)), 0.0)
    (extra_s, pause_s), _ = nnls(np.array(rows), np.array(missed))
    if not any(resizes for _, resizes in rows):
        pause_s = np.mean(reported_s)
    return _PauseCost(float(pause_s), float(extra_s))


def _believed(log: Log) -> _BelievedCost:
    startups_s = [float(job.submitted.data.get("startup_s") or job.startup_s) for job in log.jobs]
    pauses_s = [float(job.end.data.get("pause_s") or 0.0) for job in log.jobs if job.end is not None]
    return _BelievedCost(float(np.median(startups_s)), float(np.median(pauses_s)))


def _learn_s(log: Log, cost: _PauseCost) -> float:
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


def _record(log: Log, result: SimulationResult, policy: str, cluster: Cluster) -> dict[str, Any]:
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
