"""A policy's memory of jobs: by number, whatever the rows, and no longer than the job is there."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from swell.policies.memory import JobMemory


def test_a_newcomer_starts_with_the_default_and_the_others_keep_what_is_theirs(make_snapshot: Any) -> None:
    snapshot = make_snapshot(4)
    memory = JobMemory(queue=0.0, seen_s=-1.0)
    memory.follow(snapshot.with_rows(np.array([0, 2])))
    memory["queue"][:] = [5, 7]
    memory.follow(snapshot)
    assert memory["queue"].tolist() == [5, 0, 7, 0]
    assert memory["seen_s"].tolist() == [-1] * 4


def test_a_job_in_the_row_of_one_that_left_inherits_nothing(make_snapshot: Any) -> None:
    snapshot = make_snapshot(2)
    memory = JobMemory(queue=0.0)
    memory.follow(snapshot)
    memory["queue"][:] = [5, 7]
    snapshot.table.number[0] = 2
    memory.follow(snapshot.with_rows(np.array([1, 0])))
    assert memory["queue"].tolist() == [7, 0]


@given(st.lists(st.sets(st.integers(0, 30)), max_size=8))
def test_what_is_remembered_is_what_a_dictionary_would_remember(make_snapshot: Any, moments: Any) -> None:
    snapshot = make_snapshot(31)
    memory, expected = JobMemory(count=0.0), dict[int, float]()
    for jobs in map(sorted, moments):
        memory.follow(snapshot.with_rows(np.array(jobs, dtype=np.int64)))
        expected = {job: expected.get(job, 0.0) for job in jobs}
        assert memory["count"].tolist() == list(expected.values())
        memory["count"][:] += np.arange(1, len(jobs) + 1)
        expected = {job: expected[job] + i for i, job in enumerate(jobs, 1)}
    assert len(memory.numbers) == len(expected), "no more than the active jobs"
