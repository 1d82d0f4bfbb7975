"""What people are shown: nodes, figures, and why a job runs or waits."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from swell.control import teams
from swell.control.book import Book
from swell.control.knowledge import Knowledge, Speed
from swell.control.model import JobRecord, Phase
from swell.control.promises import estimated
from swell.control.renting import Renting
from swell.control.roster import widest_nodes
from swell.control.scheduler import Scheduler
from swell.control.slow_nodes import TROUBLES, SlowNode
from swell.domain import NORMAL, Cluster, Event, EventKind, many, rank_of
from swell.perf.belief import JobBelief

_ALLOCATIONS = (EventKind.ALLOCATED, EventKind.RESIZED, EventKind.PREEMPTED)
_MOST_NOTICES = 5


@dataclass(frozen=True, slots=True)
class NodeState:
    """A node as people see it."""

    name: str
    gpus: int
    gpu_type: str
    up: bool
    draining: bool
    used: int
    held: int = 0
    """Slots that somebody outside swell has taken."""
    rentable: bool = False
    """Whether the autoscaler rents the node and lets it go."""
    slow: float | None = None
    """For a slow node: how many times slower than others its workers were."""
    avoided_until_s: float | None = None
    """For a node that is kept out of use because it is slow or unstartable: until when."""
    unstartable: str = ""
    """Why no worker can be started on the node; empty if workers can."""


def nodes(
    cluster: Cluster,
    drained: set[str],
    records: Iterable[JobRecord],
    renting: Renting | None = None,
    slow: Mapping[str, SlowNode] = MappingProxyType({}),
    avoided: Collection[str] = (),
) -> list[NodeState]:
    """The nodes, and how many of their slots are in use."""
    rentable = frozenset[str]()
    if renting is not None:
        cluster, drained, rentable = renting.present(cluster), drained | renting.leaving, renting.names
    used, held = [0] * len(cluster.nodes), [0] * len(cluster.nodes)
    for slot in cluster.held:
        held[int(cluster.node_of_gpu[slot])] += 1
    for record in records:
        for slot in record.wanted:
            used[int(cluster.node_of_gpu[slot])] += 1
    return [
        NodeState(
            name=n.name,
            gpus=n.gpus,
            gpu_type=n.gpu_type,
            up=n.up,
            draining=n.name in drained,
            used=used[i],
            held=held[i],
            rentable=n.name in rentable,
            slow=slow[n.name].times if n.name in slow and not slow[n.name].trouble else None,
            avoided_until_s=slow[n.name].until_s if n.name in slow and n.name in avoided else None,
            unstartable=TROUBLES.get(slow[n.name].trouble, "") if n.name in slow else "",
        )
        for i, n in enumerate(cluster.nodes)
    ]


def why(record: JobRecord, scheduler: Scheduler, now_s: float, behind_s: float, trouble: str) -> str:
    """One line on why a job runs, waits or has ended; `behind_s`: how long its workers were not as wanted."""
    run = scheduler.profiling.runs.get(record.job_id)
    if run is not None and run.sizes:
        sizes = ", ".join(map(str, run.sizes))
        return f"is being profiled, a few steps at each size (to go: {sizes} workers)"
    if record.phase is Phase.RUNNING and len(record.held) != len(record.wanted):
        since = f", for {behind_s:.0f} s now" if behind_s >= 1 else ""
        return f"is changing from {len(record.held)} to {len(record.wanted)} workers{since}"
    if record.phase is Phase.RUNNING:
        return record.reason or _why_so_many(record, scheduler)
    if record.phase is not Phase.QUEUED:
        return record.reason or record.phase.value
    if trouble:
        return f"the control plane is in trouble: {trouble}"
    if record.job_id in scheduler.over_limit:
        return f"waits: {scheduler.over_limit[record.job_id]}"
    shared = teams.why_waits(record, scheduler, scheduler.uses()) if scheduler.teams else ""
    holders = [r for r in scheduler.book.records.values() if r.wanted]
    used, slots = sum(len(r.wanted) for r in holders), scheduler.cluster.capacity
    own = sorted(f"{r.request.name} ({len(r.wanted)})" for r in holders if r.owner == record.owner)[:6]
    others = sum(len(r.wanted) for r in holders if r.owner != record.owner)
    # Names of other users' jobs are none of this job's business.
    names = ", ".join([*own, *([f"jobs of other users ({others})"] if others else [])]) or "no job"
    more = f"; {record.reason}" if record.reason else ""
    if higher := _higher_class(record, scheduler):
        more += f"; {higher} first"
    reserved = {name: len(gpus) for name, gpus in scheduler.board.reserved.items() if gpus}
    if reserved:
        more += "; reserved for " + ", ".join(f"{name} ({gpus})" for name, gpus in sorted(reserved.items()))
    if scheduler.renting is not None:
        rented = scheduler.renting.state()
        more += f"; {rented.ready} nodes are rented and {rented.coming} coming: {rented.reason}"
    policy, round_s, due_s = scheduler.policy_text, scheduler.rhythm.interval_s, scheduler.rhythm.due_s
    serves = f", which serves {scheduler.policy.serves}" if scheduler.policy.serves else ""
    if round_s and due_s < math.inf:
        more += f"; the policy decides every {round_s:g} s, next in {max(due_s - now_s, 0):.0f} s"
    if shared:
        return f"waits: {shared}; policy '{policy}' decides within a team{serves}{more}"
    return f"waits: {used} of {slots} slots are in use by {names}, as policy '{policy}' decides{serves}{more}"


def _higher_class(record: JobRecord, scheduler: Scheduler) -> str:
    """How many jobs of the same team are of a higher class than this one; empty if none is."""
    rank, team = rank_of(record.request.priority), scheduler.teams.of(record.owner)
    found = sum(
        rank_of(r.request.priority) > rank and scheduler.teams.of(r.owner) == team
        for r in scheduler.book.records.values()
        if r.phase in (Phase.QUEUED, Phase.RUNNING)
    )
    if found == 1:
        return "1 job of a higher class goes"
    return f"{found} jobs of a higher class go" if found else ""


def _why_so_many(record: JobRecord, scheduler: Scheduler) -> str:
    """Why a running job has the workers that it has."""
    workers = many(len(record.wanted), "worker")
    if record.confined:
        return f"runs on {workers} and gets no more than {record.most_workers}, because {record.confined}"
    slots, low, high = scheduler.cluster.capacity, record.request.min_workers, record.request.max_workers
    bounds = f", allowed are {low} to {'any number' if high is None else high}" if low > 1 or high else ""
    return f"runs on {workers} of {slots} slots, as policy '{scheduler.policy_text}' decides{bounds}"


def _team(record: JobRecord, scheduler: Scheduler) -> dict[str, Any] | None:
    """What the job's team may count on, has and borrows; None if there are no teams."""
    if not scheduler.teams:
        return None
    name = scheduler.teams.of(record.owner)
    use = scheduler.uses()[name]
    return {"name": name, "own": use.own, "used": use.used, "borrowed": use.borrowed}


