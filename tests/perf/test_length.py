"""How long a job with a target will train."""

from __future__ import annotations

import numpy as np
import pytest

from swell.perf.length import REPEAT_ERROR, TargetLength


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
