"""The simulator's clock: what happens when, hand-calculated on small cases, and invariants on random ones."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.control.virtual import make_trace

from swell.domain import Cluster, Event, EventKind, InputError, JobSpec, overlapping
from swell.perf.profiles import ProfileSet
from swell.policies import Admission, Decision, Policy, Snapshot, policy_names
from swell.report.runs import Run
from swell.sim import ConstantCost, ModelledCost, NodeFailure, parse_cost, simulate
from swell.sim.generate import generate_jobs

PROFILES = ProfileSet.load(None)
MODEL = PROFILES.names[0]


def batch_of(model: str) -> int:
    return PROFILES.get(model).limits.init_batch


def job(name: str, submit_s: float, seconds: float, gpus: int = 1, **more: float) -> JobSpec:
    """A job that needs `seconds` on one GPU of a single node."""
    profile = PROFILES.get(MODEL)
    rate = profile.rate((1,), batch_of(MODEL), profile.gpu_types[0])
    return JobSpec(
        job_id=name,
        submit_s=submit_s,
        model=MODEL,
        batch_size=batch_of(MODEL),
        gpus=gpus,
        work=seconds * rate,
        **more,  # type: ignore[arg-type]
    )


@dataclass(kw_only=True)
class OneEach(Policy):
    """One GPU to each job in order of arrival; refuses whoever asks for 7."""

    name: ClassVar[str] = "one-each"
    paper: ClassVar[str] = "none"
    goal: ClassVar[str] = "tests"

    def admit(self, snapshot: Snapshot, index: int) -> Admission:
        return Admission(bool(snapshot.requested[index] != 7), reason="seven is too many")

    def allocate(self, snapshot: Snapshot) -> Decision:
        gpus = np.zeros(len(snapshot), dtype=np.int64)
        gpus[: snapshot.capacity] = 1
        return Decision(gpus)


def test_jobs_run_one_after_the_other_on_one_gpu() -> None:
    result = simulate([job("a", 0, 100), job("b", 10, 50)], PROFILES, Cluster.parse("1x1"), OneEach())
    assert result.finish_s == pytest.approx([100.0, 150.0])
    assert result.record()["avg_jct_s"] == pytest.approx((100 + 140) / 2)
    assert result.record()["gpu_utilisation"] == pytest.approx(1.0)


def test_the_start_pays_the_resize_cost() -> None:
    result = simulate([job("a", 5, 100)], PROFILES, Cluster.parse("1x1"), OneEach(), resize_cost=30.0)
    assert result.finish_s == pytest.approx([135.0])
    assert result.record()["resizes"] == 0


def test_with_rounds_decisions_wait_for_the_next_multiple() -> None:
    jobs = [job("a", 5, 100), job("b", 70, 10)]
    result = simulate(jobs, PROFILES, Cluster.parse("1x1"), OneEach(), interval_s=60.0)
    # a starts at 60 and ends at 160; b starts in the round after that
    assert result.finish_s == pytest.approx([160.0, 190.0])


def test_a_refused_job_counts_as_a_missed_deadline() -> None:
    jobs = [job("a", 0, 100, deadline_s=100.5), job("b", 0, 10, gpus=7, deadline_s=1000)]
    record = simulate(jobs, PROFILES, Cluster.parse("1x8"), OneEach()).record()
    assert (record["finished"], record["rejected"]) == (1, 1)
    assert (record["deadline_jobs"], record["deadline_met"], record["deadline_ratio"]) == (2, 1, 0.5)


def test_a_deadline_missed_by_overhead_is_missed() -> None:
    jobs = [job("a", 0, 100, deadline_s=100.5)]
    record = simulate(jobs, PROFILES, Cluster.parse("1x1"), OneEach(), resize_cost=1.0).record()
    assert record["deadline_met"] == 0


def test_a_lost_node_puts_its_job_back_and_the_work_done_is_kept() -> None:
    events: list[Event] = []
    result = simulate(
        [job("a", 0, 100), job("b", 0, 100)],
        PROFILES,
        Cluster.parse("2x1"),
        OneEach(),
        failures=[NodeFailure(node=0, at_s=40.0, repair_s=20.0)],
        on_event=events.append,
    )
    # a loses its node at 40 and waits for the repair at 60, unless it is given b's node (it is older)
    assert sorted(result.finish_s) == pytest.approx([100.0, 120.0])
    kinds = [e.kind for e in events]
    assert EventKind.NODE_LOST in kinds and EventKind.NODE_JOINED in kinds and EventKind.PREEMPTED in kinds


def test_how_far_a_job_is_goes_into_the_log_when_it_is_resized() -> None:
    @dataclass(kw_only=True)
    class Growing(OneEach):
        def allocate(self, snapshot: Snapshot) -> Decision:
            return Decision(np.full(len(snapshot), 1 if snapshot.now_s < 30 else 2))

        def next_wakeup_s(self, snapshot: Snapshot, decision: Decision) -> float:
            return 30.0 if snapshot.now_s < 30 else math.inf

    events: list[Event] = []
    simulate([job("a", 0, 100)], PROFILES, Cluster.parse("1x2"), Growing(), on_event=events.append)
    (progress,) = [event for event in events if event.kind is EventKind.PROGRESS]
    assert progress.time_s == 30.0 and progress.data["done"] / progress.data["of"] == pytest.approx(0.3)
    assert progress.data["batch_size"] == batch_of(MODEL)


def test_a_policy_that_gives_nothing_ends_the_run_and_says_so() -> None:
    @dataclass(kw_only=True)
    class Miser(OneEach):
        def allocate(self, snapshot: Snapshot) -> Decision:
            return Decision(np.zeros(len(snapshot), dtype=np.int64))

    for interval_s in (None, 60.0):
        record = simulate([job("a", 0, 1)], PROFILES, Cluster.parse("1x1"), Miser(), interval_s=interval_s)
        assert record.stalled and record.record()["finished"] == 0


def test_nothing_to_simulate_is_refused() -> None:
    with pytest.raises(InputError, match="no jobs"):
        simulate([], PROFILES, Cluster.parse("1x1"), "fifo")


def test_costs() -> None:
    assert parse_cost("30") == ConstantCost(30.0)
    model = parse_cost("model")
    assert isinstance(model, ModelledCost)
    assert model.seconds(1.25e9, 0, 1) > model.seconds(1.25e9, 1, 2) > model.seconds(1.25e9, 2, 1) > 0
    for bad in ("-1", "x", "nan", "inf", ""):
        with pytest.raises(InputError, match="resize cost"):
            parse_cost(bad)


class Auditor:
    """Follows the event log and checks what must hold at every moment."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.held: dict[str, tuple[int, ...]] = {}
        self.seen: list[Event] = []
        self.ended: set[str] = set()
        self.down: set[int] = set()

    def __call__(self, event: Event) -> None:
        last_s = self.seen[-1].time_s if self.seen else -math.inf
        assert event.time_s >= last_s, "time runs backwards"
        self.seen.append(event)
        if event.kind in (EventKind.ALLOCATED, EventKind.RESIZED):
            assert event.job_id is not None and event.job_id not in self.ended
            self.held[event.job_id] = tuple(event.data["gpus"])
        elif event.kind in (EventKind.FINISHED, EventKind.PREEMPTED, EventKind.REJECTED):
            assert event.job_id is not None
            self.held.pop(event.job_id, None)
            if event.kind != EventKind.PREEMPTED:
                self.ended.add(event.job_id)

    def check(self) -> None:
        """No GPU is given twice, none that does not exist is given."""
        assert overlapping(self.held.values()) is None
        for placement in self.held.values():
            assert all(0 <= gpu < len(self.cluster.node_of_gpu) for gpu in placement)
            assert list(placement) == sorted(set(placement))


