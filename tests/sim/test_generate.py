"""The workload generator has the statistics it claims, and each of them alone can be changed."""

from __future__ import annotations

import csv
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swell.domain import InputError, packed_shape
from swell.perf.profiles import ProfileSet
from swell.sim.generate import (
    ARRIVALS_BY_HOUR,
    GPU_COUNTS,
    QUANTILES,
    SIZES,
    arrivals,
    generate_jobs,
    sizes,
)

DATA = Path(os.environ.get("SWELL_DATA", Path(__file__).parents[3] / "shared" / "data"))
PROFILES = ProfileSet.load(None)


def test_the_same_seed_gives_the_same_jobs() -> None:
    first, again = (generate_jobs(PROFILES, jobs=80, hours=8, seed=4, deadlines=0.5) for _ in range(2))
    assert first == again
    assert first != generate_jobs(PROFILES, jobs=80, hours=8, seed=5, deadlines=0.5)


def test_asking_for_fills_changes_nothing_else() -> None:
    without = generate_jobs(PROFILES, jobs=400, hours=8, seed=4, deadlines=0.5)
    filled = generate_jobs(PROFILES, jobs=400, hours=8, seed=4, deadlines=0.5, fill=(0.1, 0.4))
    assert {job.fill for job in without} == {1.0}
    assert [replace(job, fill=1.0) for job in filled] == without
    fills = np.array([job.fill for job in filled])
    assert 0.1 <= fills.min() < 0.12 and 0.38 < fills.max() <= 0.4
    assert fills.mean() == pytest.approx(0.25, abs=0.02)
    assert filled == generate_jobs(PROFILES, jobs=400, hours=8, seed=4, deadlines=0.5, fill=(0.1, 0.4))


def test_asking_for_deadlines_changes_nothing_else() -> None:
    without = generate_jobs(PROFILES, jobs=80, hours=8, seed=4)
    with_some = generate_jobs(PROFILES, jobs=80, hours=8, seed=4, deadlines=0.25)
    assert [(j.submit_s, j.model, j.batch_size, j.gpus, j.work) for j in without] == [
        (j.submit_s, j.model, j.batch_size, j.gpus, j.work) for j in with_some
    ]
    assert sum(job.deadline_s is not None for job in with_some) == 20


def test_deadlines_are_half_to_one_and_a_half_run_times_away() -> None:
    tightness = []
    for job in generate_jobs(PROFILES, jobs=600, hours=24, seed=2, deadlines=1):
        rate = PROFILES.get(job.model).rate(packed_shape(job.gpus, 4), job.batch_size)
        assert job.work is not None and job.deadline_s is not None
        run_s = job.work / rate
        if run_s > 600:  # the rest is blurred by whole iterations and tenths of seconds
            tightness.append((job.deadline_s - job.submit_s) / run_s)
    assert 0.49 < min(tightness) < 0.55
    assert 1.45 < max(tightness) < 1.51
    assert np.mean(tightness) == pytest.approx(1.0, abs=0.05)


def test_sizes_have_the_shares_of_their_classes() -> None:
    gpu_hours, gpus = sizes(100_000, 1000.0, np.random.default_rng(0))
    found = np.bincount(np.digitize(gpu_hours, [1, 10, 100]), minlength=4) / 100_000
    assert found == pytest.approx([size.share for size in SIZES], abs=0.01)
    assert np.mean(gpus == 1) == pytest.approx(0.93, abs=0.01)
    assert set(gpus) == set(GPU_COUNTS)
    large = gpu_hours > 100
    assert np.mean(gpus[large] >= 4) > 0.7


