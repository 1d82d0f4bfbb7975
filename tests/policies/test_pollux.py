"""Pollux: legal allocations whatever comes, the fitness as published, a search that finds what there is."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swell.domain import Cluster, InputError, JobSpec, Node
from swell.perf.belief import JobBelief
from swell.perf.curves import Curves
from swell.perf.goodput import BatchLimits
from swell.perf.throughput import ThroughputParams, step_times
from swell.policies import JobTable, Snapshot, make_policy
from swell.policies._genetic import MAX_NODES, Problem, greedy, hand_over, rank_by, repair, total_loss
from swell.policies.pollux import Pollux, precedence

LIMITS = BatchLimits(init_batch=128, max_batch=4096, min_local=32, max_local=1024)
PARAMS = ThroughputParams(0.05, 0.001, 0.08, 0.004, 0.02, 0.002, 2.0)


def belief(*seen: tuple[int, int], noise: float = 1000.0, slow: float = 1.0) -> JobBelief:
    """What is believed of a job that was seen on these (nodes, gpus); nothing, if on none."""
    believed = JobBelief(LIMITS)
    params = ThroughputParams(PARAMS.alpha_c * slow, PARAMS.beta_c * slow, *list(_values(PARAMS))[2:])
    for nodes, gpus in seen:
        for local in (64, 128):
            grad_s, step_s = step_times(params, nodes, gpus, local)
            believed.observe(nodes, gpus, local, float(step_s), float(step_s - grad_s))
    if seen:
        believed.observe_gradients(1.0, noise / LIMITS.init_batch)
    return believed


def _values(params: ThroughputParams) -> tuple[float, ...]:
    return tuple(getattr(params, name) for name in params.__slots__)


def moment(
    beliefs: list[JobBelief | None],
    cluster: str | Cluster = "4x4",
    *,
    placements: list[tuple[int, ...]] | None = None,
    age_s: float | list[float] = 3600.0,
    resizes: int | list[int] = 0,
    attained_gpu_s: float | list[float] = 0.0,
    min_gpus: int = 1,
    rows: list[int] | None = None,
    table: JobTable | None = None,
) -> Snapshot:
    """A snapshot of jobs with these beliefs."""
    cluster = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    n = len(beliefs)
    if table is None:
        table = JobTable(
            [
                JobSpec(job_id=f"j{i}", submit_s=0.0, model="m", batch_size=128, min_gpus=min_gpus)
                for i in range(n)
            ]
        )
    now_s = 1e6
    table.submit_s[:] = now_s - np.asarray(age_s)
    table.since_s[:] = now_s
    table.resizes[:] = resizes
    table.attained_gpu_s[:] = attained_gpu_s
    table.belief = list(beliefs)
    if placements is not None:
        table.placement = list(placements)
        table.gpus[:] = [len(p) for p in placements]
    curves = Curves(np.arange(max(cluster.capacity, 1) + 1, dtype=float)[None])
    active = np.arange(n) if rows is None else np.array(rows)
    return Snapshot(now_s, cluster, table, active, curves)


def cells_of(snapshot: Snapshot, policy: Pollux) -> tuple[Problem, np.ndarray[Any, Any]]:
    order = precedence(snapshot)
    return policy.problem(snapshot, order), order


def check_legal(snapshot: Snapshot, decision: Any, *, avoid: bool = True) -> None:
    cells = decision.per_node
    assert cells is not None
    assert (cells >= 0).all()
    np.testing.assert_array_equal(cells.sum(axis=1), decision.gpus)
    assert (cells.sum(axis=0) <= snapshot.cluster.node_gpus).all()
    assert (np.count_nonzero(cells, axis=1) <= MAX_NODES).all()
    for i, believed in enumerate(snapshot.beliefs):
        if believed is not None:
            bound = int(min(snapshot.table.max_gpus[snapshot.rows[i]], snapshot.capacity, 64))
            assert decision.gpus[i] <= max(believed.max_gpus(bound), min(snapshot.min_gpus[i], bound))
        assert decision.gpus[i] == 0 or decision.gpus[i] >= snapshot.min_gpus[i]
    if avoid:
        distributed = np.count_nonzero(cells, axis=1) > 1
        assert (np.count_nonzero(cells[distributed], axis=0) <= 1).all()


SEEN = [(), ((1, 1),), ((1, 1), (1, 2)), ((1, 1), (1, 4), (2, 8)), ((1, 1), (1, 2), (4, 16), (8, 32))]


@st.composite
def moments(draw: st.DrawFn) -> Snapshot:
    nodes = draw(st.integers(1, 20))
    per_node = draw(st.integers(1, 8))
    jobs = draw(st.integers(1, 12))
    cluster = Cluster.parse(f"{nodes}x{per_node}")
    if nodes > 1 and draw(st.booleans()):
        cluster = cluster.with_node(draw(st.integers(0, nodes - 1)), up=False)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    beliefs: list[JobBelief | None] = [
        None
        if rng.random() < 0.1
        else belief(*SEEN[rng.integers(len(SEEN))], slow=float(rng.uniform(0.3, 3)))
        for _ in range(jobs)
    ]
    # Any placement, legal for Pollux or not: GPUs of nodes in service, each to one job or none.
    free = [g for g in range(cluster.first_gpu[-1]) if cluster.node_gpus[cluster.node_of_gpu[g]]]
    owner = rng.integers(-1, jobs, len(free))
    placements = [tuple(g for g, o in zip(free, owner) if o == j) for j in range(jobs)]
    return moment(
        beliefs,
        cluster,
        placements=placements,
        age_s=rng.uniform(0, 5000, jobs).tolist(),
        resizes=rng.integers(0, 20, jobs).tolist(),
        attained_gpu_s=rng.uniform(0, 1e5, jobs).tolist(),
        min_gpus=int(rng.integers(1, 3)),
    )


@settings(max_examples=60)
@given(moments(), st.booleans(), st.sampled_from([-4.0, -1.0, 0.0, 0.5, 1.0]))
def test_every_decision_is_legal(snapshot: Snapshot, avoid: bool, p: float) -> None:
    policy = Pollux(generations=8, population=20, avoid_interference=avoid, p=p)
    check_legal(snapshot, policy.allocate(snapshot), avoid=avoid)


@settings(max_examples=40)
@given(moments(), st.sampled_from([-1.0, 0.0, 1.0]))
def test_no_worse_than_keeping_what_is_there(snapshot: Snapshot, p: float) -> None:
    policy = Pollux(generations=3, population=10, p=p)
    first = policy.allocate(snapshot)
    # Carry the decision out, so that what is there is legal, and decide again.
    placements, taken = [], snapshot.cluster.first_gpu[:-1].copy()
    for row in first.per_node if first.per_node is not None else []:
        gpus = [range(taken[m], taken[m] + k) for m, k in enumerate(row)]
        placements.append(tuple(itertools.chain.from_iterable(gpus)))
        taken += row
    snapshot.table.placement = placements
    snapshot = Snapshot(snapshot.now_s, snapshot.cluster, snapshot.table, snapshot.rows, snapshot.curves)
    problem, order = cells_of(snapshot, policy)
    keeping = total_loss(problem, problem.present)
    second = Pollux(generations=3, population=10, p=p).allocate(snapshot)
    assert second.per_node is not None
    assert total_loss(problem, second.per_node[order].astype(np.int16)) <= keeping


@settings(max_examples=20)
@given(moments(), st.integers(0, 5))
def test_same_seed_same_decision(snapshot: Snapshot, seed: int) -> None:
    one, other = (Pollux(generations=10, population=20, seed=seed) for _ in range(2))
    for _ in range(2):
        np.testing.assert_array_equal(one.allocate(snapshot).per_node, other.allocate(snapshot).per_node)


@settings(max_examples=60)
@given(moments(), st.integers(0, 2**32 - 1))
def test_repair_leaves_legal_individuals_as_they_are(snapshot: Snapshot, seed: int) -> None:
    policy = Pollux(generations=2, population=5)
    problem, _ = cells_of(snapshot, policy)
    rng = np.random.default_rng(seed)
    cells = rng.integers(0, 9, problem.present.shape).astype(np.int16)
    cells[rng.random(cells.shape) < 0.7] = 0
    nodes = cells.shape[1]
    scratch = np.empty(nodes, dtype=np.int64), np.empty(nodes, dtype=np.int64)
    repair(problem, cells, rng, *scratch)
    once = cells.copy()
    repair(problem, cells, rng, *scratch)
    np.testing.assert_array_equal(cells, once)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.integers(0, 30))
def test_ranking_is_a_stable_sort(values: list[int], sorted_before: int) -> None:
    array = np.array(values, dtype=float)
    start = min(sorted_before, len(values))
    order = np.concatenate([np.argsort(array[:start], kind="stable"), np.arange(start, len(values))])
    rank_by(array, order, start, len(values))
    assert order.tolist() == np.argsort(array, kind="stable").tolist()


def test_handing_over_is_between_two_jobs_and_keeps_every_nodes_total() -> None:
    rng = np.random.default_rng(0)
    before = np.array([[2, 0, 1], [1, 0, 0], [0, 3, 0]], dtype=np.int16)
    moved = 0
    for _ in range(100):
        cells = before.copy()
        hand_over(cells, rng)
        assert (cells >= 0).all()
        assert (cells.sum(axis=0) == before.sum(axis=0)).all()
        assert (cells != before).any(axis=1).sum() in (0, 2)
        moved += bool((cells != before).any())
    assert moved > 30


def brute_force(problem: Problem) -> float:
    """The least loss there is, by trying everything."""
    rows = [
        np.array(row, dtype=np.int16)
        for row in itertools.product(*[range(int(c) + 1) for c in problem.capacity])
    ]
    best = np.inf
    for choice in itertools.product(rows, repeat=len(problem.present)):
        cells = np.stack(choice)
        spans = np.count_nonzero(cells, axis=1) > 1
        if (
            (cells.sum(axis=0) > problem.capacity).any()
            or (cells.sum(axis=1) > problem.max_gpus).any()
            or (problem.one_distributed and (np.count_nonzero(cells[spans], axis=0) > 1).any())
        ):
            continue
        best = min(best, total_loss(problem, cells))
    return best


@pytest.mark.parametrize("seed", range(6))
def test_finds_the_best_allocation_of_a_small_cluster(seed: int) -> None:
    rng = np.random.default_rng(seed)
    beliefs: list[JobBelief | None] = [
        belief((1, 1), (1, 2), (2, 4), slow=float(rng.uniform(0.2, 5))) for _ in range(3)
    ]
    snapshot = moment(
        beliefs,
        "2x3",
        placements=[(0, 1, 2), (3,), ()] if seed % 2 else None,
        resizes=rng.integers(0, 30, 3).tolist(),
    )
    policy = Pollux(seed=seed)
    decision = policy.allocate(snapshot)
    problem, order = cells_of(snapshot, policy)
    assert decision.per_node is not None
    found = total_loss(problem, decision.per_node[order].astype(np.int16))
    assert found == pytest.approx(brute_force(problem), rel=1e-12)


def test_fitness_is_the_power_mean_of_scaled_penalised_speedups() -> None:
    snapshot = moment(
        [belief((1, 1), (1, 2), (2, 4)), belief((1, 1), (1, 2)), belief()],
        "2x4",
        placements=[(0, 1), (4, 5), ()],
        age_s=[1000.0, 600.0, 120.0],
        resizes=[3, 1, 0],
    )
    policy = Pollux()
    problem, order = cells_of(snapshot, policy)
    cells = np.array([[2, 0], [2, 1], [0, 1]], dtype=np.int16)  # kept, changed and across, started
    first, second = snapshot.beliefs[0], snapshot.beliefs[1]
    assert first is not None and second is not None
    fair = 3  # ceil(8 / 3)
    speedups = [
        first.goodput([1], [2])[0] / first.goodput([1], [fair])[0],
        second.goodput([2], [3])[0] / second.goodput([1], [fair])[0] * (600 - 30) / (600 + 30),
        1 / fair * 120 / (120 + 30),
    ]
    scaled = [s * 2 / 8 + 1e-3 for s in speedups]
    expected = 3 / sum(1 / s for s in scaled)
    assert policy.fitness(total_loss(problem, cells[order]), 3) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("p", [-2.0, 0.0, 1.0])
def test_fitness_grows_with_speed_for_every_exponent(p: float) -> None:
    snapshot = moment([belief((1, 1), (1, 4)), belief((1, 1), (1, 4))], "2x4")
    policy = Pollux(p=p)
    problem, _ = cells_of(snapshot, policy)
    values = [
        policy.fitness(total_loss(problem, np.array(cells, dtype=np.int16)), 2)
        for cells in ([[1, 0], [0, 1]], [[2, 0], [0, 1]], [[4, 0], [0, 4]])
    ]
    assert values == sorted(values) and values[0] < values[-1]


def test_a_job_never_seen_gets_one_gpu_to_explore_with() -> None:
    decision = Pollux().allocate(moment([belief(), belief()], "4x4"))
    assert decision.gpus.tolist() == [1, 1]


def test_exploration_at_most_doubles() -> None:
    decision = Pollux().allocate(moment([belief((1, 1), (1, 2), noise=1e6)], "4x4"))
    assert decision.gpus.tolist() == [4]


def test_an_allocation_that_would_only_cost_restarts_is_kept() -> None:
    settled = [belief((1, 1), (1, 4)), belief((1, 1), (1, 4))]
    # Each has used up its age in restarts: any change is worth nothing.
    snapshot = moment(
        [*settled], "2x4", placements=[(0, 1), (4, 5)], age_s=300.0, resizes=10, attained_gpu_s=[1.0, 2.0]
    )
    assert Pollux().allocate(snapshot).per_node.tolist() == [[2, 0], [0, 2]]  # type: ignore[union-attr]


def test_two_spanning_jobs_share_a_node_only_without_interference_avoidance() -> None:
    scaling: list[JobBelief | None] = [belief((1, 1), (1, 2), (2, 4), noise=1e6) for _ in range(2)]
    snapshot = moment(scaling, "3x2")
    alone = Pollux(seed=1).allocate(snapshot)
    check_legal(snapshot, alone)
    shared = Pollux(seed=1, avoid_interference=False)
    problem, order = cells_of(snapshot, shared)
    decision = shared.allocate(snapshot)
    assert decision.per_node is not None and alone.per_node is not None
    assert decision.gpus.tolist() == [3, 3]  # on three nodes of two, one is shared
    assert total_loss(problem, decision.per_node[order].astype(np.int16)) < total_loss(
        problem, alone.per_node[order].astype(np.int16)
    )


def test_where_jobs_collide_the_one_that_received_least_wins() -> None:
    snapshot = moment([belief(), belief()], "1x1", attained_gpu_s=[100.0, 10.0])
    assert Pollux().allocate(snapshot).gpus.tolist() == [0, 1]


def test_a_lost_node_is_not_used() -> None:
    cluster = Cluster.parse("2x2").with_node(0, up=False)
    decision = Pollux().allocate(moment([belief((1, 1), (1, 2)), belief((1, 1), (1, 2))], cluster))
    assert decision.per_node is not None
    assert decision.per_node[:, 0].tolist() == [0, 0]
    assert decision.gpus.sum() == 2


def test_nothing_to_decide() -> None:
    policy = Pollux()
    assert policy.allocate(moment([belief()], rows=[])).gpus.tolist() == []
    down = Cluster.parse("1x2").with_node(0, up=False)
    assert policy.allocate(moment([belief()], down)).gpus.tolist() == [0]


def test_the_population_follows_the_jobs_that_remain() -> None:
    policy = Pollux(generations=20)
    beliefs: list[JobBelief | None] = [belief((1, 1), (1, 4)) for _ in range(4)]
    before = moment(beliefs, "4x4")
    policy.allocate(before)
    after = moment(beliefs, "4x4", rows=[1, 3], table=before.table)
    check_legal(after, policy.allocate(after))
    assert policy._memory is not None and policy._memory.population is not None
    assert policy._memory.population.shape[1:] == (2, 4)
    # Another table is another cluster's jobs: nothing of the old population may leak into it.
    other = moment(beliefs, "4x4")
    again = policy.allocate(other)
    np.testing.assert_array_equal(again.per_node, Pollux(generations=20).allocate(other).per_node)


def test_greedy_serves_everybody_before_anybody_twice_when_gpus_are_scarce() -> None:
    snapshot = moment([belief((1, 1), (1, 4)) for _ in range(10)], "2x4")
    problem, _ = cells_of(snapshot, Pollux())
    assert sorted(greedy(problem).sum(axis=1).tolist()) == [0, 0] + [1] * 8


def test_curves_stand_in_where_there_is_no_belief() -> None:
    decision = Pollux().allocate(moment([None, None], "2x4"))
    assert sorted(decision.gpus.tolist()) == [4, 4]


def test_options_are_checked() -> None:
    policy = make_policy("pollux:p=-2,generations=5,avoid-interference=no")
    assert isinstance(policy, Pollux) and (policy.p, policy.generations) == (-2.0, 5)
    assert not policy.avoid_interference
    for bad in ("population=0", "patience=0", "restart_cost_s=-1", "p=nan"):
        with pytest.raises(InputError, match=bad.split("=")[0]):
            make_policy(f"pollux:{bad}")


def test_the_population_outlives_a_node_that_joins(make_snapshot: Any) -> None:
    policy = make_policy("pollux:population=8,generations=5")
    few = make_snapshot(3, cluster="2x4", now_s=10.0)
    policy.allocate(few)
    more = Cluster((*few.cluster.nodes, Node("late", 4)))
    decision = policy.allocate(Snapshot(70.0, more, few.table, few.rows, few.curves))
    assert decision.per_node is not None
    assert decision.per_node[:, 2].sum() > 0, "the new node is used"