def explain(
    record: JobRecord,
    scheduler: Scheduler,
    events: Sequence[Event],
    now_s: float,
    behind_s: float,
    trouble: str,
) -> dict[str, Any]:
    """Why a job runs or waits, when it will be done, and the slots it has had."""
    cluster, knowledge = scheduler.cluster, scheduler.book.known.get(record.job_id)
    answer: dict[str, Any] = {
        "job_id": record.job_id,
        "phase": record.phase.value,
        "why": why(record, scheduler, now_s, behind_s, trouble),
        "slots": list(record.wanted),
        "nodes": sorted({cluster.nodes[n].name for n in cluster.nodes_of(record.wanted)}),
        "gpu_types": list(cluster.types_of(record.wanted)),
        "policy": scheduler.policy_text,
        "team": _team(record, scheduler),
        "most_workers": record.most_workers,
        "confined": record.confined,
        "resizes": record.resizes,
        "pause_s": record.pause_s,
        "profiling": record.job_id in scheduler.profiling.runs,
        "estimate": None,
        "allocations": [
            {"time_s": e.time_s, "kind": e.kind.value, "gpus": list(e.data.get("gpus", []))}
            for e in events
            if e.kind in _ALLOCATIONS
        ],
        "notices": [
            {"time_s": e.time_s, "text": str(e.data.get("text", ""))}
            for e in events
            if e.kind is EventKind.NOTICED
        ][-_MOST_NOTICES:],
    }
    if knowledge is not None and not record.phase.over:
        answer["estimate"] = asdict(estimated(record, knowledge, scheduler, now_s))
        basis = knowledge.basis(record.done)
        answer["expected"] = None if record.of is not None or basis is None else basis.length.of
    return answer | _speed(record, knowledge, events, cluster)


