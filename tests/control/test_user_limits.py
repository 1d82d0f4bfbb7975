"""Limits of a user's slots and running jobs: kept under every policy, shared out fairly, explained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.control.conftest import make_record
from tests.control.virtual import VirtualPlatform, make_trace, most_held

from swell.control import promises, views
from swell.control.book import Book
from swell.control.knowledge import Knowledge
from swell.control.limits import OwnerLimits
from swell.control.model import JobRecord
from swell.control.scheduler import Scheduler
from swell.control.store import Store, connect
from swell.domain import Cluster, Event, EventKind, InputError, JobSpec
from swell.policies import Decision
from swell.policies.by_user import Contender, Use, UserLimits, share_out, within
from swell.policies.registry import policy_names
from swell.sim import simulate

TRACE = make_trace(5, 10, "2x4", 0.1)
LIMITS = OwnerLimits(running=2, slots=3)


class TwoUsers(VirtualPlatform):
    """Every third job is Ben's."""

    def owner(self, spec: JobSpec) -> str:
        return "ben" if int(spec.job_id[1:]) % 3 == 0 else "ann"


@pytest.fixture(autouse=True)
def _no_looking_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promises, "MOST_JOBS", 0)


@pytest.mark.parametrize("policy", policy_names())
def test_no_policy_gives_a_user_more_than_the_limit(policy: str, tmp_path: Path) -> None:
    platform = TwoUsers(TRACE, policy, tmp_path, cost_s=5.0, round_s=None, limits=LIMITS)
    events = platform.run()
    most = most_held(events)
    assert set(most) == {"ann", "ben"}
    assert all(jobs <= 2 and slots <= 3 for jobs, slots in most.values()), most
    assert max(most.values()) == (2, 3), "the limits are not used up, so nothing was tried here"
    ended = [event for event in events if event.kind in (EventKind.FINISHED, EventKind.REJECTED)]
    assert len(ended) == len(TRACE.jobs), "a job waits for ever"
    late = [e for e in ended if e.kind is EventKind.FINISHED and e.data.get("met") is False]
    if platform.plane._conductor.scheduler.gives_promises:
        assert not late, "a promise was broken by a limit"
    platform.store.close()


contenders = st.lists(
    st.builds(
        lambda user, least, more, promised, running: {
            "user": user, "least": least, "most": least + more, "promised": promised, "running": running,
        },
        st.sampled_from("ab"), st.integers(1, 4), st.integers(0, 9), st.booleans(), st.booleans(),
    ),
    max_size=12,
)  # fmt: skip


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(contenders, st.none() | st.integers(1, 5), st.none() | st.integers(1, 12), st.integers(0, 3))
def test_shares_keep_to_the_limit_and_waste_none_of_it(
    raw: list[dict[str, object]], running: int | None, slots: int | None, profiled: int
) -> None:
    jobs = [Contender(**fields) for fields in raw]  # type: ignore[arg-type]
    used = {"a": Use(1, profiled)} if profiled else {}
    allowed = share_out(jobs, UserLimits(running=running, slots=slots), used)
    assert set(allowed.most) | set(allowed.why_not) == set(range(len(jobs)))
    assert not set(allowed.most) & set(allowed.why_not)
    for user in "ab":
        mine = [i for i, job in enumerate(jobs) if job.user == user]
        run = [i for i in mine if i in allowed.most]
        own = used.get(user, Use())
        assert all(jobs[i].least <= allowed.most[i] <= jobs[i].most for i in run)
        assert running is None or not run or len(run) + own.jobs <= running
        given_out = sum(allowed.most[i] for i in run)
        assert slots is None or not run or given_out + own.slots <= slots
        could_use = sum(jobs[i].most for i in run)
        if run and slots is not None:
            assert given_out == min(could_use, slots - own.slots), "some of the limit is wasted"
        if any(jobs[i].promised for i in mine if i in allowed.why_not):
            assert all(jobs[i].promised for i in run), "a job without a promise went before one with"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store(connect(str(tmp_path / "store.db")))
    yield opened
    opened.close()


