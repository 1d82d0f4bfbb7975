"""Several jobs on one GPU, simulated: what they gain, that nobody is slowed, and that promises hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from swell.domain import Cluster, Event, EventKind, InputError, JobSpec, Node, gpu_of_slot
from swell.perf.profiles import MeasuredCounts, ProfileSet
from swell.sim import NodeFailure, simulate
from swell.sim.generate import generate_jobs
from swell.sim.metrics import SimulationResult
from swell.sim.workload import SharedGpus, alone_speeds

PROFILES = ProfileSet.load(None)
FLAT = ProfileSet([MeasuredCounts("one", {"gpu": (np.array([1.0, 64.0]), {1: np.array([1.0, 64.0])})}, 1e6)])
"""A model with a rate of 1 on each GPU."""


def job(name: str, work: float, fill: float = 1.0, submit_s: float = 0.0, **more: object) -> JobSpec:
    values = {"gpus": 1, "max_gpus": 1} | more
    return JobSpec(job_id=name, submit_s=submit_s, model="one", batch_size=1, work=work, fill=fill, **values)  # type: ignore[arg-type]


def run(
    jobs: list[JobSpec], cluster: str = "1x1", per_gpu: int = 4, policy: str = "fifo"
) -> SimulationResult:
    return simulate(jobs, FLAT, Cluster.parse(cluster).shared_by(per_gpu), policy)


def test_four_small_jobs_are_done_three_and_a_half_times_sooner() -> None:
    jobs = [job(f"j{i}", 100.0, 0.2) for i in range(4)]
    together, one_by_one = run(jobs), run(jobs, per_gpu=1)
    assert one_by_one.finish_s.max() == 400.0
    assert one_by_one.finish_s.max() / together.finish_s.max() == pytest.approx(3.47, abs=0.01)


def test_four_jobs_that_fill_the_gpu_lose_nothing_together() -> None:
    jobs = [job(f"j{i}", 100.0 + i) for i in range(4)]
    assert run(jobs).finish_s.max() == pytest.approx(run(jobs, per_gpu=1).finish_s.max())
    assert run(jobs).finish_s[0] == pytest.approx(400.0)


def test_neighbours_go_faster_when_a_job_leaves_and_slower_when_one_comes() -> None:
    jobs = [job("a", 100.0), job("b", 100.0, submit_s=50.0), job("c", 10.0, submit_s=80.0)]
    # a: 50 alone, 15 of the 30 s beside b, then a third, and half again once c is done after 30 s.
    assert run(jobs).finish_s.tolist() == pytest.approx([160.0, 210.0, 110.0])


def test_a_mix_of_small_and_large_jobs() -> None:
    large, small = run([job("large", 100.0), job("small", 100.0, 0.3)]).finish_s.tolist()
    assert small == pytest.approx(100.0 / 0.956)
    assert large == pytest.approx(small + 100.0 - 0.7 * small), "alone again"


def test_a_job_with_several_workers_is_as_fast_as_its_slowest_worker() -> None:
    jobs = [job("wide", 100.0, max_gpus=2, min_gpus=2, gpus=2), job("one", 100.0)]
    wide, one = run(jobs, "1x2", per_gpu=2).finish_s.tolist()
    assert wide == pytest.approx(100.0), "a rate of 2 on two GPUs, halved by the neighbour on one of them"
    assert one == pytest.approx(100.0 + 50.0)


def test_workers_of_one_job_are_on_different_gpus_first() -> None:
    cluster = Cluster.parse("2x2").shared_by(2)
    assert cluster.real_gpu_of_slot == [0, 1, 0, 1, 2, 3, 2, 3]
    assert [gpu_of_slot(slot, 2) for slot in range(4)] == [0, 1, 0, 1]
    assert alone_speeds(1.0, 5, 4, 2).tolist() == [1.0, 1.0, 1.0, 0.5, 0.5, 0.5]
    assert alone_speeds(0.5, 5, 4, 2).tolist() == [1.0] * 6


@pytest.mark.parametrize("policy", ["max-min", "tide-fixed", "afs-l"])
def test_no_policy_believes_that_parts_of_one_gpu_are_gpus(policy: str) -> None:
    alone = [job("a", 100.0, max_gpus=None)]
    finish_s = run(alone, per_gpu=4, policy=policy).finish_s[0]
    assert finish_s == pytest.approx(100.0)
    resizes: list[Event] = []
    simulate(alone, FLAT, Cluster.parse("1x1").shared_by(4), policy, on_event=resizes.append)
    held = [len(event.data["gpus"]) for event in resizes if event.kind is EventKind.ALLOCATED]
    assert held == [1], "more slots of the same GPU would not help"


def test_a_job_that_loses_its_node_leaves_its_neighbours_alone() -> None:
    jobs = [job("a", 100.0), job("b", 100.0), job("c", 100.0), job("d", 100.0)]
    cluster = Cluster.parse("2x1").shared_by(2)
    result = simulate(jobs, FLAT, cluster, "fifo", failures=[NodeFailure(0, 50.0)])
    # c and d share the second node; then a and b, which had done 25 each by the time it was lost.
    assert sorted(result.finish_s.tolist()) == pytest.approx([200.0, 200.0, 350.0, 350.0])


def test_learned_curves_are_those_beside_neighbours() -> None:
    jobs = generate_jobs(PROFILES, jobs=12, hours=0.5, seed=3, fill=(0.1, 1.0), max_gpu_hours=1)
    cluster = Cluster.parse("1x2").shared_by(4)
    record = simulate(jobs, PROFILES, cluster, "pollux:generations=5,population=10").record()
    assert record["finished"] == 12 and record["belief"] == "fitted"


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    jobs=st.integers(5, 50),
    hours=st.sampled_from([0.2, 1.0, 5.0]),
    cluster=st.sampled_from(["1x1", "1x4", "2x4", "4x1", "3x4"]),
    per_gpu=st.sampled_from([2, 4]),
    policy=st.sampled_from(["elasticflow", "tide-fixed", "edf-admission", "oasis"]),
    cost_s=st.sampled_from([0.0, 5.0, 60.0]),
    fill=st.sampled_from([(0.05, 1.0), (0.5, 1.0), (1.0, 1.0)]),
)
# Late if decisions count on more than admission does.
@example(6204, 46, 5.0, "1x2", 4, "elasticflow", 0.0, (0.5, 1.0))
@example(1909, 36, 1.0, "1x4", 4, "elasticflow", 5.0, (0.5, 1.0))
def test_no_promise_is_late_whoever_the_neighbours_are(
    seed: int,
    jobs: int,
    hours: float,
    cluster: str,
    per_gpu: int,
    policy: str,
    cost_s: float,
    fill: tuple[float, float],
) -> None:
    load = generate_jobs(
        PROFILES, jobs=jobs, hours=hours, seed=seed, deadlines=0.9, max_gpus=8, max_gpu_hours=20, fill=fill
    )
    load = [_with_time(spec, per_gpu) for spec in load]
    result = simulate(load, PROFILES, Cluster.parse(cluster).shared_by(per_gpu), policy, resize_cost=cost_s)
    assert result.promises_broken == 0


def _with_time(spec: JobSpec, times: int) -> JobSpec:
    """The same job with so many times the time to its deadline: promises on shared GPUs count on less."""
    if spec.deadline_s is None:
        return spec
    return replace(spec, deadline_s=spec.submit_s + times * (spec.deadline_s - spec.submit_s))


@settings(max_examples=40)
@given(st.data())
def test_the_books_of_shared_gpus_agree_with_books_made_anew(data: st.DataObject) -> None:
    """After any moves, each job is as fast as in books that only know where the jobs are in the end."""
    cluster = Cluster.parse("2x2").shared_by(3)
    fills = data.draw(st.lists(st.floats(0.05, 1.0), min_size=5, max_size=5))
    books, held = SharedGpus(cluster, fills), dict.fromkeys(range(5), ())
    for _ in range(data.draw(st.integers(1, 8))):
        which = data.draw(st.integers(0, 4))
        taken = {slot for other, slots in held.items() if other != which for slot in slots}
        free = [slot for slot in range(12) if slot not in taken]
        slots = data.draw(st.lists(st.sampled_from(free), unique=True, max_size=3)) if free else []
        before = [books.speed(one) for one in range(5)]
        held[which] = tuple(sorted(slots))
        changed = books.place([(which, held[which])])
        for one in range(5):
            assert one in changed or one == which or books.speed(one) == before[one]
    anew = SharedGpus(cluster, fills)
    anew.place(held.items())
    for one, slots in held.items():
        assert books.speed(one) == (anew.speed(one) if slots else 1.0)


def test_bad_input_is_refused() -> None:
    for fill in (0.0, -0.5, 1.5, float("nan")):
        with pytest.raises(InputError, match="fill must be more than 0 and at most 1"):
            job("a", 1.0, fill)
    with pytest.raises(InputError, match="per_gpu must be at least 1, got 0"):
        Cluster.parse("1x1").shared_by(0)
    with pytest.raises(InputError, match="per_gpu must be at least 1, got 0"):
        Node("n0", 4, per_gpu=0)
    with pytest.raises(InputError, match="slots already"):
        Cluster.parse("1x1").shared_by(2).shared_by(2)
