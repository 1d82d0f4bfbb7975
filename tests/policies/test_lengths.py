"""Lengths that nobody says: learnt from the jobs of the same kind that have ended."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from swell.domain import IntArray
from swell.policies import Snapshot
from swell.policies.tide import Lengths, gittins


def index(lengths: list[float], done: float) -> float:
    whole = np.array(sorted(lengths))
    first, last = (np.array([k], dtype=np.int64) for k in (0, len(whole)))
    return float(gittins(whole, first, last, np.array([done]))[0])


def test_if_all_of_a_kind_are_equally_long_the_rest_is_known() -> None:
    assert index([100.0], 0.0) == 100.0
    assert index([100.0, 100.0, 100.0], 30.0) == pytest.approx(70.0)


def test_if_most_are_short_a_new_job_is_probably_short_and_an_old_one_is_not() -> None:
    lengths = [10.0] * 9 + [1000.0]
    assert index(lengths, 0.0) == pytest.approx((9 * 10 + 10) / 9)
    assert index(lengths, 20.0) == pytest.approx(980.0)
    assert index(lengths, 1000.0) == np.inf


def looks(make_snapshot: Any, lefts: list[list[float]], numbers: list[list[int]]) -> tuple[Lengths, Any]:
    """Looks 10 s apart at jobs of one kind; the work left of each, and their numbers."""
    lengths, found = Lengths(), None
    for k, (left, number) in enumerate(zip(lefts, numbers, strict=True)):
        snapshot: Snapshot = make_snapshot(len(left), cluster="2x4", now_s=10.0 * k, left=left, gpus=1)
        snapshot.table.number[:] = number
        one: IntArray = np.ones(len(left))
        found = lengths.left_s(snapshot.with_rows(snapshot.rows), one)
    return lengths, found


def test_what_an_ended_job_took_is_expected_of_the_next_one(make_snapshot: Any) -> None:
    # Job 0 is seen at 25 and 15 to go, and gone 10 s later: its length was 20. Job 1 has done 5.
    _, left = looks(make_snapshot, [[25.0, 500.0], [15.0, 498.0], [495.0]], [[0, 1], [0, 1], [1]])
    assert left.tolist() == [15.0]


def test_the_work_left_is_never_looked_at_itself(make_snapshot: Any) -> None:
    for much in (0.0, 1e6):
        start = [25.0 + much, 500.0]
        _, left = looks(make_snapshot, [start, [start[0] - 10, 498.0], [495.0 - 0.0]], [[0, 1], [0, 1], [1]])
        assert left.tolist() == [15.0]


def test_before_the_first_end_a_kind_is_twice_as_long_as_its_furthest_job(
    make_snapshot: Any,
) -> None:
    _, left = looks(make_snapshot, [[100.0, 900.0], [92.0, 880.0]], [[0, 1], [0, 1]])
    assert left.tolist() == [2 * 20.0 - 8.0, 20.0]


def test_kinds_are_trusted_only_while_they_predict_lengths(make_snapshot: Any) -> None:
    """Jobs that end one after the other, each in the 10 s after it was seen with so much done."""
    for spread, trusted in ((1.0, True), (3.0, False)):
        lengths = Lengths()
        assert not lengths.trusted
        for k in range(8):
            done = 100.0 * spread ** (k % 3)
            for left, now_s in ((done + 10, 20.0 * k), (10.0, 20.0 * k + 10)):
                snapshot = make_snapshot(1, cluster="1x4", now_s=now_s, left=left, gpus=1)
                snapshot.table.number[:] = k
                lengths.left_s(snapshot.with_rows(snapshot.rows), np.ones(1))
        assert lengths.trusted is trusted
