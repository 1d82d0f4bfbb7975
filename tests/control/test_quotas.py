"""Quotas of slots and running jobs: kept under every policy, shared out fairly, explained."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.control.conftest import make_record
from tests.control.virtual import VirtualPlatform, make_trace

from swell.control import lookahead, promises, views
from swell.control.book import Book
from swell.control.database import connect
from swell.control.knowledge import Knowledge
from swell.control.limits import Limits
from swell.control.model import JobRecord
from swell.control.quotas import Contender, Use, share_out, within
from swell.control.scheduler import Scheduler
from swell.control.store import Store
from swell.domain import Cluster, Event, EventKind, InputError, JobSpec
from swell.policies import Decision
from swell.policies.registry import policy_names

TRACE = make_trace(5, 10, "2x4", 0.1)
LIMITS = Limits(running=2, slots=3)


class TwoUsers(VirtualPlatform):
    """Every third job is Ben's."""

    def owner(self, spec: JobSpec) -> str:
        return "ben" if int(spec.job_id[1:]) % 3 == 0 else "ann"


@pytest.fixture(autouse=True)
def _no_looking_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookahead, "MOST_JOBS", 0)


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


@pytest.mark.parametrize("policy", policy_names())
def test_no_policy_gives_a_user_more_than_the_quota(policy: str, tmp_path: Path) -> None:
    platform = TwoUsers(TRACE, policy, tmp_path, cost_s=5.0, round_s=None, limits=LIMITS)
    events = platform.run()
    most = most_held(events)
    assert set(most) == {"ann", "ben"}
    assert all(jobs <= 2 and slots <= 3 for jobs, slots in most.values()), most
    assert max(most.values()) == (2, 3), "the quotas are not used up, so nothing was tried here"
    ended = [event for event in events if event.kind in (EventKind.FINISHED, EventKind.REJECTED)]
    assert len(ended) == len(TRACE.jobs), "a job waits for ever"
    late = [e for e in ended if e.kind is EventKind.FINISHED and e.data.get("met") is False]
    if platform.plane._conductor.scheduler.gives_promises:
        assert not late, "a promise was broken by a quota"
    platform.store.close()


contenders = st.lists(
    st.builds(
        lambda owner, least, more, promised, running: {
            "owner": owner, "least": least, "most": least + more, "promised": promised, "running": running,
        },
        st.sampled_from("ab"), st.integers(1, 4), st.integers(0, 9), st.booleans(), st.booleans(),
    ),
    max_size=12,
)  # fmt: skip


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(contenders, st.none() | st.integers(1, 5), st.none() | st.integers(1, 12), st.integers(0, 3))
def test_shares_keep_to_the_quota_and_waste_none_of_it(
    raw: list[dict[str, object]], running: int | None, slots: int | None, profiled: int
) -> None:
    jobs = [Contender(job_id=str(i), **fields) for i, fields in enumerate(raw)]  # type: ignore[arg-type]
    used = {"a": Use(1, profiled)} if profiled else {}
    allowed = share_out(jobs, Limits(running=running, slots=slots), used)
    assert set(allowed.most) | set(allowed.why_not) == {job.job_id for job in jobs}
    assert not set(allowed.most) & set(allowed.why_not)
    for owner in "ab":
        mine = [job for job in jobs if job.owner == owner]
        run = [job for job in mine if job.job_id in allowed.most]
        own = used.get(owner, Use())
        assert all(job.least <= allowed.most[job.job_id] <= job.most for job in run)
        assert running is None or not run or len(run) + own.jobs <= running
        given_out = sum(allowed.most[job.job_id] for job in run)
        assert slots is None or not run or given_out + own.slots <= slots
        could_use = sum(job.most for job in run)
        if run and slots is not None:
            assert given_out == min(could_use, slots - own.slots), "some of the quota is wasted"
        if any(job.promised for job in mine if job.job_id in allowed.why_not):
            assert all(job.promised for job in run), "a job without a promise went before one with"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store(connect(str(tmp_path / "store.db")))
    yield opened
    opened.close()


def _desk(store: Store, limits: Limits, *records: JobRecord) -> Scheduler:
    scheduler = Scheduler(Book(store), "elasticflow", Cluster.parse("1x8"), None, limits)
    for record in records:
        scheduler.book.add(record, Knowledge("same"))
        scheduler.add(record, 0.0)
    return scheduler


def test_a_job_that_waits_for_its_owners_quota_says_so(store: Store) -> None:
    records = [make_record(f"a-{i}", submitted_s=float(i)) for i in range(3)]
    scheduler = _desk(store, Limits(running=2, slots=4), *records)
    moves = dict(scheduler.decide(1.0))
    assert set(moves) == {"a-0", "a-1"} and sum(len(move.after) for move in moves.values()) <= 4
    assert views.why(records[2], scheduler, 2.0, 0.0, "") == "waits: ann may have 2 running jobs at most"
    with pytest.raises(InputError, match="at most 4, the slots that one user may have, got 5"):
        scheduler.check_fits(5)


def test_a_profiling_run_keeps_to_the_quota_of_its_owner(store: Store) -> None:
    records = [make_record(f"a-{i}", submitted_s=float(i)) for i in range(2)]
    scheduler = _desk(store, Limits(slots=3), *records)
    scheduler.profiling.ask(records[1], 0.0)
    sizes = {job_id: len(move.after) for job_id, move in scheduler.decide(1.0)}
    assert scheduler.profiling.runs["a-1"].sizes == [2, 1]
    assert sizes == {"a-0": 1, "a-1": 2}


def test_a_deadline_that_the_quota_does_not_allow_is_refused_with_the_reason(store: Store) -> None:
    class Known(Knowledge):
        known = property(lambda self: True)

    def deadline(job_id: str) -> JobRecord:
        return make_record(job_id, request={"deadline_s": 1e6}, submitted_s=0.0)

    scheduler = _desk(store, Limits(running=1))
    scheduler.book.add(make_record("first", submitted_s=0.0, promise=_guaranteed()), Knowledge("same"))
    scheduler.add(scheduler.book.records["first"], 0.0)
    answer, _ = promises.promise(deadline("second"), Known("same"), scheduler, 1.0)
    assert not answer.admitted and "ann may have 1 running job at most" in answer.reason


def test_a_decision_beyond_the_bounds_is_cut_on_every_node() -> None:
    decision = Decision(np.array([5, 2]), np.array([[2, 3], [0, 2]]))
    cut = within(decision, np.array([3, 2]))
    assert cut.gpus.tolist() == [3, 2] and cut.per_node is not None
    assert cut.per_node.tolist() == [[2, 1], [0, 2]]
    assert within(decision, np.array([9, 9])) is decision


def _guaranteed() -> promises.Promise:
    return promises.Promise(admitted=True, guaranteed_s=1e6, estimate=promises.Estimate(finish_s=None))
