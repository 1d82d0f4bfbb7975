"""The live control plane on a virtual clock: real store, real conductor, real scheduler, no processes.

Jobs run at the speed of their profiles, and the control plane is told exactly that speed, as a policy with an
oracle is in the simulator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path

import numpy as np

from swell.control.knowledge import Knowledge, Length, Speed
from swell.control.limits import OwnerLimits
from swell.control.model import JobRequest, Phase
from swell.control.plane import ControlPlane
from swell.control.store import Store, connect
from swell.domain import (
    NO_RESERVATIONS,
    NO_TEAMS,
    Calendar,
    Cluster,
    Event,
    EventKind,
    FloatArray,
    JobSpec,
    Placement,
    Teams,
)
from swell.engines.null import NullEngine
from swell.perf.profiles import MeasuredCounts, ProfileSet
from swell.policies.by_user import NO_USER_LIMITS, UserLimits
from swell.sim import DemandChange, NodeFailure
from swell.sim.workload import SharedGpus, alone_speeds


@dataclass(slots=True, kw_only=True)
class ExactSpeed(Speed):
    """The speed of a job whose curve is known exactly."""

    rates: FloatArray
    faster: dict[str, float]
    """By GPU type: how many times as fast as `rates`."""

    def curve_on(
        self, gpu_type: str, max_gpus: int, gpus_per_node: int, *, cautious: bool = False
    ) -> FloatArray:
        return self.rates[: max_gpus + 1] * self.faster.get(gpu_type, 1.0)

    def most_workers(self, bound: int) -> int:
        return bound


class Exact(Knowledge):
    """Knowledge of a job whose curve and costs are known exactly."""

    def __setattr__(self, name: str, value: object) -> None:
        """Keep the cost of a start: the first report of a job that was resized while it started is late."""
        if name != "startup_s" or not hasattr(self, name):
            object.__setattr__(self, name, value)

    @property
    def known(self) -> bool:
        return True


def known_exactly(
    mark: str,
    of: float,
    rates: FloatArray,
    *,
    startup_s: float,
    pause_s: float,
    closing_s: float = 0.0,
    faster: dict[str, float] | None = None,
) -> Exact:
    """What is known of a job of this length and with these progresses per second, before it runs."""
    return Exact(
        mark, ExactSpeed(rates=rates, faster=faster or {}), Length(of),
        startup_s=startup_s, pause_s=pause_s, closing_s=closing_s, source="history",
    )  # fmt: skip


@dataclass(frozen=True)
class Trace:
    """Jobs, how fast each is on 0, 1, 2 ... GPUs, where they run and which nodes are lost."""

    jobs: Sequence[JobSpec]
    rates: dict[str, FloatArray]
    cluster: Cluster
    failures: Sequence[NodeFailure] = ()
    calendar: Calendar = NO_RESERVATIONS
    demand: Sequence[DemandChange] = ()
    faster: dict[str, dict[str, float]] = field(default_factory=dict)
    """By job and GPU type: how many times as fast as `rates` it is there."""
    teams: Teams = NO_TEAMS
    user_limits: UserLimits = NO_USER_LIMITS

    @property
    def profiles(self) -> ProfileSet:
        """The speeds as the simulator takes them."""
        counts = np.arange(1.0, self.cluster.capacity + 1)
        return ProfileSet(
            [
                MeasuredCounts(
                    name,
                    {
                        kind: (counts, {1: rates[1:] * self.factor(name, kind)})
                        for kind in self.cluster.gpu_types
                    },
                    1e6,
                )
                for name, rates in self.rates.items()
            ]
        )

    @property
    def shares_gpus(self) -> bool:
        """Whether slots share GPUs."""
        return self.cluster.per_gpu > 1

    def believed(self, name: str) -> FloatArray:
        """How fast a job is on 0, 1, 2 ... slots if no other job is there."""
        rates, cluster = self.rates[name], self.cluster
        if not self.shares_gpus:
            return rates
        fill = next(job.fill for job in self.jobs if job.job_id == name)
        return rates * alone_speeds(fill, len(rates) - 1, cluster.gpus_per_node, cluster.per_gpu)

    def factor(self, name: str, kind: str) -> float:
        """How many times as fast a job is on a GPU type."""
        return self.faster.get(name, {}).get(kind, 1.0)


def make_trace(
    seed: int, jobs: int, cluster: str, hours: float, failures: Sequence[NodeFailure] = (), per_gpu: int = 1
) -> Trace:
    """Jobs with concave curves, some of which fall again, half of them with deadlines from tight to loose."""
    rng = np.random.default_rng(seed)
    where = Cluster.parse(cluster).shared_by(per_gpu)
    counts = np.arange(where.capacity + 1)
    submit_s = np.sort(rng.uniform(0.0, hours * 3600.0, jobs))
    specs, rates = [], {}
    for i in range(jobs):
        name = f"j{i}"
        curve = counts / (1.0 + rng.uniform(0.01, 0.3) * counts) / rng.uniform(0.5, 2.0)
        if rng.random() < 0.3:
            curve *= np.exp(-np.maximum(counts - rng.integers(2, 9), 0) * 0.1)
        rates[name] = curve
        work = float(rng.lognormal(6.5, 1.0))
        alone_s = work / float(curve.max())
        slack, hurried = float(rng.uniform(0.9, 6.0)), rng.random() < 0.5
        deadline_s = float(submit_s[i]) + alone_s * slack + 60.0 if hurried else None
        specs.append(
            JobSpec(
                job_id=name, submit_s=float(submit_s[i]), model=name, batch_size=1, work=work,
                gpus=int(2 ** rng.integers(0, 4)), deadline_s=deadline_s,
                max_gpus=int(rng.integers(2, where.capacity + 1)) if rng.random() < 0.2 else None,
            )
        )  # fmt: skip
    if per_gpu > 1:
        specs = [replace(spec, fill=float(rng.uniform(0.1, 1.0))) for spec in specs]
    faster = {name: {kind: float(rng.uniform(1.0, 6.0)) for kind in where.gpu_types[1:]} for name in rates}
    return Trace(specs, rates, where, failures, faster=faster)


class VirtualPlatform:
    """Runs a trace through the control plane, turning the clock from one event to the next."""

    def __init__(
        self,
        trace: Trace,
        policy: str,
        home: Path,
        *,
        cost_s: float,
        round_s: float | None,
        limits: OwnerLimits | None = None,
    ) -> None:
        self.trace = trace
        self.now_s = 0.0
        self.cost_s = cost_s
        self._work = {job.job_id: float(job.work or 0.0) for job in trace.jobs}
        self._row = {job.job_id: row for row, job in enumerate(trace.jobs)}
        self._shared = SharedGpus(trace.cluster, [job.fill for job in trace.jobs])
        self._ids: dict[int, str] = {}
        self.engine = NullEngine(
            trace.cluster, truth=self, slowed=self.slowed if trace.shares_gpus else None, clock=self.clock
        )
        home.mkdir(exist_ok=True)
        self.store = Store(connect(str(home / "store.db")))
        self.home = home
        (home / "train.py").write_text("")
        self.plane = ControlPlane(
            self.store, self.engine, home=home, policy=policy, round_s=round_s,
            clock=self.clock, recall=self.recall, limits=limits or self.limits,
        )  # fmt: skip

    @property
    def limits(self) -> OwnerLimits:
        """The trace's limits of a user, as the platform takes them."""
        return OwnerLimits(slots=self.trace.user_limits.slots, running=self.trace.user_limits.running)

    def clock(self) -> float:
        return self.now_s

    def recall(self, request: JobRequest) -> Knowledge:
        return known_exactly(
            request.name, self._work[request.name], self.trace.believed(request.name),
            faster=self.trace.faster.get(request.name), startup_s=self.cost_s, pause_s=self.cost_s,
        )  # fmt: skip

    # -- the truth, for the engine -----------------------------------------------------------------------

    def work(self, job_id: str) -> float:
        return self._work[name_of(job_id)]

    def speed(self, job_id: str, placement: Placement) -> float:
        name, cluster = name_of(job_id), self.trace.cluster
        kinds = {cluster.nodes[node].gpu_type for node in cluster.nodes_of(placement)}
        slowest = min((self.trace.factor(name, kind) for kind in kinds), default=1.0)
        return float(self.trace.rates[name][len(placement)]) * slowest * self._shared.speed(self._row[name])

    def slowed(self, job_id: str, placement: Placement) -> list[str]:
        row = self._row[name_of(job_id)]
        self._ids[row] = job_id
        return [self._ids[other] for other in self._shared.place([(row, placement)])]

    def pause_s(self, job_id: str, before: int, after: int) -> float:
        return self.cost_s

    # -- the clock ---------------------------------------------------------------------------------------

    def request(self, spec: JobSpec) -> JobRequest:
        return JobRequest(
            name=spec.job_id, script="train.py", workdir=str(self.home), deadline_s=spec.deadline_s,
            workers=spec.gpus, min_workers=spec.min_gpus, max_workers=spec.max_gpus, priority=spec.priority,
        )  # fmt: skip

    def owner(self, spec: JobSpec) -> str:
        """The user who submits a job: its own, or one for each team."""
        return spec.user or (f"{spec.team}-user" if spec.team else "ann")

    def run(self) -> list[Event]:
        """All jobs to their end; the events."""
        self.plane.come_up()
        coming = sorted(self.trace.jobs, key=lambda job: job.submit_s)
        nodes = sorted(
            [(f.at_s, False, f.node) for f in self.trace.failures]
            + [(f.at_s + f.repair_s, True, f.node) for f in self.trace.failures if math.isfinite(f.repair_s)]
        )
        for reservation in self.trace.calendar.reservations:
            self.plane.reservations.make(reservation, "root")
        for team in self.trace.teams.teams:
            self.plane.teams.change(replace(team, users=(f"{team.name}-user",)))
        demand = sorted(self.trace.demand, key=lambda change: change.at_s)
        for _ in range(100_000):
            times = [self.engine.next_end_s(), self.plane.due_s]
            times += [coming[0].submit_s] if coming else []
            times += [nodes[0][0]] if nodes else []
            times += [demand[0].at_s] if demand else []
            times += [self.engine.next_step_s()] if self.trace.shares_gpus else []
            idle = (
                times[0] == math.inf
                and not coming
                and not demand
                and not self.plane.jobs.find(phase=Phase.QUEUED)
            )
            if min(times) == math.inf or idle:  # a calendar may go on for ever
                break
            self.now_s = max(min(times), self.now_s)
            while coming and coming[0].submit_s <= self.now_s:
                spec = coming.pop(0)
                self.plane.jobs.submit(self.request(spec), self.owner(spec))
            while nodes and nodes[0][0] <= self.now_s:
                _, up, index = nodes.pop(0)
                self.engine.set_node(self.trace.cluster.nodes[index].name, up=up)
            while demand and demand[0].at_s <= self.now_s:
                change = demand.pop(0)
                self.plane.reservations.demand(change.name, change.gpus)
            if self.trace.shares_gpus:  # only reports say how fast jobs are beside their neighbours
                self._report_progress()
            self.plane.turn()
            self.plane.turn()  # what the engine said to the last decisions
        return [event for _, event in self.plane.events(limit=1_000_000)]

    def _report_progress(self) -> None:
        """Let every job that trains say how far it is; its first report tells how long the start took."""
        for job_id, left in self.engine.left().items():
            of = self.work(job_id)
            self.engine.say(job_id, "progress", {"done": min(of - left, of), "batch_size": 1})


def name_of(job_id: str) -> str:
    """The name that the platform made an id from."""
    return job_id.rsplit("-", 1)[0]


def most_held(events: list[Event]) -> dict[str, tuple[int, int]]:
    """By user: the most jobs that ran and the most slots they had, at one moment."""
    owners: dict[str, str] = {}
    held: dict[str, int] = {}
    most: dict[str, tuple[int, int]] = {}
    for _, together in groupby(events, key=lambda event: event.time_s):
        for event in together:
            job_id = str(event.job_id)
            if event.kind is EventKind.SUBMITTED:
                owners[job_id] = str(event.data["owner"])
            elif event.kind in (EventKind.ALLOCATED, EventKind.RESIZED):
                held[job_id] = len(event.data["gpus"])
            elif event.kind in (EventKind.PREEMPTED, EventKind.FINISHED):
                held.pop(job_id, None)
        for user in set(owners.values()):
            mine = [gpus for job_id, gpus in held.items() if owners[job_id] == user]
            jobs, slots = most.get(user, (0, 0))
            most[user] = (max(jobs, len(mine)), max(slots, sum(mine)))
    return most
