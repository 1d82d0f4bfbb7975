"""A cluster's event log, sorted by job and node, for replays.

Where slots share GPUs, a job's speed was measured beside its neighbours of that time. The log says who they
were. From that and from the jobs' fills we compute how fast each job would have been alone, by the rule that
simulated jobs follow (`sim.sharing`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from swell.domain import (
    NO_RESERVATIONS,
    Calendar,
    Cluster,
    Event,
    EventKind,
    FloatArray,
    Node,
    Placement,
    Reservation,
)
from swell.domain.events import was_withdrawn
from swell.perf.belief import JobBelief
from swell.sim.capacity import DemandChange, NodeFailure
from swell.sim.sharing import SharedGpus

ENDS = (EventKind.FINISHED, EventKind.FAILED, EventKind.CANCELLED, EventKind.REJECTED)
CHANGES = (EventKind.ALLOCATED, EventKind.RESIZED, EventKind.PREEMPTED)


class GpuChange(NamedTuple):
    """A change of a job's GPUs."""

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
    """What it began with."""


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
    def says_fill(self) -> bool:
        """Whether the log says which part of a GPU's time a worker of the job uses alone."""
        return bool(self.submitted.data.get("fill"))

    @property
    def fill(self) -> float:
        """That part, or all of it if the log does not say."""
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
        """The job's deadline; None without one, and for a job that a person cancelled."""
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
    """What was reserved, in seconds from the first submission on."""
    demand: tuple[DemandChange, ...] = ()
    says_sharing: bool = True
    """Whether the log says of all nodes how many of their slots share a GPU."""

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
    return Log(ended, unfinished, cluster, failures, policy, round_s, calendar, demand, nodes.all_say_sharing)


@dataclass(slots=True)
class _Nodes:
    """The nodes that a log names, in the order in which their slots are numbered, and when they were away."""

    known: dict[str, Node] = field(default_factory=dict)
    lost: list[tuple[str, float, float]] = field(default_factory=list)
    """Name, from when, until when."""
    all_say_sharing: bool = True

    def follow(self, event: Event) -> None:
        """Enter that a node joined or was lost."""
        assert event.node is not None
        if event.kind is EventKind.NODE_JOINED:
            self.all_say_sharing &= "per_gpu" in event.data
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
    """What reservations held and when: hours as they were, and services that are followed as they came."""
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