def _desk(store: Store, limits: OwnerLimits, *records: JobRecord) -> Scheduler:
    scheduler = Scheduler(Book(store), "elasticflow", Cluster.parse("1x8"), None, limits)
    for record in records:
        scheduler.book.add(record, Knowledge("same"))
        scheduler.add(record, 0.0)
    return scheduler


def test_a_job_that_waits_for_its_owners_limit_says_so(store: Store) -> None:
    records = [make_record(f"a-{i}", submitted_s=float(i)) for i in range(3)]
    scheduler = _desk(store, OwnerLimits(running=2, slots=4), *records)
    moves = dict(scheduler.decide(1.0))
    assert set(moves) == {"a-0", "a-1"} and sum(len(move.after) for move in moves.values()) <= 4
    assert views.why(records[2], scheduler, 2.0, 0.0, "") == "waits: ann may have 2 running jobs at most"
    with pytest.raises(InputError, match="at most 4, the slots that one user may have, got 5"):
        scheduler.check_fits(5)


def test_a_profiling_run_keeps_to_the_limit_of_its_owner(store: Store) -> None:
    records = [make_record(f"a-{i}", submitted_s=float(i)) for i in range(2)]
    scheduler = _desk(store, OwnerLimits(slots=3), *records)
    scheduler.profiling.ask(records[1], 0.0)
    sizes = {job_id: len(move.after) for job_id, move in scheduler.decide(1.0)}
    assert scheduler.profiling.runs["a-1"].sizes == [2, 1]
    assert sizes == {"a-0": 1, "a-1": 2}


def test_a_deadline_that_the_limit_does_not_allow_is_refused_with_the_reason(store: Store) -> None:
    class Known(Knowledge):
        known = property(lambda self: True)

    def deadline(job_id: str) -> JobRecord:
        return make_record(job_id, request={"deadline_s": 1e6}, submitted_s=0.0)

    scheduler = _desk(store, OwnerLimits(running=1))
    scheduler.book.add(replace(deadline("first"), promise=_guaranteed()), Knowledge("same"))
    scheduler.add(scheduler.book.records["first"], 0.0)
    answer, _ = promises.promise(deadline("second"), Known("same"), scheduler, 1.0)
    assert not answer.admitted and "ann may have 1 running job at most" in answer.reason


def test_a_decision_beyond_the_bounds_is_cut_on_every_node() -> None:
    decision = Decision(np.array([5, 2]), np.array([[2, 3], [0, 2]]))
    cut = within(decision, np.array([3, 2]))
    assert cut.gpus.tolist() == [3, 2] and cut.per_node is not None
    assert cut.per_node.tolist() == [[2, 1], [0, 2]]
    assert within(decision, np.array([9, 9])) is decision


def test_a_job_that_no_user_could_run_is_refused_by_field() -> None:
    job = JobSpec(job_id="wide", submit_s=0.0, model="m", batch_size=1, min_gpus=4)
    with pytest.raises(InputError, match="must be at most 3, the slots that one user may have") as refused:
        UserLimits(slots=3).check_fits(job)
    assert refused.value.field == "min_gpus"
    UserLimits(slots=4, running=1).check_fits(job)


def _guaranteed() -> promises.Promise:
    return promises.Promise(admitted=True, guaranteed_s=1e6, estimate=promises.Estimate(finish_s=None))


def test_whole_replicas_do_not_lead_beyond_the_limit() -> None:
    """Slots that come in pairs: what one user's rounding frees is not given to another beyond the limit."""
    jobs = [
        JobSpec(
            job_id=f"j{i}", submit_s=0.0, model="j0", batch_size=1, work=500.0, gpus=4, gpus_per_replica=2,
            user="ben" if i else "ann",
        )
        for i in range(2)
    ]  # fmt: skip
    events: list[Event] = []
    simulate(
        jobs, TRACE.profiles, TRACE.cluster, "fifo", belief="profiles", resize_cost=1.0,
        user_limits=UserLimits(slots=3), on_event=events.append,
    )  # fmt: skip
    assert most_held(events) == {"ann": (1, 2), "ben": (1, 2)}