def by_moment(events: list[Event]) -> list[list[Event]]:
    moments: list[list[Event]] = []
    for event in events:
        if moments and moments[-1][0].time_s == event.time_s:
            moments[-1].append(event)
        else:
            moments.append([event])
    return moments


@pytest.mark.parametrize("policy", policy_names())
@settings(max_examples=6)
@given(
    seed=st.integers(0, 10_000),
    shape=st.sampled_from(["1x4", "2x4", "3x2", "4x8"]),
    cost=st.sampled_from([0.0, 30.0]),
)
def test_every_policy_keeps_the_books_straight(policy: str, seed: int, shape: str, cost: float) -> None:
    cluster = Cluster.parse(shape)
    jobs = generate_jobs(PROFILES, jobs=12, hours=0.5, seed=seed, deadlines=0.5)
    options = ":generations=5,population=10" if policy == "pollux" else ""
    log: list[Event] = []
    result = simulate(jobs, PROFILES, cluster, policy + options, resize_cost=cost, on_event=log.append)
    auditor = Auditor(cluster)
    for moment in by_moment(log):
        for event in moment:
            auditor(event)
        auditor.check()
    record = result.record()
    assert record["finished"] + record["rejected"] == record["jobs"], "every job ends"
    assert not auditor.held
    assert 0 < record["gpu_utilisation"] <= 1 + 1e-9
    jct = result.jct_s
    assert np.all(jct > 0)

    again: list[Event] = []
    simulate(jobs, PROFILES, cluster, policy + options, resize_cost=cost, on_event=again.append)
    assert [e.to_json() for e in again] == [e.to_json() for e in log], "same seed, same result"


