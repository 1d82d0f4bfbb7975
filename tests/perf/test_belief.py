"""What is believed of a job, before and after it was seen running."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swell.perf.belief import JobBelief
from swell.perf.goodput import BatchLimits, BatchPlan, best_goodput, fixed_plan
from swell.perf.throughput import ThroughputParams, step_times

LIMITS = BatchLimits(128, 4096, 32, 1024)
TRUE = ThroughputParams(0.04, 0.002, 0.1, 0.004, 0.03, 0.001, 1.6)


def _see(belief: JobBelief, nodes: int, gpus: int, local: int) -> None:
    grad_s, step_s = step_times(TRUE, nodes, gpus, local)
    belief.observe(nodes, gpus, local, float(step_s), float(step_s - grad_s))


def test_before_any_run_more_gpus_are_proportionally_better() -> None:
    belief = JobBelief(LIMITS)
    assert not belief.known and belief.params is None
    assert belief.goodput([1, 1, 2], [0, 1, 8]).tolist() == [0.0, 1.0, 8.0]
    assert belief.curve(5, 4).tolist() == [0, 1, 2, 3, 4, 5]
    assert belief.plan(1, 1) == BatchPlan(128, 0)
    assert belief.plan(2, 8).total(8) == 32 * 8
    assert belief.max_gpus(64) == 1
    assert belief.residual == math.inf


def test_exploration_doubles() -> None:
    belief = JobBelief(LIMITS)
    for nodes, gpus, expected in ((1, 1, 2), (1, 2, 4), (1, 4, 8), (4, 16, 32), (8, 32, 60)):
        _see(belief, nodes, gpus, 64)
        assert belief.max_gpus(60) == expected
    assert belief.max_gpus(4) == 4
    assert JobBelief(BatchLimits(8, 32, 4, 8), prior=TRUE).max_gpus(64) == 8  # 32 samples feed 8 GPUs


def test_only_a_new_configuration_changes_the_model() -> None:
    belief = JobBelief(LIMITS)
    _see(belief, 1, 2, 64)
    version, params = belief.version, belief.params
    _see(belief, 1, 2, 64)
    assert belief.version == version and belief.params is params
    _see(belief, 1, 2, 128)
    assert belief.version > version and belief.params != params
    version = belief.version
    belief.observe_gradients(2.0, 30.0)
    assert belief.version == version + 1
    belief.observe_gradients(2.0, 30.0)
    assert belief.version == version + 1


def test_a_known_configuration_that_drifts_is_fitted_again() -> None:
    belief = JobBelief(LIMITS)
    belief.observe(1, 1, 64, 0.2, 0.0)
    assert belief.params is not None
    version = belief.version
    for _ in range(20):
        belief.observe(1, 1, 64, 0.4, 0.0)
    assert belief.version > version
    assert float(step_times(belief.params, 1, 1, 64)[1]) == pytest.approx(0.4, rel=0.1)


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(32, 1024)), min_size=1, max_size=8),
    st.floats(1e-3, 1e3),
)
def test_goodput_is_the_best_of_the_fitted_model(seen: list[tuple[int, int, int]], var: float) -> None:
    belief = JobBelief(LIMITS)
    for nodes, per_node, local in seen:
        _see(belief, nodes, nodes * per_node, local)
    belief.observe_gradients(1.0, var)
    assert belief.params is not None
    nodes, gpus = np.array([1, 1, 1, 2, 3, 16]), np.array([1, 2, 4, 5, 12, 64])
    expected, local_batch, accumulation = best_goodput(belief.params, 1.0, var, LIMITS, nodes, gpus)
    assert belief.goodput(nodes, gpus) == pytest.approx(expected, rel=1e-12)
    for i in range(len(gpus)):
        plan = belief.plan(int(nodes[i]), int(gpus[i]))
        assert plan == BatchPlan(int(local_batch[i]), int(accumulation[i]))
    packed = belief.curve(64, 4)
    assert packed[0] == 0
    assert packed[12] == belief.goodput([3], [12])[0]


def test_a_fixed_batch_is_kept_and_believed() -> None:
    belief = JobBelief(LIMITS, fixed_batch=1000)
    assert belief.plan(1, 4) == fixed_plan(LIMITS, 1000, 4)
    for nodes, gpus, local in ((1, 1, 500), (1, 2, 500), (1, 4, 250), (2, 8, 125)):
        _see(belief, nodes, gpus, local)
    assert belief.plan(2, 8) == BatchPlan(125, 0)
    # Gradient noise unknown: an iteration counts as one, so goodput is iterations per second.
    assert belief.goodput([2], [8])[0] == pytest.approx(1 / float(step_times(TRUE, 2, 8, 125)[1]), rel=0.05)
    assert belief.goodput([16], [64])[0] == 0  # 16 samples each is less than the smallest local batch


def test_more_gpus_than_the_batch_can_feed_still_have_a_plan() -> None:
    belief = JobBelief(BatchLimits(8, 32, 4, 8))
    belief.observe(1, 1, 8, 0.1, 0.0)
    assert belief.goodput([3], [12])[0] == 0
    assert belief.plan(3, 12).local_batch >= 1


def test_errors_shrink_with_what_was_seen_and_grow_with_distance() -> None:
    belief = JobBelief(LIMITS)
    _see(belief, 1, 1, 64)
    first = belief.residual
    near, far, across = belief.relative_error([1, 1, 2], [1, 4, 4])
    assert near < far < across
    rng = np.random.default_rng(0)
    for nodes, gpus in ((1, 2), (1, 4), (2, 8), (4, 16)):
        for local in (32, 64, 200):
            grad_s, step_s = step_times(TRUE, nodes, gpus, local)
            noisy = float(step_s) * float(np.exp(rng.normal(0, 0.03)))
            belief.observe(nodes, gpus, local, noisy, max(noisy - float(grad_s), 0.0))
    assert 0.01 < belief.residual < first
    assert belief.relative_error([2], [8])[0] == pytest.approx(belief.residual)


def test_a_prior_is_believed_and_kept_where_nothing_was_seen() -> None:
    belief = JobBelief(LIMITS, prior=TRUE)
    assert belief.known and belief.max_gpus(64) == 64
    assert belief.residual == 0.25
    expected = best_goodput(TRUE, 1.0, 0.0, LIMITS, 2, 8)[0]
    assert belief.goodput([2], [8])[0] == pytest.approx(float(expected))
    # One run on one GPU, twice as slow as the prior said, must not forget what the prior knows of links.
    belief.observe(1, 1, 64, 2 * (TRUE.alpha_c + 64 * TRUE.beta_c), 0.0)
    assert belief.params is not None and belief.params.alpha_n == pytest.approx(TRUE.alpha_n)
    assert belief.params.beta_c == pytest.approx(2 * TRUE.beta_c, rel=1e-3)


def test_other_limits_change_the_answers_and_keep_what_was_seen() -> None:
    belief = JobBelief(BatchLimits(128, 128, 1, 128), fixed_batch=128)
    for gpus, local in ((1, 128), (2, 64), (4, 32), (4, 64)):
        _see(belief, 1, gpus, local)
    params, version, pinned = belief.params, belief.version, belief.curve(4, 4)
    belief.observe_gradients(1.0, 20.0)
    belief.set_limits(LIMITS)
    assert belief.version > version and belief.params == params
    expected = best_goodput(belief.params, 1.0, 20.0, LIMITS, 1, np.arange(5))[0]
    assert belief.curve(4, 4) == pytest.approx(expected)
    assert belief.curve(4, 4)[4] > pinned[4]
    version = belief.version
    belief.set_limits(LIMITS)
    assert belief.version == version, "nothing new"


def test_a_belief_from_figures_plans_as_the_job_that_left_them() -> None:
    figures = {"params": TRUE.as_array().tolist(), "batch_size": 128}
    fixed = JobBelief.from_figures(figures)
    assert fixed.fixed_batch == 128 and not fixed.noise_known
    adaptive = JobBelief.from_figures(
        figures | {"mode": "adaptive", "limits": LIMITS.as_dict(), "sqr": 0.1, "var": 0.9}
    )
    expected = best_goodput(TRUE, 0.1, 0.9, LIMITS, 1, np.arange(5))[0]
    assert adaptive.noise_known and adaptive.curve(4, 4) == pytest.approx(expected)


def test_what_a_job_has_shown_corrects_the_model_where_it_was_seen() -> None:
    belief = JobBelief(LIMITS)
    assert belief.shown(4).tolist() == [1.0] * 5
    for nodes, gpus in ((1, 1), (1, 4), (4, 16)):
        _see(belief, nodes, gpus, 64)
    belief.observe(16, 64, 64, 2.0, 1.5)  # much slower than 16 GPUs promise
    assert belief.params is not None
    shown = belief.shown(128)
    for nodes, gpus, step_s in ((1, 1, float(step_times(TRUE, 1, 1, 64)[1])), (16, 64, 2.0)):
        assert float(step_times(belief.params, nodes, gpus, 64)[1]) / shown[gpus] == pytest.approx(step_s)
    assert shown[128] == shown[64]


def test_throughput_counts_every_sample_alike() -> None:
    belief, plain = JobBelief(LIMITS), JobBelief(LIMITS, throughput_only=True)
    for each in (belief, plain):
        for nodes, gpus in ((1, 1), (1, 4), (4, 16)):
            for local in (64, 512):
                _see(each, nodes, gpus, local)
        each.observe_gradients(1.0, 0.5)  # little noise: a larger batch is worth little
    assert plain.curve(16, 4) == pytest.approx(belief.throughput(16, 4))
    assert plain.curve(16, 4)[16] > 2 * belief.curve(16, 4)[16]
    assert plain.plan(4, 16).total(16) > belief.plan(4, 16).total(16)
