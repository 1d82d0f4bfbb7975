"""The live platform does what the simulator says: same decisions, placements and events, for every policy."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.control.virtual import Trace, VirtualPlatform, make_trace, most_held

from swell.control import promises
from swell.domain import Calendar, Event, EventKind, Reservation, Teams
from swell.policies import make_policy
from swell.policies.by_user import UserLimits
from swell.policies.registry import policy_names
from swell.sim import DemandChange, NodeFailure, simulate

KINDS = frozenset(EventKind) - {
    EventKind.PROGRESS, EventKind.WORKER_LOST, EventKind.CHECKPOINT_SAVED,
    EventKind.RESERVED, EventKind.YIELDED,
}  # fmt: skip
FACTS = {
    EventKind.ALLOCATED: ("gpus", "pause_s", "gpu_type"),
    EventKind.RESIZED: ("gpus", "before", "pause_s", "reason", "gpu_type"),
    EventKind.PREEMPTED: ("before", "reason"),
    EventKind.REJECTED: ("reason",),
    EventKind.FINISHED: ("met",),
    EventKind.HELD: ("reservation", "gpus", "before"),
}

STARTS = (EventKind.ALLOCATED, EventKind.RESIZED)

TRACES = {
    "busy": make_trace(1, 24, "4x4", 0.5),
    "overloaded": make_trace(2, 30, "2x4", 0.3),
    "node lost": make_trace(3, 20, "4x4", 0.6, [NodeFailure(1, 700.0, 900.0), NodeFailure(3, 1500.0)]),
}
MIXED = make_trace(5, 20, "3x4:t4,2x4:a100", 0.4, [NodeFailure(4, 800.0, 600.0)])


SERVICES = Calendar(
    (
        Reservation(name="evening", gpus=5, start_s=300.0, end_s=700.0, every_s=900.0),
        Reservation(name="node", nodes=("n2",), start_s=600.0, end_s=1300.0),
        Reservation(name="web", gpus=0, most=4),
    )
)
WEB = [DemandChange("web", at_s, gpus) for at_s, gpus in ((210.0, 3), (820.0, 1), (1210.0, 4), (1500.0, 0))]
RESERVED = replace(make_trace(4, 16, "4x4", 0.4), calendar=SERVICES, demand=WEB)


def _of_teams(trace: Trace) -> Trace:
    """Two teams that come by turns, a few jobs of users in no team, and jobs of all classes."""
    jobs = [
        replace(
            job,
            team="" if i % 7 == 3 else "red" if i // 3 % 2 else "blue",
            priority="high" if i % 5 == 0 else "low" if i % 5 == 3 else "normal",
        )
        for i, job in enumerate(trace.jobs)
    ]
    return replace(trace, jobs=jobs, teams=Teams.parse("red=6,blue=8"))


def _of_users(trace: Trace) -> Trace:
    """Two users, one of whom submits two jobs of three; the limits keep some of them waiting."""
    jobs = [replace(job, user="ben" if i % 3 == 0 else "ann") for i, job in enumerate(trace.jobs)]
    return replace(trace, jobs=jobs, user_limits=UserLimits(slots=6, running=3))


LIMITED = _of_users(make_trace(7, 18, "3x4", 0.2, [NodeFailure(1, 400.0, 300.0)]))
SHARED = _of_teams(make_trace(6, 18, "4x4", 0.3, [NodeFailure(1, 500.0, 300.0)]))


ON_PARTS = make_trace(8, 24, "2x2", 0.4, [NodeFailure(1, 500.0, 300.0)], per_gpu=4)


def told(events: list[Event]) -> list[tuple[Any, ...]]:
    """What happened, in an order that does not depend on who wrote first within one moment."""
    lines = []
    for event in events:
        if event.kind not in KINDS or (event.kind is EventKind.NODE_JOINED and event.time_s == 0.0):
            continue
        subject = event.node or str(event.job_id).split("-")[0]
        facts = [(name, _plain(event.data.get(name))) for name in FACTS.get(event.kind, ())]
        lines.append((round(event.time_s, 6), event.kind.value, subject, facts))
    return sorted(lines, key=repr)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, str):
        return re.sub(r"'(j\d+)-\w+'", r"'\1'", value)  # ids that a reason names
    return list(value) if isinstance(value, list | tuple) else value or None


@pytest.fixture(autouse=True)
def _no_looking_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimates are not compared here, and each would be a simulation of its own."""
    monkeypatch.setattr(promises, "MOST_JOBS", 0)