def test_a_job_on_two_gpu_types_runs_at_the_slower_ones_pace() -> None:
    kinds = PROFILES.get(MODEL).gpu_types
    assert len(kinds) > 1, "the shipped profiles know several types"
    profile, batch = PROFILES.get(MODEL), batch_of(MODEL)
    fast, slow = sorted(kinds, key=lambda kind: -profile.rate((1,), batch, kind))[:2]
    jobs = [job("a", 0, 100), job("b", 0, 100)]
    result = simulate(jobs, PROFILES, Cluster.parse(f"1x1:{fast},1x1:{slow}"), OneEach())
    times = sorted(jobs[0].work / profile.rate((1,), batch, kind) for kind in (fast, slow))  # type: ignore[operator]
    assert sorted(result.finish_s) == pytest.approx(times)
    assert times[0] < times[1]


def test_adaptive_jobs_train_on_mixed_types() -> None:
    jobs = generate_jobs(PROFILES, jobs=6, hours=0.2, seed=3, deadlines=0.0)
    cluster = Cluster.parse("1x4:A100,1x4:T4")
    record = simulate(jobs, PROFILES, cluster, "pollux:generations=5,population=10").record()
    assert record["finished"] == 6 and record["belief"] == "fitted"


@settings(max_examples=15)
@given(seed=st.integers(0, 10_000), shape=st.sampled_from(["2x4", "4x2", "1x8"]))
def test_elasticflow_with_exact_curves_and_free_resizes_breaks_no_promise(seed: int, shape: str) -> None:
    jobs = generate_jobs(PROFILES, jobs=25, hours=1.0, seed=seed, deadlines=1.0)
    result = simulate(jobs, PROFILES, Cluster.parse(shape), "elasticflow")
    assert (~np.isnan(result.promised_s)).sum() > 0
    assert result.promises_broken == 0


@pytest.mark.parametrize("policy", ["srtf", "gandiva", "tide"])
def test_a_run_has_as_many_resizes_as_its_report(policy: str) -> None:
    trace, events = make_trace(5, 30, "2x4", 0.3), list[Event]()
    failures = [NodeFailure(0, 600.0, 900.0)]
    result = simulate(
        trace.jobs, trace.profiles, trace.cluster, policy, failures=failures, on_event=events.append
    )
    returned = Counter(event.job_id for event in events if event.kind is EventKind.ALLOCATED)
    assert result.record()["resizes"] == Run.read("", events).resizes
    assert policy != "srtf" or max(returned.values()) > 1, "jobs lost all their GPUs and came back"
