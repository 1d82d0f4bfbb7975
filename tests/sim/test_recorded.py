"""What every policy does with a few workloads is on record, so that no change of a decision goes unseen.

`recorded.json` has one line for each workload and policy: how many resizes and returns after a preemption,
the average completion time, the end of the last job, how many deadlines were met, and a checksum of all
events with their GPUs. After a change that is meant to decide differently, write it anew and look at the
difference:

    python -m tests.sim.test_recorded
"""

from __future__ import annotations

import json
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.control.virtual import Trace, make_trace

from swell.board.board import BY_POLICY, INSTEAD, TO_OTHERS
from swell.domain import Calendar, Event, EventKind, JobSpec, Reservation, Teams
from swell.policies.by_user import UserLimits
from swell.policies.registry import policy_names
from swell.sim import DemandChange, NodeFailure, simulate

RECORD = Path(__file__).with_name("recorded.json")

SERVICES = Calendar(
    (
        Reservation(name="evening", gpus=5, start_s=300.0, end_s=700.0, every_s=900.0),
        Reservation(name="node", nodes=("n2",), start_s=600.0, end_s=1300.0),
        Reservation(name="web", gpus=0, most=4),
    )
)
WEB = [DemandChange("web", at_s, gpus) for at_s, gpus in ((210.0, 3), (820.0, 1), (1210.0, 4), (1500.0, 0))]


def _mixed(number: int, job: JobSpec) -> JobSpec:
    """Some jobs of two teams and users, of all classes."""
    return replace(
        job,
        team="" if number % 7 == 3 else "red" if number // 3 % 2 else "blue",
        priority="high" if number % 5 == 0 else "low" if number % 5 == 3 else "normal",
        user="ben" if number % 3 == 0 else "ann",
    )


def _of_teams(trace: Trace, **more: Any) -> Trace:
    jobs = [_mixed(number, job) for number, job in enumerate(trace.jobs)]
    return replace(trace, jobs=jobs, **more)


WORKLOADS = {
    "busy": make_trace(11, 40, "4x4", 0.6),
    "overloaded": make_trace(12, 40, "2x4", 0.2),
    "lost nodes": make_trace(13, 30, "4x4", 0.6, [NodeFailure(1, 700.0, 900.0), NodeFailure(3, 1500.0)]),
    "services": replace(make_trace(14, 24, "4x4", 0.4), calendar=SERVICES, demand=WEB),
    "types": make_trace(15, 30, "3x4:t4,2x4:a100", 0.4, [NodeFailure(4, 800.0, 600.0)]),
    "teams": _of_teams(make_trace(16, 30, "4x4", 0.3), teams=Teams.parse("red=6,blue=8")),
    "users": _of_teams(make_trace(17, 30, "3x4", 0.2), user_limits=UserLimits(slots=6, running=3)),
    "parts of GPUs": make_trace(18, 30, "2x2", 0.4, per_gpu=4),
    "one large node": make_trace(19, 30, "1x16", 0.5),
}
POLICIES = [
    *(name for name in policy_names() if name != "pollux"),
    "fifo:backfill=true",
    "tiresias:thresholds=3250/7200,promote=2",
    "tiresias:fifo=start",
    "gandiva:lend=false",
    "elastic-tiresias:pending=2",
    "elasticflow:margin=1.2,overhead_s=20",
    "tide:length=unknown",
    "oasis:slots=12,steps=24",
    "afs-p:lease_s=600",
    "pollux:generations=4,population=12,patience=4",
]


def recorded(workload: str, policy: str) -> str:
    """The line of a workload under a policy."""
    trace, events = WORKLOADS[workload], list[Event]()
    result = simulate(
        trace.jobs, trace.profiles, trace.cluster, policy, resize_cost=5.0, failures=trace.failures,
        calendar=trace.calendar, demand=trace.demand, teams=trace.teams, user_limits=trace.user_limits,
        on_event=events.append,
    )  # fmt: skip
    figures = result.record()
    log = "\n".join(_told(events))
    starts = Counter(event.job_id for event in events if event.kind is EventKind.ALLOCATED)
    moves = figures["resizes"] + starts.total() - len(starts)
    return (
        f"{zlib.crc32(log.encode()):08x} {len(events)} events, {moves} resizes, "
        f"JCT {figures['avg_jct_s']:.2f}, end {figures['makespan_s']:.2f}, met {figures['deadline_met']}"
    )


def _told(events: list[Event]) -> Iterator[str]:
    for event in events:
        if event.kind is not EventKind.PROGRESS:
            gpus, reason = event.data.get("gpus"), event.data.get("reason")
            reason = None if reason in (TO_OTHERS, INSTEAD, BY_POLICY) else reason  # the GPUs show it
            yield f"{event.time_s:.3f} {event.kind} {event.job_id} {event.node} {gpus} {reason}"


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_decides_as_it_did(policy: str) -> None:
    record = json.loads(RECORD.read_text())
    found = {workload: recorded(workload, policy) for workload in WORKLOADS}
    assert found == record[policy], "meant? then write the record anew (the docstring of this file has how)"


if __name__ == "__main__":
    lines = {policy: {workload: recorded(workload, policy) for workload in WORKLOADS} for policy in POLICIES}
    RECORD.write_text(json.dumps(lines, indent=1) + "\n")
    sys.stdout.write(f"{RECORD}: {len(POLICIES)} policies on {len(WORKLOADS)} workloads\n")
