"""ElasticFlow: who comes in, what everyone reserves, and where spare GPUs go."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.policies.test_deadlines import assert_powers_of_two_where_bounds_have_one

from swell.domain import Cluster
from swell.policies import make_policy
from swell.policies.elasticflow import ElasticFlow

SATURATING = [[0, 1.0, 1.5, 1.6, 2.0, 2.0, 2.0, 2.0, 2.2]]
"""1, 1.5, 2.0 and 2.2 units of work a second on 1, 2, 4 and 8 GPUs."""


def test_a_job_gets_its_minimum_share_and_no_more_while_others_need_theirs(make_snapshot: Any) -> None:
    # Job 0 needs 4 GPUs to make it, jobs 1 to 4 one each: the cluster is full.
    snapshot = make_snapshot(
        5, cluster="2x4", rates=SATURATING, left=[200, 95, 95, 95, 95], deadline_s=[101] + [100] * 4
    )
    assert ElasticFlow().allocate(snapshot).gpus.tolist() == [4, 1, 1, 1, 1]


def test_spare_gpus_go_where_they_cost_the_least_extra_gpu_time(make_snapshot: Any) -> None:
    linear, flat = [0, 1, 2, 3], [0, 1, 1.1, 1.15]
    snapshot = make_snapshot(
        2, cluster="1x3", rates=[linear, flat], curve=[1, 0], left=100, deadline_s=[1000, 1000]
    )
    # One each is enough; the third GPU costs the linear job nothing, the flat one a lot.
    assert ElasticFlow().allocate(snapshot).gpus.tolist() == [1, 2]


def test_a_job_is_never_given_gpus_that_slow_it_down(make_snapshot: Any) -> None:
    snapshot = make_snapshot(1, cluster="2x4", rates=[[0, 1, 1.8, 1.7, 1.6, 1, 1, 1, 1]], deadline_s=5000)
    assert ElasticFlow().allocate(snapshot).gpus.tolist() == [2]


def test_best_effort_jobs_live_on_what_the_promised_leave(make_snapshot: Any) -> None:
    snapshot = make_snapshot(
        3, cluster="1x4", rates=[[0, 1, 2, 3, 4]], left=100, deadline_s=[np.inf, 51, np.inf]
    )
    gpus = ElasticFlow().allocate(snapshot).gpus
    assert gpus[1] == 2
    assert gpus.tolist() == [1, 2, 1]


def test_a_job_in_time_is_admitted_with_its_deadline_as_promise(make_snapshot: Any) -> None:
    answer = ElasticFlow().admit(make_snapshot(1, cluster="1x4", left=100, deadline_s=26), 0)
    assert answer.admitted
    assert answer.finish_s == 26


def test_a_job_that_is_late_even_alone_is_refused_saying_so(make_snapshot: Any) -> None:
    answer = ElasticFlow().admit(make_snapshot(1, cluster="1x4", left=100, deadline_s=20), 0)
    assert not answer.admitted
    assert "even alone on the cluster it needs 25 s" in answer.reason
    assert answer.earliest_deadline_s == pytest.approx(25, abs=0.1)


def test_a_job_is_refused_rather_than_break_a_promise(make_snapshot: Any) -> None:
    snapshot = make_snapshot(2, cluster="1x4", left=[100, 10], deadline_s=[26, 10])
    policy = ElasticFlow()
    alone = snapshot.with_rows(np.array([0]))
    policy.accepted(alone, 0, policy.admit(alone, 0))
    answer = policy.admit(snapshot, 1)
    assert not answer.admitted
    assert "promises to other jobs (1)" in answer.reason
    assert answer.earliest_deadline_s == pytest.approx(27.5, abs=0.3)


def test_a_job_that_cannot_run_at_all_is_refused(make_snapshot: Any) -> None:
    answer = ElasticFlow().admit(make_snapshot(1, cluster="1x2", rates=[[0, 0, 0]], deadline_s=1e6), 0)
    assert not answer.admitted
    assert answer.earliest_deadline_s is None


def test_a_late_job_does_not_shut_the_door_for_newcomers(make_snapshot: Any) -> None:
    snapshot = make_snapshot(2, cluster="1x4", now_s=50.0, left=[1000, 10], deadline_s=[60, 70])
    assert ElasticFlow().admit(snapshot, 1).admitted
    assert ElasticFlow().allocate(snapshot).gpus.sum() == 4


def test_a_resize_is_planned_for(make_snapshot: Any) -> None:
    snapshot = make_snapshot(1, cluster="1x4", left=100, deadline_s=27)
    assert ElasticFlow(overhead_s=1).admit(snapshot, 0).admitted
    assert not ElasticFlow(overhead_s=3).admit(snapshot, 0).admitted
    # Already on its four GPUs, nothing has to change.
    running = make_snapshot(1, cluster="1x4", left=100, deadline_s=27, gpus=4)
    assert ElasticFlow(overhead_s=3).admit(running, 0).admitted


def test_what_runs_is_left_alone_where_a_change_would_not_pay(make_snapshot: Any) -> None:
    almost_done = make_snapshot(1, cluster="1x4", left=20, deadline_s=1000, gpus=2)
    assert ElasticFlow(overhead_s=30).allocate(almost_done).gpus.tolist() == [2]
    assert ElasticFlow(overhead_s=0).allocate(almost_done).gpus.tolist() == [4]


def test_it_asks_to_be_woken_when_a_reserved_share_begins(make_snapshot: Any) -> None:
    # Both GPUs until 50 for job 0, whose deadline is first; job 1 can only begin then.
    snapshot = make_snapshot(2, cluster="1x2", rates=[[0, 0, 2]], left=[100, 50], deadline_s=[51, 80])
    policy = ElasticFlow()
    decision = policy.allocate(snapshot)
    assert decision.gpus.tolist() == [2, 0]
    assert policy.next_wakeup_s(snapshot, decision) == np.inf, "job 0's end is an event of its own"
    assert policy.admit(snapshot, 1).admitted


def test_asking_a_thousand_times_changes_nothing(make_snapshot: Any) -> None:
    def fresh() -> tuple[ElasticFlow, Any]:
        snapshot = make_snapshot(
            4, cluster="1x4", left=[100, 90, 80, 70], deadline_s=[60, 120, 180, 70], gpus=[2, 1, 1, 0]
        )
        snapshot.resize_cost_s = 1.0
        policy = ElasticFlow()
        first = snapshot.with_rows(np.array([0]))
        policy.accepted(first, 0, policy.admit(first, 0))
        policy.allocate(snapshot.with_rows(np.array([0, 1, 2])))
        return policy, snapshot

    asked, snapshot = fresh()
    before = pickle.dumps(vars(asked))
    answers = {asked.admit(snapshot.with_rows(snapshot.rows), 3).admitted for _ in range(999)}
    answers |= {asked.admit(snapshot.with_rows(np.array([0, 1, 2])), 2).admitted}
    assert len(answers) == 1
    assert pickle.dumps(vars(asked)) == before
    never_asked, _ = fresh()
    for policy in (asked, never_asked):
        policy.accepted(snapshot, 3, policy.admit(snapshot, 3))
    assert asked.allocate(snapshot).gpus.tolist() == never_asked.allocate(snapshot).gpus.tolist()
    assert pickle.dumps(vars(asked)) == pickle.dumps(vars(never_asked))


def test_a_job_that_came_in_is_remembered_by_number(make_snapshot: Any) -> None:
    snapshot = make_snapshot(3, cluster="1x4", left=100, deadline_s=[200, 300, 400])
    snapshot.table.number[:] = [7, 5, 6]
    policy = ElasticFlow()
    seen = snapshot.with_rows(np.array([1, 2, 0]))
    policy.accepted(seen, 2, policy.admit(seen, 2))
    assert policy._in_force.numbers.tolist() == [5, 6, 7]
    policy.allocate(snapshot.with_rows(np.array([2, 0])))
    assert policy._in_force.numbers.tolist() == [6, 7]


def test_the_order_of_rows_changes_no_decision(make_snapshot: Any) -> None:
    """The same jobs in other rows of the table, as after rows were used again."""
    rng = np.random.default_rng(5)
    left, deadline_s = rng.uniform(10, 200, 9), rng.uniform(50, 400, 9)
    rates, curve = [[0, 1, 1.8, 2, 3], [0, 1, 1.2, 1.3, 1.4]], rng.integers(0, 2, 9)
    row_of = rng.permutation(9)

    def decide(rows: Any) -> list[Any]:
        job = np.argsort(rows)  # row -> job
        snapshot = make_snapshot(
            9, cluster="1x4", rates=rates, left=left[job], deadline_s=deadline_s[job], curve=curve[job]
        )
        snapshot.table.number[:] = job
        policy, answers = ElasticFlow(), []
        active: list[int] = []
        for i in range(9):
            seen = snapshot.with_rows(np.array([*active, rows[i]]))
            answer = policy.admit(seen, len(active))
            answers.append((answer.admitted, answer.reason, answer.earliest_deadline_s))
            if answer.admitted:
                policy.accepted(seen, len(active), answer)
                active.append(rows[i])
        answers.append(policy.allocate(snapshot.with_rows(np.array(active))).gpus.tolist())
        return answers

    assert decide(row_of) == decide(np.arange(9))


def test_lost_nodes_cost_as_few_promises_as_can_be(make_snapshot: Any) -> None:
    full = make_snapshot(2, cluster="2x2", left=[100, 100], deadline_s=[60, 61])
    policy = ElasticFlow()
    policy.allocate(full)
    half = make_snapshot(
        2, cluster=Cluster.parse("2x2").with_node(1, up=False), left=[100, 100], deadline_s=[60, 61]
    )
    assert policy.allocate(half).gpus.tolist() == [2, 0]


@settings(max_examples=100)
@given(data=st.data())
def test_shares_are_legal_and_within_capacity(snapshots: Any, data: st.DataObject) -> None:
    snapshot = data.draw(snapshots)
    gpus = make_policy("elasticflow").allocate(snapshot).gpus
    assert gpus.sum() <= snapshot.capacity
    running = gpus > 0
    assert_powers_of_two_where_bounds_have_one(snapshot, gpus)
    assert np.all(gpus[running] >= snapshot.min_gpus[running])
    assert np.all(gpus <= snapshot.max_gpus)
    assert np.all(snapshot.rate_at(np.minimum(gpus, snapshot.curves.max_gpus))[running] > 0)


@settings(max_examples=100)
@given(data=st.data())
def test_the_deadline_named_in_a_refusal_is_admitted(snapshots: Any, data: st.DataObject) -> None:
    snapshot = data.draw(snapshots)
    index, table = len(snapshot) - 1, snapshot.table
    row = snapshot.rows[index]
    table.deadline_s[row] = snapshot.now_s + data.draw(st.sampled_from([0.01, 10.0, 1000.0]))
    policy = ElasticFlow()
    policy.allocate(snapshot.with_rows(snapshot.rows[:-1]))
    answer = policy.admit(snapshot.with_rows(snapshot.rows), index)
    if answer.earliest_deadline_s is not None:
        assert not answer.admitted
        assert answer.earliest_deadline_s > table.deadline_s[row]
        table.deadline_s[row] = answer.earliest_deadline_s
        assert policy.admit(snapshot.with_rows(snapshot.rows), index).admitted