def test_arrivals_follow_the_hours_of_the_day() -> None:
    moments = arrivals(200_000, 24.0, 0.0, np.random.default_rng(0))
    assert np.all(np.diff(moments) >= 0)
    found = np.bincount((moments // 3600).astype(int), minlength=24) / 200_000 * 24
    assert found == pytest.approx(np.array(ARRIVALS_BY_HOUR) / np.mean(ARRIVALS_BY_HOUR), abs=0.05)


def test_a_window_may_start_within_an_hour_and_run_past_midnight() -> None:
    moments = arrivals(100_000, 3.0, 22.5, np.random.default_rng(0))
    assert moments.min() >= 0 and moments.max() <= 3 * 3600
    edges = np.array([0, 0.5, 1.5, 2.5, 3.0]) * 3600
    rates = np.histogram(moments, edges)[0] / np.diff(edges)
    expected = np.array(ARRIVALS_BY_HOUR)[[22, 23, 0, 1]]
    assert rates / rates[0] == pytest.approx(expected / expected[0], rel=0.05)


@pytest.mark.skipif(not DATA.is_dir(), reason=f"no public traces at {DATA}")
def test_all_jobs_of_a_workload_are_for_one_gpu_type() -> None:
    mixed = ProfileSet.load(DATA / "elasticflow")  # some models were measured on one type only
    for job in generate_jobs(mixed, jobs=100, hours=8):
        assert "A100" in mixed.get(job.model).gpu_types
    for job in generate_jobs(mixed, jobs=100, hours=8, gpu_type="t4"):
        assert "T4" in mixed.get(job.model).gpu_types


@settings(max_examples=30)
@given(
    jobs=st.integers(1, 40),
    hours=st.floats(0.01, 100),
    seed=st.integers(0, 1000),
    deadlines=st.floats(0, 1),
    max_gpus=st.integers(1, 64),
    start_hour=st.floats(0, 24),
    largest=st.sampled_from([0.001, 0.5, 1.0, 50.0, 1000.0]),
)
def test_any_workload_is_one_that_can_run(
    jobs: int, hours: float, seed: int, deadlines: float, max_gpus: int, start_hour: float, largest: float
) -> None:
    made = generate_jobs(
        PROFILES,
        jobs=jobs,
        hours=hours,
        seed=seed,
        deadlines=deadlines,
        max_gpus=max_gpus,
        max_gpu_hours=largest,
        start_hour=start_hour,
    )
    assert len({job.job_id for job in made}) == jobs
    assert [job.submit_s for job in made] == sorted(job.submit_s for job in made)
    assert all(0 <= job.submit_s <= hours * 3600 + 0.1 for job in made)
    assert sum(job.deadline_s is not None for job in made) == round(deadlines * jobs)
    for job in made:
        rate = PROFILES.get(job.model).rate(packed_shape(job.gpus, 4), job.batch_size)
        assert rate > 0
        assert job.gpus <= max_gpus
        assert job.work is not None and job.work >= 1
        assert (job.work - 1) / rate * job.gpus <= largest * 3600


@pytest.mark.parametrize(
    ("field", "value"),
    [("jobs", 0), ("hours", -1), ("hours", float("nan")), ("deadlines", 2), ("max_gpus", 0), ("seed", -1)],
)
def test_nonsense_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(InputError, match=field.replace("_", "-")):
        generate_jobs(PROFILES, **{"jobs": 5, "hours": 1.0} | {field: value})  # type: ignore[arg-type]


@pytest.mark.skipif(not DATA.is_dir(), reason=f"no public traces at {DATA}")
def test_the_figures_are_those_of_the_philly_trace() -> None:
    with (DATA / "philly" / "philly.csv").open(newline="") as file:
        rows = [(r["timestamp"], float(r["duration"]), int(r["num_gpus"])) for r in csv.DictReader(file)]
    moments = np.array([row[0] for row in rows], dtype="datetime64[s]")
    gpus = np.array([row[2] for row in rows])
    gpu_hours = np.array([row[1] for row in rows]) * gpus / 3600

    kept = gpu_hours < 1000
    assert kept.mean() > 0.997
    classes = np.digitize(gpu_hours, [1, 10, 100])
    for index, size in enumerate(SIZES):
        mine = kept & (classes == index)
        assert mine.sum() / kept.sum() == pytest.approx(size.share, abs=1e-3)
        assert [np.mean(gpus[mine] == k) for k in GPU_COUNTS] == pytest.approx(size.gpus, abs=1e-3)
        assert np.quantile(gpu_hours[mine], QUANTILES) == pytest.approx(size.gpu_hours, rel=0.15)

    days = moments.astype("datetime64[D]")
    hour = (moments.astype("datetime64[h]") - days).astype(int)
    day = (days - days.min()).astype(int)
    counts = np.zeros((day.max() + 1, 24))
    np.add.at(counts, (day, hour), 1)
    typical = np.expm1(np.log1p(counts).mean(axis=0))
    assert typical / typical.mean() == pytest.approx(ARRIVALS_BY_HOUR, abs=0.01)
