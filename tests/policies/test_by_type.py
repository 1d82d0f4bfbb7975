"""GPU types: who goes where, and that whole jobs are on one type under every policy that knows speeds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from swell.domain import Cluster, Event, overlapping
from swell.perf.profiles import ProfileSet
from swell.policies import make_policy
from swell.policies.by_type import NOWHERE, ByType, TypeNodes, TypePools, assign, by_type
from swell.sim import NodeFailure, simulate
from swell.sim.generate import generate_jobs

PROFILES = ProfileSet.load(None)
MIXED = Cluster.parse("4x4:T4,2x4:A100")


def pools(speed: list[list[float]], capacity: tuple[int, ...] = (8, 8)) -> TypePools:
    """Jobs that scale perfectly; `speed` has each job's speed on one GPU of each type."""
    gpus = np.arange(max(capacity) + 1)
    rates = np.array(speed, dtype=float).T[:, :, None] * gpus
    most = np.full(rates.shape[:2], max(capacity))
    return TypePools(rates, most, np.array(capacity))


def where(
    found: TypePools, on: list[int] | None = None, fixed: tuple[int, ...] = (), cost: float = 0.0
) -> list[int]:
    jobs = found.cap.shape[1]
    start = np.array(on if on is not None else [NOWHERE] * jobs)
    stays = np.isin(np.arange(jobs), fixed)
    return assign(found, start, stays, np.full(jobs, cost), np.ones(jobs)).tolist()


def test_the_job_that_gains_the_most_from_the_fast_type_gets_it() -> None:
    assert where(pools([[1, 2], [1, 10]])) == [0, 1]
    assert where(pools([[1, 10], [1, 2]])) == [1, 0]


def test_equal_jobs_are_spread_over_the_types() -> None:
    found = where(pools([[1, 1]] * 6))
    assert sorted(found) == [0, 0, 0, 1, 1, 1]


def test_a_larger_pool_takes_more_jobs() -> None:
    found = where(pools([[1, 1]] * 9, capacity=(16, 8)))
    assert found.count(0) == 6


def test_a_job_never_goes_where_it_cannot_run() -> None:
    assert where(pools([[0, 1], [0, 1], [0, 1], [1, 1]])) == [1, 1, 1, 0]


def test_a_running_job_moves_only_if_that_outweighs_its_pause() -> None:
    crowded = pools([[1, 1]] * 3)
    assert sorted(where(crowded, on=[0, 0, 0])) == [0, 0, 1]
    assert where(crowded, on=[0, 0, 0], cost=5.0) == [0, 0, 0]


def test_a_promised_job_stays() -> None:
    assert where(pools([[1, 10], [1, 10]]), on=[0, 0], fixed=(0,)) == [0, 1]


def test_a_part_has_its_own_numbers() -> None:
    nodes = TypeNodes(Cluster.parse("1x4:T4,2x2:A100,1x4:T4").without([9]), "T4")
    assert nodes.cluster.gpus_per_node == 4 and nodes.cluster.capacity == 7
    assert nodes.local((3, 8)) == (3, 4)
    assert nodes.local((3, 5)) == ()  # one of them is of another type


def test_one_type_or_no_knowledge_leaves_a_policy_as_it_is() -> None:
    for name, cluster in (("max-min", Cluster.parse("4x4")), ("fifo", MIXED)):
        policy = make_policy(name)
        assert by_type(policy, cluster) is policy
    wrapped = by_type(make_policy("elasticflow"), MIXED)
    assert isinstance(wrapped, ByType)
    assert (wrapped.name, wrapped.placer, wrapped.knows) == ("elasticflow", "buddy", "profiles")


def test_a_job_is_bound_to_a_type_only_by_a_promise(make_snapshot: Any) -> None:
    # Best effort; in time on four GPUs of a type; late on any.
    snapshot = make_snapshot(3, cluster="1x4:T4,1x4:A100", left=1000.0, deadline_s=[np.inf, 300.0, 200.0])
    policy = by_type(make_policy("elasticflow"), snapshot.cluster)
    admissions = [policy.admit(snapshot, index) for index in range(3)]
    assert [(a.admitted, a.gpu_type) for a in admissions] == [(True, None), (True, "T4"), (False, None)]


def test_promises_in_danger_are_found_on_every_type(make_snapshot: Any) -> None:
    for deadlines, danger in (([300.0, 200.0], [1]), ([200.0, 200.0], [0, 1]), ([300.0, 300.0], [])):
        # On the four GPUs of a type a job takes 250 s.
        snapshot = make_snapshot(2, cluster="1x4:T4,1x4:A100", left=1000.0, deadline_s=deadlines)
        policy = by_type(make_policy("elasticflow"), snapshot.cluster)
        policy.allocate(snapshot)
        assert policy.endangered(snapshot).tolist() == danger


@pytest.mark.parametrize("policy", ["max-min", "elasticflow", "tide", "pollux:generations=3"])
def test_jobs_are_on_one_type_and_promises_hold(policy: str) -> None:
    jobs = generate_jobs(
        PROFILES, jobs=25, hours=1.0, seed=3, deadlines=0.4, max_gpu_hours=5.0, gpu_type="T4"
    )
    held: dict[str, tuple[int, ...]] = {}
    types: set[str] = set()

    def check(event: Event) -> None:
        if event.job_id is not None and event.kind in ("allocated", "resized", "preempted", "finished"):
            held[event.job_id] = tuple(event.data.get("gpus", ()))
            nodes = MIXED.nodes_of(held[event.job_id])
            assert len({MIXED.nodes[node].gpu_type for node in nodes}) <= 1
            types.update(MIXED.nodes[node].gpu_type for node in nodes)

    lost = [NodeFailure(4, 1000.0, 600.0), NodeFailure(5, 1200.0, 600.0)]  # for a while no A100 is there
    failures = lost if policy == "max-min" else []
    result = simulate(jobs, PROFILES, MIXED, policy, resize_cost=10.0, on_event=check, failures=failures)
    record = result.record()
    assert record["finished"] + record["rejected"] == len(jobs)
    assert types == {"T4", "A100"}
    assert overlapping(held.values()) is None
    if policy == "elasticflow":  # it knows the truth, so it has no excuse
        assert record["promises_broken"] == 0 and record["deadline_met"] > 0


def test_telling_types_apart_saves_at_least_15_percent() -> None:
    jobs = generate_jobs(PROFILES, jobs=40, hours=1.5, seed=1, max_gpu_hours=20.0, gpu_type="T4")
    blind, aware = (
        simulate(jobs, PROFILES, MIXED, "max-min", resize_cost=30.0, blind_to_types=blind).record()[
            "avg_jct_s"
        ]
        for blind in (True, False)
    )
    assert aware < 0.85 * blind


def test_whole_jobs_on_one_type_without_knowing_the_types_save_less() -> None:
    """The middle column of `benchmarks.gpu_types`."""
    jobs = generate_jobs(PROFILES, jobs=40, hours=1.5, seed=1, max_gpu_hours=20.0, gpu_type="T4")
    chosen = by_type(make_policy("max-min"), MIXED)
    by_load, aware = (
        simulate(jobs, PROFILES, MIXED, policy, resize_cost=30.0, blind_to_types=blind).record()["avg_jct_s"]
        for policy, blind in ((chosen, True), ("max-min", False))
    )
    assert by_load > 1.05 * aware
