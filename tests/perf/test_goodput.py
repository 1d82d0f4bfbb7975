"""Efficiency, batch plans, and goodput tables against brute force."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swell.domain import InputError
from swell.perf.efficiency import efficiency, gain, gain_at, noise_scale
from swell.perf.goodput import BatchLimits, BatchPlan, best_goodput, candidates, fixed_plan
from swell.perf.throughput import ThroughputParams, iteration_s

MODEL = ThroughputParams(0.05, 0.002, 0.12, 0.004, 0.03, 0.002, 2.0)


@st.composite
def limits(draw: st.DrawFn) -> BatchLimits:
    init = draw(st.integers(1, 300))
    min_local = draw(st.integers(1, 40))
    return BatchLimits(
        init, init * draw(st.integers(1, 80)), min_local, min_local + draw(st.integers(0, 200))
    )


positive = st.floats(1e-6, 1e6)


@given(positive, positive, st.floats(1.0, 1e4))
def test_gain_is_between_one_and_the_scale(sqr: float, var: float, scale: float) -> None:
    assert gain(sqr, var, scale) * (1 + 1e-9) >= 1.0
    assert gain(sqr, var, scale) <= scale * (1 + 1e-9)
    assert efficiency(sqr, var, scale) <= 1 + 1e-9
    assert gain_at(sqr, var, scale) == pytest.approx(float(gain(sqr, var, scale)))
    assert gain(sqr, var, 2 * scale) >= gain(sqr, var, scale) * (1 - 1e-12)


def test_efficiency_is_the_paper_s_formula_in_the_noise_scale() -> None:
    sqr, var, init = 2.0, 7.0, 64
    noise = noise_scale(sqr, var, init)
    for batch in (64, 100, 4096):
        assert efficiency(sqr, var, batch / init) == pytest.approx((noise + init) / (noise + batch))
    assert gain(0.0, 0.0, 4.0) == 1.0
    assert noise_scale(0.0, 1.0, init) == math.inf
    assert noise_scale(-1.0, -1.0, init) == 0.0


@given(limits(), st.integers(1, 128), st.data())
def test_a_fixed_batch_is_kept(lim: BatchLimits, gpus: int, data: st.DataObject) -> None:
    batch = data.draw(st.integers(gpus, max(lim.max_batch, gpus)))
    plan = fixed_plan(lim, batch, gpus)
    assert plan.local_batch <= lim.max_local
    total = plan.total(gpus)
    parts = gpus * (plan.accumulation + 1)
    if parts <= lim.max_batch:
        assert total <= max(lim.max_batch, parts)
        assert total >= min(batch, lim.max_batch - parts + 1)
    assert total - batch < parts
    if gpus == 1 and batch > lim.init_batch:
        assert plan.accumulation >= 1
    elif plan.accumulation:  # as little accumulation as memory allows
        assert math.ceil(batch / gpus) > plan.accumulation * lim.max_local


def test_limits_are_checked() -> None:
    with pytest.raises(InputError, match="init_batch must be between 1 and max_batch"):
        BatchLimits(64, 32, 1, 8)
    with pytest.raises(InputError, match="min_local must be between 1 and max_local"):
        BatchLimits(64, 128, 16, 8)


def _brute_force(
    params: ThroughputParams, sqr: float, var: float, lim: BatchLimits, nodes: int, gpus: int
) -> float:
    """The definition, spelled out: every sample, split, checked, evaluated."""
    smallest = max(lim.init_batch, lim.min_local * gpus)
    best = 0.0
    if smallest > lim.max_batch:
        return best
    for sample in np.geomspace(smallest, lim.max_batch, 50):
        local = sample / gpus
        accumulation = math.ceil(local / lim.max_local - 1e-8) - 1
        if gpus == 1 and local > lim.init_batch + 1e-8:
            accumulation = max(accumulation, 1)
        m = math.ceil(local / (accumulation + 1) - 1e-8)
        m = min(m, lim.max_batch // (gpus * (accumulation + 1)))
        if lim.min_local <= m <= lim.max_local:
            scale = gpus * m * (accumulation + 1) / lim.init_batch
            rate = gain_at(sqr, var, scale) / float(iteration_s(params, nodes, gpus, m, accumulation))
            best = max(best, rate)
    return best


@settings(max_examples=60)
@given(limits(), positive, positive, st.lists(st.integers(1, 64), min_size=1, max_size=5))
def test_best_goodput_is_that_of_brute_force(
    lim: BatchLimits, sqr: float, var: float, gpus: list[int]
) -> None:
    nodes = [1 + (i % 2 if k > 1 else 0) for i, k in enumerate(gpus)]
    goodput, local, accumulation = best_goodput(MODEL, sqr, var, lim, nodes, gpus)
    for i, (n, k) in enumerate(zip(nodes, gpus)):
        expected = _brute_force(MODEL, sqr, var, lim, n, k)
        assert goodput[i] == pytest.approx(expected, rel=1e-9)
        if expected:
            plan = BatchPlan(int(local[i]), int(accumulation[i]))
            assert lim.min_local <= plan.local_batch <= lim.max_local
            assert plan.total(k) <= lim.max_batch
            reached = gain_at(sqr, var, plan.total(k) / lim.init_batch) / float(
                iteration_s(MODEL, n, k, plan.local_batch, plan.accumulation)
            )
            assert reached == pytest.approx(goodput[i], rel=1e-9)
        else:
            assert local[i] == accumulation[i] == 0


def test_noise_makes_larger_batches_worth_while() -> None:
    lim = BatchLimits(128, 4096, 32, 1024)
    batches = []
    for var in (0.1, 1.0, 10.0, 1000.0):
        _, local, accumulation = best_goodput(MODEL, 1.0, var, lim, 2, 8)
        batches.append(int(local * (accumulation + 1) * 8))
    assert batches == sorted(batches)
    assert batches[0] < batches[-1] == 4096


def test_no_gpus_no_progress() -> None:
    lim = BatchLimits(8, 64, 4, 8)
    goodput, local, _ = best_goodput(MODEL, 1.0, 1.0, lim, [0, 1, 5], [0, 1, 17])
    assert goodput[0] == 0 and goodput[1] > 0
    assert goodput[2] == 0 and local[2] == 0  # 17 GPUs cannot all have 4 of at most 64
    assert best_goodput(MODEL, 1.0, 1.0, lim, 1, 4)[0].shape == ()


@given(limits(), st.integers(1, 40))
@settings(max_examples=30)
def test_candidates_are_legal_and_distinct(lim: BatchLimits, max_gpus: int) -> None:
    table = candidates(lim, max_gpus)
    assert table.max_gpus == max_gpus
    rows = list(zip(table.gpus.tolist(), table.local_batch.tolist(), table.accumulation.tolist()))
    assert len(rows) == len(set(rows))
    for k in range(max_gpus + 1):
        assert all(row[0] == k for row in rows[table.first[k] : table.first[k + 1]])
