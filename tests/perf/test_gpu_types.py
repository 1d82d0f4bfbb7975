"""Speed carried over from one GPU type to another."""

from __future__ import annotations

import numpy as np
import pytest

from swell.perf.belief import JobBelief
from swell.perf.goodput import BatchLimits
from swell.perf.gpu_types import Ratio, Seen, carried_belief, carried_over, learn_ratios
from swell.perf.throughput import ThroughputParams, step_times

SLOW = ThroughputParams(0.2, 0.02, 0.3, 0.01, 0.1, 0.005, 1.5)
LIMITS = BatchLimits(32, 1024, 4, 64)


def faster(params: ThroughputParams, compute: float, sync: float) -> ThroughputParams:
    return carried_over(params, Ratio(1 / compute, 1 / sync))


def seen(kind: str, gpu_type: str, params: ThroughputParams, synchronised: bool = True) -> Seen:
    return Seen(kind, gpu_type, params, 16, synchronised)


def test_a_kind_that_ran_on_both_types_has_its_own_ratio() -> None:
    history = [seen("bert", "T4", SLOW), seen("bert", "A100", faster(SLOW, 3, 10))]
    history += [seen("ncf", "T4", SLOW), seen("ncf", "A100", faster(SLOW, 2, 10))]
    ratios = learn_ratios(history)
    assert ratios.between("bert", "T4", "A100") == pytest.approx((1 / 3, 1 / 10))
    assert ratios.between("bert", "A100", "T4") == pytest.approx((3, 10))
    # one that ran on one type only gets the geometric mean of the others
    assert ratios.between("new", "T4", "A100") == pytest.approx((6**-0.5, 1 / 10))


def test_without_history_types_count_as_equal() -> None:
    assert learn_ratios([seen("bert", "T4", SLOW)]).between("bert", "T4", "A100") == (1, 1)


def test_synchronising_that_was_not_seen_is_taken_from_other_kinds() -> None:
    history = [seen("bert", "T4", SLOW), seen("bert", "A100", faster(SLOW, 3, 12))]
    history += [seen("ncf", "T4", SLOW), seen("ncf", "A100", faster(SLOW, 2, 99), synchronised=False)]
    assert learn_ratios(history).between("ncf", "T4", "A100") == pytest.approx((1 / 2, 1 / 12))


def observed(gpus: int) -> JobBelief:
    belief = JobBelief(LIMITS)
    for count in (1, 2, 4, 8):
        if count <= gpus:
            for local in (8, 32):
                nodes = -(-count // 4)
                grad_s, step_s = (float(t) for t in step_times(SLOW, nodes, count, local))
                belief.observe(nodes, count, local, step_s, step_s - grad_s)
    return belief


def test_a_carried_belief_is_the_known_one_at_another_speed() -> None:
    known = observed(8)
    carried = carried_belief(known, Ratio(0.25, 0.25))
    assert carried.known and carried.noise_known == known.noise_known
    assert carried.curve(16, 4)[1:] == pytest.approx(known.curve(16, 4)[1:] * 4)
    other = carried_belief(known, Ratio(0.25, 1.0)).curve(16, 4)
    assert np.all(other[2:] < carried.curve(16, 4)[2:])


def test_a_carried_belief_lets_a_job_grow_no_further_than_the_known_one() -> None:
    known = observed(2)
    assert carried_belief(known, Ratio(0.5, 0.5)).max_gpus(64) == known.max_gpus(64) == 4


def test_own_observations_complete_a_carried_belief() -> None:
    carried = carried_belief(observed(8), Ratio(0.5, 0.5))
    carried.observe(1, 1, 32, 0.1, 0.0)  # much faster than the ratio says
    assert carried.params is not None and carried.params.alpha_n == pytest.approx(SLOW.alpha_n / 2, rel=0.3)
    grad_s, _ = step_times(carried.params, 1, 1, 32)
    assert float(grad_s) == pytest.approx(0.1, rel=0.05)
