"""How fast jobs on one GPU are: what was measured, what the rule says, and what promises count on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swell.perf.sharing import (
    LEAST_OF_SHARE,
    OnGpu,
    alone_speed,
    fair_level,
    promised_part,
    speeds_on_gpu,
)

fills = st.floats(0.01, 1.0)
jobs_on_gpu = st.lists(st.builds(OnGpu, fills, st.integers(1, 3)), min_size=1, max_size=5)


def test_four_small_jobs_are_as_fast_as_was_measured() -> None:
    """docs/lab/shared-gpus.md: 133.5 steps a second alone; 115.6, 115.4, 116.2 and 115.5 side by side."""
    assert speeds_on_gpu([OnGpu(0.2)] * 4) == pytest.approx([115.7 / 133.5] * 4, rel=0.01)


def test_jobs_that_fill_the_gpu_share_its_time_and_lose_nothing_together() -> None:
    assert speeds_on_gpu([OnGpu(1.0)] * 4) == [0.25] * 4


def test_a_job_that_fills_the_gpu_and_a_small_one_stay_side_by_side() -> None:
    large, small = speeds_on_gpu([OnGpu(1.0), OnGpu(0.3)])
    assert (large, small) == pytest.approx((0.7, 0.956))


def test_a_jobs_own_workers_share_its_gpu() -> None:
    assert alone_speed(OnGpu(0.2, 4)) == 1.0
    assert alone_speed(OnGpu(1.0, 4)) == 0.25
    assert speeds_on_gpu([OnGpu(1.0, 3)]) == pytest.approx([1 / 3])
    assert speeds_on_gpu([OnGpu(1.0, 3), OnGpu(1.0)]) == pytest.approx([0.25, 0.25])


@given(jobs_on_gpu)
def test_the_time_of_a_gpu_is_shared_max_min_fairly(jobs: list[OnGpu]) -> None:
    level = fair_level(jobs)
    used = sum(min(job.fill, level) * job.workers for job in jobs)
    asked = sum(job.fill * job.workers for job in jobs)
    assert used == pytest.approx(min(asked, 1.0))
    assert asked >= 1.0 or all(job.fill <= level for job in jobs)


@given(jobs_on_gpu, st.floats(0.0, 0.3))
def test_no_worker_is_slower_than_promises_count_on(jobs: list[OnGpu], contention: float) -> None:
    slots = sum(job.workers for job in jobs)
    for speed in speeds_on_gpu(jobs, contention):
        assert promised_part(slots) * (1 - 1e-9) <= speed <= 1.0


@given(jobs_on_gpu)
def test_together_jobs_are_never_slower_than_one_after_the_other(jobs: list[OnGpu]) -> None:
    relative = [speed / alone_speed(job) for speed, job in zip(speeds_on_gpu(jobs), jobs, strict=True)]
    assert sum(relative) >= 1.0 - 1e-9


def test_on_a_gpu_of_its_own_a_promise_counts_on_all_of_it() -> None:
    assert promised_part(1) == 1.0
    assert promised_part(4) == LEAST_OF_SHARE / 4
