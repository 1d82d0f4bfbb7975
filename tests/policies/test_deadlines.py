"""Earliest deadline first: the order, the width of shares, and the gate."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from swell.policies.deadlines import Edf, EdfAdmission


def test_the_most_urgent_job_takes_all_it_can_use(make_snapshot: Any) -> None:
    snapshot = make_snapshot(3, cluster="2x4", deadline_s=[300, 100, 200])
    assert Edf().allocate(snapshot).gpus.tolist() == [0, 8, 0]


def test_the_next_take_the_largest_power_of_two_that_is_left(make_snapshot: Any) -> None:
    snapshot = make_snapshot(3, cluster="2x4", deadline_s=[300, 100, 200], max_gpus=[8, 1, 8])
    assert Edf().allocate(snapshot).gpus.tolist() == [2, 1, 4]


def test_a_late_job_stays_at_the_head(make_snapshot: Any) -> None:
    snapshot = make_snapshot(2, cluster="2x4", now_s=500.0, deadline_s=[100, 600])
    assert Edf().allocate(snapshot).gpus.tolist() == [8, 0]


def test_best_effort_jobs_come_last_and_oldest_first(make_snapshot: Any) -> None:
    snapshot = make_snapshot(3, cluster="1x2", max_gpus=1, deadline_s=[np.inf, np.inf, 100])
    assert Edf().allocate(snapshot).gpus.tolist() == [1, 0, 1]


def test_scaling_out_ends_where_the_curve_was_last_measured(make_snapshot: Any) -> None:
    # Measured on 1, 2 and 4, slower on 4 than on 2, and flat beyond: the authors go to 4 all the same.
    snapshot = make_snapshot(1, cluster="2x4", rates=[[0, 1, 2, 2, 1.5, 1.5, 1.5, 1.5, 1.5]], deadline_s=100)
    assert Edf().allocate(snapshot).gpus.tolist() == [4]
    assert Edf(widest=2).allocate(snapshot).gpus.tolist() == [2]


def test_the_gate_lets_in_what_will_be_in_time(make_snapshot: Any) -> None:
    snapshot = make_snapshot(2, cluster="1x4", left=[40, 40], deadline_s=[10, 20])
    assert EdfAdmission().admit(snapshot, 1).finish_s == 20


def test_the_gate_refuses_what_would_be_late_behind_the_more_urgent(make_snapshot: Any) -> None:
    snapshot = make_snapshot(2, cluster="1x4", left=[40, 40], deadline_s=[10, 19])
    answer = EdfAdmission().admit(snapshot, 1)
    assert not answer.admitted
    assert "behind the more urgent" in answer.reason


def test_the_gate_refuses_what_would_make_another_late(make_snapshot: Any) -> None:
    snapshot = make_snapshot(2, cluster="1x4", left=[40, 40], deadline_s=[19, 10])
    answer = EdfAdmission().admit(snapshot, 1)
    assert not answer.admitted
    assert "job 'job-0'" in answer.reason


def test_a_job_that_is_late_anyway_does_not_close_the_gate(make_snapshot: Any) -> None:
    snapshot = make_snapshot(2, cluster="1x4", left=[400, 40], deadline_s=[50, 120])
    assert EdfAdmission().admit(snapshot, 1).admitted


def assert_powers_of_two_where_bounds_have_one(snapshot: Any, gpus: Any) -> None:
    """A share is a power of two; only a job whose bounds contain none gets its minimum."""
    for share, least, most in zip(gpus, snapshot.min_gpus, snapshot.max_gpus, strict=True):
        if share & (share - 1):
            assert share == least
            assert 1 << int(least).bit_length() > min(most, snapshot.capacity)


@settings(max_examples=100)
@given(data=st.data())
def test_shares_are_legal_and_within_capacity(snapshots: Any, data: st.DataObject) -> None:
    snapshot = data.draw(snapshots)
    gpus = Edf().allocate(snapshot).gpus
    assert gpus.sum() <= snapshot.capacity
    assert_powers_of_two_where_bounds_have_one(snapshot, gpus)
    assert np.all(gpus <= snapshot.max_gpus)
    assert np.all(snapshot.rate_at(gpus)[gpus > 0] > 0)
