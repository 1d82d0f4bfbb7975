"""Rows come in any order and are used again: no policy and no placer may decide otherwise because of it.

The same history (a crowd of jobs at first, then jobs that leave and jobs that come) is kept in two tables.
In one of them job i has row i for ever, as in the simulator. In the other, jobs take any free row, and rows
of jobs that left are soon used again. A policy of its own decides for each table; all decisions, answers and
placements must be the same, job by job.
"""

from __future__ import annotations

import numpy as np
import pytest
from tests.policies.histories import CLUSTER, Books, make_history

from swell.domain import overlapping
from swell.policies import make_policy, policy_names

CROWDS = [(2_000, 50, 0.1), (150, 50, 0.9), (40, 15, 0.2)]
"""Jobs at first, jobs that come before each later decision, and which part of them has deadlines: far more
jobs than GPUs, many promises, and fewer jobs than GPUs."""

CHEAPER = {"pollux": "pollux:population=12,generations=8", "oasis": "oasis:slots=6,steps=16"}
POLICIES = [CHEAPER.get(name, name) for name in policy_names()]
POLICIES += ["tiresias:thresholds=3250/7200,fifo=start,promote=2", "tiresias-gittins:learn=0"]
POLICIES += ["afs-l:shares=any", "fifo:backfill=true", "themis:lease_s=60"]


@pytest.mark.parametrize(("crowd", "arrivals", "deadlines"), CROWDS)
@pytest.mark.parametrize("text", POLICIES)
def test_decisions_do_not_depend_on_the_rows_that_jobs_are_in(
    text: str, crowd: int, arrivals: int, deadlines: float
) -> None:
    # With OASiS every job without a deadline comes in and buys a schedule beside all others: too slow here.
    history = make_history(crowd, arrivals, 1.0 if text.startswith("oasis") else deadlines)
    plain = Books(history, make_policy(text), None)
    mixed = Books(history, make_policy(text), np.random.default_rng(2))
    for step, (now_s, newcomers) in enumerate(history.steps):
        for books in (plain, mixed):
            books.pass_time(step, now_s)
        for job in newcomers:
            assert mixed.let_in(now_s, job) == plain.let_in(now_s, job)
        assert list(plain.row) == list(mixed.row)

        before, after = plain.snapshot(now_s), mixed.snapshot(now_s)
        assert np.any(np.diff(after.rows) < 0), "the rows are in no order"
        expected, decision = plain.policy.allocate(before), mixed.policy.allocate(after)
        assert decision.gpus.min() >= 0
        assert decision.gpus.sum() <= CLUSTER.capacity
        assert np.all(decision.gpus <= after.max_gpus)
        for name in ("gpus", "per_node", "order"):
            assert np.array_equal(getattr(decision, name), getattr(expected, name)), f"{name}, step {step}"
        wake_s = plain.policy.next_wakeup_s(before, expected)
        assert mixed.policy.next_wakeup_s(after, decision) == wake_s

        plain.carry_out(before, expected)
        mixed.carry_out(after, decision)
        assert mixed.placements() == plain.placements()
        assert overlapping(p for p in mixed.placements() if p) is None
        assert [len(p) for p in mixed.placements()] == decision.gpus.tolist()
