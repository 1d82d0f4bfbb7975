"""How long a job with a target will train."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swell.perf.length import (
    REPEAT_ERROR,
    Convergence,
    LossHistory,
    TargetLength,
    fit_convergence,
    without_outliers,
)


def _loss(step: float) -> float:
    return 1.0 / (0.002 * step + 1.0) + 0.1  # 0.3 at step 2000


def test_the_prediction_comes_nearer_and_its_error_shrinks() -> None:
    rng = np.random.default_rng(0)
    length = TargetLength(0.3)
    errors, deviations = [], []
    for step in range(0, 1900, 10):
        length.add(step, _loss(step) * float(np.exp(rng.normal(0, 0.005))), None)
        if step in (500, 1000, 1800):
            assert length.predicted is not None
            errors.append(abs(length.predicted - 2000))
            deviations.append(length.deviation)
    assert errors[-1] < 100 and errors[0] < 400
    assert deviations[0] > deviations[-1] > 0


def test_an_earlier_run_is_believed_until_the_losses_say_more() -> None:
    length = TargetLength(0.3, earlier=2100.0)
    assert (length.predicted, length.deviation) == (2100.0, REPEAT_ERROR * 2100.0)
    for step in (0, 10, 20):
        length.add(step, _loss(step), None)
    assert length.predicted == 2100.0
    for step in range(30, 1500, 10):
        length.add(step, _loss(step), None)
    assert length.predicted == pytest.approx(2000, rel=0.02)


def test_a_loss_that_does_not_fall_predicts_nothing_or_the_most_allowed() -> None:
    length = TargetLength(0.3, earlier=50.0)
    for step in range(0, 200, 5):
        length.add(step, 2.0, 1000.0)
    assert length.predicted == 1000.0, "longer than the earlier one already: it may take all it is given"
    assert TargetLength(0.3).predicted is None


def test_a_target_that_is_met_is_where_the_job_stands() -> None:
    length = TargetLength(0.3)
    length.add(40.0, 0.29, 1000.0)
    assert (length.predicted, length.deviation) == (40.0, 0.0)


# Optimus's convergence predictor.


def _losses(steps: np.ndarray, b0: float, b1: float, b2: float) -> np.ndarray:
    return 1.0 / (b0 * steps + b1) + b2


@settings(max_examples=60)
@given(
    st.floats(1.0, 50.0),
    st.floats(0.2, 2.0),
    st.floats(0.0, 0.5),
    st.floats(0.1, 100.0),
    st.integers(50, 10**6),
)
def test_exact_losses_give_the_curve_back(rise: float, b1: float, b2: float, unit: float, last: int) -> None:
    steps = np.linspace(0, last, 100)
    b0 = rise * b1 / last  # by the last step the loss above the floor has fallen by this factor plus one
    fit = fit_convergence(steps, unit * _losses(steps, b0, b1, b2))
    assert fit is not None
    assert fit.loss(steps) == pytest.approx(unit * _losses(steps, b0, b1, b2), rel=1e-3)
    ahead = 3.0 * last
    target = float(unit * _losses(np.array(ahead), b0, b1, b2))
    assert fit.steps_to_loss(target) == pytest.approx(ahead, rel=0.10)


@settings(max_examples=25)
@given(st.integers(0, 2**32 - 1))
def test_noise_and_spikes_do_not_mislead(seed: int) -> None:
    rng = np.random.default_rng(seed)
    steps = np.arange(0, 3000, 15)
    losses = 2.3 * _losses(steps, 0.01, 1.0, 0.15) * np.exp(rng.normal(0, 0.01, len(steps)))
    losses[rng.integers(1, len(steps) - 1, 4)] *= rng.choice([0.2, 5.0], 4)
    fit = fit_convergence(steps, losses)
    assert fit is not None
    target = 2.3 * (0.15 + 1 / 41)
    assert fit.steps_to_loss(target) == pytest.approx(4000, rel=0.25)
    assert fit.floor == pytest.approx(2.3 * 0.15, rel=0.1)
    assert fit.steps_to_loss(target, sigmas=1) > fit.steps_to_loss(target) > fit.steps_to_loss(target, -1)


def test_a_spike_is_replaced_and_a_falling_curve_is_not() -> None:
    falling = _losses(np.arange(50.0), 0.1, 1.0, 0.1)
    assert without_outliers(falling) == pytest.approx(falling)
    spiked = falling.copy()
    spiked[20] = 9.0
    assert without_outliers(spiked)[20] == pytest.approx(falling[20], rel=0.1)


def test_targets_at_or_below_the_floor_are_never_reached() -> None:
    fit = Convergence(b0=0.01, b1=1.0, b2=0.2, largest=1.0, residual=0.01)
    assert fit.steps_to_loss(0.2) == math.inf
    assert fit.steps_to_loss(0.205, sigmas=1.0) == math.inf
    assert fit.steps_to_loss(5.0) == 0.0
    assert fit.steps_to_loss(0.2 + 1 / 11) == pytest.approx(1000)


@pytest.mark.parametrize(
    "losses",
    [
        [3.0, 2.0, 1.0],
        [0.0] * 10,
        [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
        [math.nan] * 10,
        [2.0, 1.0, -1.0, 0.5, 0.4, 0.3],
    ],
)
def test_nothing_is_said_where_nothing_can_be(losses: list[float]) -> None:
    assert fit_convergence(np.arange(len(losses)), losses) is None


def test_steps_and_losses_must_match() -> None:
    with pytest.raises(ValueError, match="one length"):
        fit_convergence([1, 2, 3], [1.0])


def test_a_long_history_stays_small_and_keeps_its_answer() -> None:
    history = LossHistory(most_points=64)
    assert history.fit is None
    for step in range(20_000):
        history.add(step, float(_losses(np.array(float(step)), 0.001, 1.0, 0.2)))
    history.add(20_000, math.nan)
    assert len(history) < 64
    assert history.fit is not None
    assert history.fit.steps_to_loss(0.2 + 1 / 41) == pytest.approx(40_000, rel=0.05)
