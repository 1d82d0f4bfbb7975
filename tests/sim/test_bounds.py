"""No policy is better than the bounds that benchmarks print beside it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from benchmarks import bounds

from swell.domain import Cluster
from swell.perf.profiles import ProfileSet
from swell.sim import simulate
from swell.sim.generate import generate_jobs


def need(submit_s: float, work: float, deadline_s: float = math.inf) -> bounds.Need:
    """A job that does one unit a second on one GPU and 1.5 on two."""
    rates = np.array([0.0, 1.0, 1.5])
    return bounds.Need(submit_s, deadline_s, work / 1.5, work, rates, work)


def test_a_tight_window_needs_more_gpu_time() -> None:
    job = need(0.0, 150.0)
    assert bounds.least_gpu_s(job, 200.0) == pytest.approx(150.0)
    assert bounds.least_gpu_s(job, 100.0) == pytest.approx(200.0)
    assert bounds.least_gpu_s(job, 120.0) == pytest.approx(180.0), "60 s on one GPU and 60 s on two"
    assert bounds.least_gpu_s(job, 99.0) == math.inf


def test_two_jobs_that_need_the_cluster_at_the_same_time_are_not_both_met() -> None:
    both = [need(0.0, 150.0, 100.0), need(0.0, 150.0, 100.0)]
    assert bounds.most_deadlines(both, 4) == 1.0
    assert bounds.most_deadlines(both, 3) == 0.5
    later = [need(0.0, 150.0, 100.0), need(100.0, 150.0, 200.0)]
    assert bounds.most_deadlines(later, 2) == 1.0
    assert bounds.most_deadlines(later, 2, start_s=1.0) == 0.0


def test_the_shortest_first_bound_of_one_machine() -> None:
    # Work of 4 and 2 machine seconds; the short one comes at 1 s and interrupts.
    found = bounds.least_jct_s([need(0.0, 8.0), need(1.0, 4.0)], 2)
    assert found["pooled"] == pytest.approx((6.0 + 2.0) / 2)
    assert found["alone"] == pytest.approx((8 / 1.5 + 4 / 1.5) / 2)
    assert found["bound"] == max(found["alone"], found["pooled"], found["both"])


def test_work_too_little_for_the_clock_to_show_is_done_all_the_same() -> None:
    # 1e-12 s of work at 1e6 s: the sum of both is 1e6 s again. The bound used to wait for that work for ever.
    found = bounds.least_jct_s([need(1e6, 1e-12), need(1e6, 2.0)], 1)
    assert found["pooled"] == pytest.approx(1.0)
    assert found["both"] == pytest.approx((1.0 + 2.0 / 1.5 / 2) / 2)


@pytest.mark.parametrize("policy", ["tide-fixed", "afs-l"])
@pytest.mark.parametrize("load", [20, 80])
def test_policies_stay_within_the_bounds(policy: str, load: int) -> None:
    profiles, cluster = ProfileSet.load(None), Cluster.parse("2x4")
    jobs = generate_jobs(profiles, jobs=load, hours=1.0, seed=load, deadlines=0.5, max_gpu_hours=4)
    result = simulate(jobs, profiles, cluster, policy, resize_cost=2.0)
    needed = bounds.needs(jobs, profiles, cluster)
    calm = [one for one in needed if math.isinf(one.deadline_s)]
    free = np.isinf(result.deadline_s)
    jct_s = float((result.finish_s - result.submit_s)[free].mean())
    assert jct_s >= bounds.least_jct_s(calm, cluster.capacity, 2.0)["bound"]
    met = result.deadline_met / int((~free).sum())
    assert met <= bounds.most_deadlines(needed, cluster.capacity, 2.0)
