"""The tuner against a machine whose step times, memory and gradient noise are known."""

import json
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swell.perf.efficiency import gain
from swell.perf.goodput import BatchLimits, BatchPlan, best_goodput
from swell.perf.throughput import ThroughputParams, iteration_s, step_times
from swell.train.modes.adaptive import BatchTuner, MemoryBound, OutOfMemory

LIMITS = BatchLimits(init_batch=64, max_batch=4096, min_local=8, max_local=512)
MACHINE = ThroughputParams(
    alpha_c=0.01, beta_c=1e-4, alpha_n=0.2, beta_n=0.01, alpha_r=0.03, beta_r=0.005, gamma=1.0
)


@dataclass
class Noise:
    sqr: float = 1.0
    var: float = 20.0
    updates: int = 1000


def _run(
    tuner: BatchTuner,
    replicas: int,
    steps: int,
    noise: Noise | None = None,
    nodes: int = 1,
    memory: int | None = None,
) -> list[BatchPlan]:
    """Train: choose, run, out of memory or observe. Returns the plans that ran."""
    plans = []
    for _ in range(steps):
        plan = tuner.choose(nodes, replicas, noise or Noise())
        if memory is not None and plan.local_batch > memory:
            tuner.out_of_memory(plan.local_batch)
            continue
        grad_s, step_s = step_times(MACHINE, nodes, replicas, plan.local_batch)
        tuner.observe(
            nodes=nodes,
            replicas=replicas,
            local_batch=plan.local_batch,
            accumulation=plan.accumulation,
            iteration_time_s=float(
                iteration_s(MACHINE, nodes, replicas, plan.local_batch, plan.accumulation)
            ),
            sync_time_s=float(step_s - grad_s),
        )
        plans.append(plan)
    return plans


def _true_goodput(plan: BatchPlan, replicas: int, noise: Noise, nodes: int = 1) -> float:
    scale = plan.total(replicas) / LIMITS.init_batch
    seconds = iteration_s(MACHINE, nodes, replicas, plan.local_batch, plan.accumulation)
    return float(gain(noise.sqr, noise.var, scale)) / float(seconds)


def test_before_anything_is_known_the_tuned_batch_is_split_over_the_workers() -> None:
    tuner = BatchTuner(LIMITS)
    assert tuner.choose(1, 4, Noise(updates=0)) == BatchPlan(16, 0)
    assert tuner.choose(1, 1, Noise(updates=0)) == BatchPlan(64, 0)


def test_nothing_grows_before_the_noise_is_known() -> None:
    assert set(_run(BatchTuner(LIMITS), 4, 50, Noise(updates=19))) == {BatchPlan(16, 0)}


@pytest.mark.parametrize("replicas", [1, 2, 4, 8])
@pytest.mark.parametrize("var", [0.5, 5.0, 50.0])
def test_it_ends_close_to_the_true_optimum(replicas: int, var: float) -> None:
    """Not always within 5%: with one batch size seen, the predicted gain may lie under the hysteresis."""
    noise = Noise(var=var)
    plan = _run(BatchTuner(LIMITS), replicas, 120, noise)[-1]
    goodput, *_ = best_goodput(MACHINE, noise.sqr, noise.var, LIMITS, [1], [replicas])
    assert _true_goodput(plan, replicas, noise) >= 0.88 * goodput[0]


def test_more_noise_and_more_workers_mean_larger_batches() -> None:
    def total(replicas: int, var: float) -> int:
        return _run(BatchTuner(LIMITS), replicas, 120, Noise(var=var))[-1].total(replicas)

    assert total(4, 1.0) <= total(4, 10.0) <= total(4, 100.0)
    assert total(4, 1.0) < total(4, 100.0)
    assert total(1, 20.0) < total(8, 20.0)


def test_no_noise_keeps_the_tuned_batch() -> None:
    assert _run(BatchTuner(LIMITS), 4, 60, Noise(var=0.0))[-1].total(4) == LIMITS.init_batch


def test_a_small_predicted_gain_changes_nothing_and_a_large_one_does() -> None:
    calm, eager = BatchTuner(LIMITS, hysteresis=1e9), BatchTuner(LIMITS)
    assert set(_run(calm, 4, 60)) == {BatchPlan(16, 0)}
    plans = _run(eager, 4, 200)
    changes = sum(a != b for a, b in pairwise(plans))
    assert 1 <= changes <= 8
    assert len(set(plans[100:])) == 1, "it settles"


def test_the_total_batch_at_most_quadruples_and_the_local_one_doubles_at_once() -> None:
    plans = _run(BatchTuner(LIMITS), 4, 100, Noise(var=500.0))
    largest = LIMITS.init_batch
    for plan in plans:
        assert plan.total(4) <= 4 * largest
        largest = max(largest, plan.total(4))
    locals_seen = [plans[0].local_batch]
    for plan in plans:
        assert plan.local_batch <= 2 * max(locals_seen)
        locals_seen.append(plan.local_batch)
    assert largest > 8 * LIMITS.init_batch


@pytest.mark.parametrize("memory", [20, 37, 64, 200])
def test_the_memory_limit_is_found_with_a_few_failures_and_never_forgotten(memory: int) -> None:
    tuner = BatchTuner(LIMITS)
    noise = Noise(var=500.0)
    failures = 0
    for _ in range(150):
        failures += len(_run(tuner, 4, 1, noise, memory=memory)) == 0
    assert 1 <= failures <= 5
    again = BatchTuner(LIMITS)
    again.load_state_dict(json.loads(json.dumps(tuner.state_dict())))
    plans = _run(again, 4, 50, noise, memory=memory)
    assert len(plans) == 50, "a resumed job does not run out of memory again"
    assert max(plan.local_batch for plan in plans) >= 0.8 * memory