LONG = [pytest.param(name, marks=pytest.mark.long) for name in ("elasticflow", "oasis", "pollux")]


@pytest.mark.parametrize("policy", ["tide-fixed", "edf-admission", "fifo", *LONG])
def test_same_events_beside_services(policy: str, tmp_path: Path) -> None:
    _same(RESERVED, policy, None, tmp_path)


TYPED = ["fifo", "max-min", "tide-fixed", "elasticflow", "edf-admission", "pollux"]


@pytest.mark.parametrize("policy", TYPED)
def test_same_events_on_two_gpu_types(policy: str, tmp_path: Path) -> None:
    _same(MIXED, policy, None, tmp_path)


@pytest.mark.parametrize("policy", ["tide-fixed", "edf-admission", "fifo", "max-min", *LONG])
@pytest.mark.parametrize("round_s", [None, 60.0], ids=["own rhythm", "rounds"])
def test_same_events_of_teams(policy: str, round_s: float | None, tmp_path: Path) -> None:
    _same(SHARED, policy, round_s, tmp_path)


@pytest.mark.parametrize("policy", ["tide-fixed", "edf-admission", "fifo", "max-min", *LONG])
@pytest.mark.parametrize("round_s", [None, 60.0], ids=["own rhythm", "rounds"])
def test_same_events_of_users_with_limits(policy: str, round_s: float | None, tmp_path: Path) -> None:
    most = most_held(_same(LIMITED, policy, round_s, tmp_path))
    assert all(jobs <= 3 and slots <= 6 for jobs, slots in most.values()), most
    assert any(jobs == 3 or slots == 6 for jobs, slots in most.values()), "the limits kept no job waiting"


@pytest.mark.parametrize("policy", ["tide-fixed", "edf-admission", "fifo", "max-min", "afs-l", *LONG])
@pytest.mark.parametrize("round_s", [None, 60.0], ids=["own rhythm", "rounds"])
def test_same_events_where_jobs_share_gpus(policy: str, round_s: float | None, tmp_path: Path) -> None:
    _same(ON_PARTS, policy, round_s, tmp_path)


@pytest.mark.parametrize("round_s", [None, 60.0], ids=["own rhythm", "rounds"])
@pytest.mark.parametrize("policy", policy_names())
@pytest.mark.parametrize("trace", TRACES.values(), ids=list(TRACES))
def test_same_events(trace: Trace, policy: str, round_s: float | None, tmp_path: Path) -> None:
    _same(trace, policy, round_s, tmp_path)


def _same(trace: Trace, policy: str, round_s: float | None, tmp_path: Path) -> list[Event]:
    """Compare what happens live and simulated; returns the live events."""
    simulated: list[Event] = []
    simulate(
        trace.jobs, trace.profiles, trace.cluster, policy,
        interval_s=round_s, resize_cost=5.0, belief="profiles",
        failures=trace.failures, calendar=trace.calendar, demand=trace.demand, teams=trace.teams,
        user_limits=trace.user_limits, on_event=simulated.append,
    )  # fmt: skip
    live = VirtualPlatform(trace, policy, tmp_path, cost_s=5.0, round_s=round_s).run()
    expected, found = told(simulated), told(live)
    if len(trace.cluster.gpu_types) > 1 and make_policy(policy).knows != "nothing":
        assert {event.data["gpu_type"] for event in live if event.kind in STARTS} == {"t4", "a100"}
    for a, b in zip(expected, found):
        assert a == b
    assert len(expected) == len(found)
    return live