def _speed(
    record: JobRecord, knowledge: Knowledge | None, events: Sequence[Event], cluster: Cluster
) -> dict[str, Any]:
    """The job's fitted curve, the step times that it was fitted on, and the progress that was measured.

    Of a job that is over these are what the log says of it.
    """
    belief: Speed | JobBelief | None = None
    rates, measured, tried = dict[int, float](), list[dict[str, float]](), set[int]()
    if knowledge is not None and not record.phase.over:
        rates, speed = knowledge.timings.rates, knowledge.speed
        if speed.belief is not None and speed.belief.known:
            belief, measured = speed, speed.belief.measured()
            tried = {*speed.trials.measured, *(int(point["workers"]) for point in measured)}
    elif figures := next((e.data for e in reversed(events) if e.data.get("params") is not None), None):
        rates = {int(workers): float(rate) for workers, rate in (figures.get("rates") or {}).items()}
        belief, tried = JobBelief.from_figures(figures), set(rates)
    most = min(cluster.capacity or 1, record.most_workers or sys.maxsize)
    curve = None if belief is None else belief.curve(most, cluster.gpus_per_node)
    types = []
    if isinstance(belief, Speed) and len(cluster.gpu_types) > 1:
        for kind, width in widest_nodes(cluster).items():
            own = [round(float(rate), 6) for rate in belief.curve_on(kind, most, width)]
            types.append({"gpu_type": kind, "measured": belief.measured_on(kind), "curve": own})
    return {
        "types": types,
        "curve": None if curve is None else [round(float(rate), 6) for rate in curve],
        "tried": sorted(tried),
        "steps": measured,
        "measured": [{"workers": workers, "rate": round(rate, 6)} for workers, rate in rates.items()],
    }


def stats(book: Book, scheduler: Scheduler) -> dict[str, float]:
    """Figures for monitoring."""
    phases = {f"jobs_{phase.value}": 0.0 for phase in Phase if not phase.over}
    for record in book.records.values():
        phases[f"jobs_{record.phase.value}"] += 1
    return phases | {
        "slots": float(scheduler.cluster.capacity),
        "slots_used": float(sum(len(r.wanted) for r in book.records.values())),
        "subscribers": float(book.subscribers),
    }


def submission(record: JobRecord, knowledge: Knowledge, scheduler: Scheduler) -> list[Event]:
    """The events of a submission, with everything that a replay needs."""
    request, promise = record.request, record.promise
    data = {
        "name": request.name,
        "owner": record.owner,
        "model": request.script,
        "fingerprint": knowledge.fingerprint,
        "source": knowledge.source,
        "startup_s": knowledge.startup_s,
        "policy": scheduler.policy_text,
        "round_s": scheduler.rhythm.interval_s,
        "gpus": request.workers,
        "min_gpus": request.min_workers,
        "max_gpus": request.max_workers,
        "weight": request.weight,
        "deadline_s": request.deadline_s,
    }
    if request.priority != NORMAL:
        data["priority"] = request.priority
    if team := scheduler.teams.of(record.owner):
        data["team"] = team
    if request.workers_per_replica > 1:
        data["gpus_per_replica"] = request.workers_per_replica
    events = [Event(record.submitted_s, EventKind.SUBMITTED, job_id=record.job_id, data=data)]
    if not promise.admitted:
        refusal = {"reason": promise.reason, "earliest_deadline_s": promise.earliest_deadline_s}
        learnt = {"work": knowledge.length.of} | knowledge.figures()
        events.append(
            Event(record.submitted_s, EventKind.REJECTED, job_id=record.job_id, data=refusal | learnt)
        )
    elif not promise.pending:
        given = {"finish_s": promise.guaranteed_s, "estimate_s": promise.estimate.finish_s}
        events.append(Event(record.submitted_s, EventKind.ADMITTED, job_id=record.job_id, data=given))
    return events


def node_changes(before: Mapping[str, list[Any]], now: Mapping[str, list[Any]], now_s: float) -> list[Event]:
    """Events for nodes (name -> slots, type, slots of a GPU if several) that came, went or changed.

    Earlier versions did not write down how many slots share a GPU. A node of which that is news was not lost.
    """
    gone = [name for name in before if now.get(name, [])[:2] != before[name][:2]]
    new = [name for name in now if now[name] != before.get(name)]
    figures = [(EventKind.NODE_LOST, name, before[name]) for name in gone]
    figures += [(EventKind.NODE_JOINED, name, now[name]) for name in new]
    return [
        Event(now_s, kind, node=name, data=dict(zip(("gpus", "gpu_type", "per_gpu"), (*node, 1))))
        for kind, name, node in figures
    ]