def test_a_large_batch_is_reached_by_accumulation_where_memory_is_short() -> None:
    plan = _run(BatchTuner(LIMITS), 2, 150, Noise(var=500.0), memory=30)[-1]
    assert plan.local_batch <= 30
    assert plan.total(2) > 4 * LIMITS.init_batch


def test_one_worker_above_the_tuned_batch_accumulates_so_that_noise_stays_measurable() -> None:
    plan = _run(BatchTuner(LIMITS), 1, 100, Noise(var=500.0))[-1]
    assert plan.total(1) > LIMITS.init_batch
    assert plan.accumulation >= 1


def test_a_resize_keeps_the_local_batch_where_it_is_still_legal() -> None:
    tuner = BatchTuner(LIMITS)
    plan = _run(tuner, 4, 100)[-1]
    assert tuner.choose(1, 5, Noise(updates=0)) == plan
    tiny = tuner.choose(1, 1, Noise(updates=0))
    assert tiny.total(1) >= LIMITS.init_batch


def test_shrinking_to_one_worker_keeps_noise_measurable() -> None:
    tuner = BatchTuner(LIMITS)
    plan = _run(tuner, 4, 100, Noise(var=10.0))[-1]
    assert plan.local_batch > LIMITS.init_batch
    assert plan.accumulation == 0
    alone = tuner.choose(1, 1, Noise(updates=0))
    assert alone.total(1) >= plan.local_batch
    assert alone.accumulation >= 1


def test_slow_first_steps_of_a_setting_do_not_count() -> None:
    tuner = BatchTuner(LIMITS)
    for seconds in (60.0, 30.0, 0.1, 0.1, 0.1):
        tuner.observe(nodes=1, replicas=1, local_batch=64, accumulation=0, iteration_time_s=seconds)
    tuner.choose(1, 1, Noise())
    assert tuner.params is not None
    assert float(iteration_s(tuner.params, 1, 1, 64, 0)) == pytest.approx(0.1, rel=0.05)


def test_a_clock_that_jumps_is_ignored() -> None:
    tuner = BatchTuner(LIMITS, warmup_steps=0)
    for seconds in (-5.0, 0.0, float("nan"), float("inf")):
        tuner.observe(nodes=1, replicas=1, local_batch=64, accumulation=0, iteration_time_s=seconds)
    tuner.choose(1, 1, Noise())
    assert tuner.params is None


def test_state_round_trip_gives_the_same_choice() -> None:
    tuner = BatchTuner(LIMITS)
    _run(tuner, 4, 80)
    again = BatchTuner(LIMITS)
    again.load_state_dict(json.loads(json.dumps(tuner.state_dict())))
    for replicas in (1, 2, 4, 8):
        one, two = BatchTuner(LIMITS), BatchTuner(LIMITS)
        one.load_state_dict(tuner.state_dict())
        two.load_state_dict(again.state_dict())
        assert one.choose(1, replicas, Noise()) == two.choose(1, replicas, Noise())


@settings(max_examples=60)
@given(
    replicas=st.lists(st.integers(1, 16), min_size=1, max_size=12),
    var=st.floats(0.0, 1e4),
    init=st.integers(1, 300),
    memory=st.integers(8, 600),
)
def test_every_plan_is_legal_whatever_the_allocation(
    replicas: list[int], var: float, init: int, memory: int
) -> None:
    limits = BatchLimits(init_batch=init, max_batch=max(4096, init), min_local=8, max_local=512)
    tuner = BatchTuner(limits)
    for count in replicas:
        for plan in _run(tuner, count, 8, Noise(var=var), memory=memory):
            assert 1 <= plan.local_batch <= min(limits.max_local, memory)
            assert plan.accumulation >= 0
            assert plan.total(count) <= limits.max_batch


@given(start=st.integers(8, 64), memory=st.integers(8, 511))
def test_the_memory_bound_closes_in_on_the_truth(start: int, memory: int) -> None:
    bound = MemoryBound(8, 512)
    bound.ran(min(start, memory))
    failures = 0
    for _ in range(40):
        if bound.limit > memory:
            bound.failed(bound.limit)
            failures += 1
        else:
            bound.ran(bound.limit)
    assert failures <= 5
    assert bound.limit <= memory
    assert bound.limit >= 0.85 * memory or memory - bound.limit <= 1


def test_memory_that_creeps_up_lowers_the_bound() -> None:
    bound = MemoryBound(8, 512)
    bound.ran(100)
    bound.failed(100)
    assert bound.limit < 100


def test_when_nothing_fits_the_message_says_what_to_change() -> None:
    with pytest.raises(OutOfMemory, match="lower min_local"):
        BatchTuner(LIMITS).out_of_memory(8)


@pytest.mark.parametrize(
    ("field", "value"), [("nodes", 0), ("replicas", 0), ("local_batch", 0), ("accumulation", -1)]
)
def test_bad_observations_are_refused_by_name(field: str, value: int) -> None:
    good = {"nodes": 1, "replicas": 1, "local_batch": 8, "accumulation": 0}
    with pytest.raises(ValueError, match=field):
        BatchTuner(LIMITS).observe(**{**good, field: value}, iteration_time_s=0.1)


@pytest.mark.parametrize(("field", "value"), [("hysteresis", -0.1), ("growth", 1.0)])
def test_bad_settings_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        BatchTuner(LIMITS, **{field: value})
