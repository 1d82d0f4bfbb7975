"""What holds for every placer, whatever is asked of it in whatever order."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from swell.domain import Cluster, Node, overlapping
from swell.placement import DOWN, FREE, PLACERS, NoRoom, make_placer

JOBS = st.integers(0, 11)
SHARES = st.one_of(st.sampled_from([0, 1, 2, 4, 8]), st.integers(0, 13))

POWER_OF_TWO = st.sampled_from(["4x4", "8x2", "2x8", "3x4", "5x2", "7x1", "6x4"])
ODD = st.sampled_from(["3x3", "2x6", "2x4,3x2", "1x1,2x3,1x4,1x3", "1x16,1x5"])
TYPED = st.sampled_from(["2x4:t4,2x4:a100", "1x6:t4,3x2:a100,1x6:t4"])
CLUSTERS = st.one_of(POWER_OF_TWO, ODD, TYPED).map(Cluster.parse)

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("place"), st.dictionaries(JOBS, SHARES, min_size=1, max_size=5)),
        st.tuples(st.just("place"), st.dictionaries(JOBS, SHARES, min_size=1, max_size=5)),
        st.tuples(st.just("per-node"), st.tuples(JOBS, st.integers(0, 2**30))),
        st.tuples(st.just("flip"), st.tuples(st.integers(0, 7), st.booleans())),
        st.tuples(st.just("held"), st.lists(st.integers(0, 31), max_size=5)),
    ),
    max_size=25,
)


def check_ledger(placer):
    """The ledger's own invariants: no GPU twice, none on a lost node, every count right."""
    ledger, cluster = placer.occupancy, placer.cluster
    held = dict(ledger.jobs)
    assert overlapping(held.values()) is None
    assert () not in held.values()
    owner = [
        FREE if cluster.nodes[cluster.node_of_gpu[gpu]].up and gpu not in cluster.held else DOWN
        for gpu in range(len(cluster.node_of_gpu))
    ]
    for job, gpus in held.items():
        assert list(gpus) == sorted(gpus)
        for gpu in gpus:
            assert owner[gpu] == FREE
            owner[gpu] = job
    assert ledger.owner.tolist() == owner
    free = Counter(cluster.node_of_gpu[gpu] for gpu, by in enumerate(owner) if by == FREE)
    assert ledger.free.tolist() == [free[node] for node in range(len(cluster.nodes))]
    assert ledger.free_gpus == owner.count(FREE)
    across = Counter()
    for gpus in held.values():
        if len(cluster.nodes_of(gpus)) > 1:
            across.update(cluster.nodes_of(gpus))
    assert ledger.crossing.tolist() == [across[node] for node in range(len(cluster.nodes))]


def check_answer(placer, before, answer, changes):
    """The answer tells exactly what changed, and each job has what it asked for."""
    after = dict(placer.occupancy.jobs)
    for job in before.keys() | after.keys() | answer.keys():
        if job in answer:
            assert answer[job] == after.get(job, ())
            assert answer[job] != before.get(job, ()), "an answer names only what changed"
        else:
            assert after.get(job) == before.get(job)
    for job, gpus in changes.items():
        assert len(after.get(job, ())) == gpus
    for job in answer.keys() - changes.keys():
        assert placer.name == "buddy", "only buddy may move others"
        assert len(answer[job]) == len(before[job])


@pytest.mark.parametrize("name", sorted(PLACERS))
@settings(max_examples=100)
@given(cluster=CLUSTERS, steps=STEPS)
def test_placers_keep_the_ledger_right_through_any_history(name, cluster, steps):
    placer = make_placer(name, cluster)
    for kind, what in steps:
        before = dict(placer.occupancy.jobs)
        if kind == "place":
            given_back = sum(len(before.get(job, ())) for job in what)
            try:
                answer = placer.place(what)
            except NoRoom:
                assert sum(what.values()) > given_back + placer.occupancy.free_gpus
                assert dict(placer.occupancy.jobs) == before
            else:
                check_answer(placer, before, answer, what)
        elif kind == "per-node":
            job, seed = what
            room = placer.occupancy.free.copy()
            for gpu in before.get(job, ()):
                room[cluster.node_of_gpu[gpu]] += 1
            row = [seed // (7**i) % (int(most) + 1) for i, most in enumerate(room)]
            answer = placer.place_per_node({job: row})
            held = placer.occupancy.held(job)
            per_node = Counter(cluster.node_of_gpu[gpu] for gpu in held)
            assert [per_node[node] for node in range(len(row))] == row
            check_answer(placer, before, answer, {job: sum(row)})
        elif kind == "held":
            now = placer.cluster
            held = frozenset(gpu % len(now.node_of_gpu) for gpu in what)
            assume(len(held) < now.capacity + len(now.held))
            after = Cluster(now.nodes, held)
            assume(after.capacity)
            answer = placer.set_cluster(after, keep_survivors=True)
            for job, gpus in before.items():
                left = tuple(g for g in gpus if g not in held)
                assert placer.occupancy.held(job) == left
                assert (job in answer) == (left != gpus)
        else:
            index, keep = what
            index %= len(cluster.nodes)
            now = placer.cluster
            was_up = now.nodes[index].up
            assume(now.capacity > now.nodes[index].gpus or not was_up)
            answer = placer.set_cluster(now.with_node(index, up=not was_up), keep_survivors=keep)
            for job, gpus in before.items():
                left = tuple(g for g in gpus if not (was_up and cluster.node_of_gpu[g] == index))
                if left == gpus:
                    assert job not in answer
                    assert placer.occupancy.held(job) == gpus
                else:
                    assert answer[job] == (left if keep else ()) == placer.occupancy.held(job)
        check_ledger(placer)


@settings(max_examples=200)
@given(
    cluster=POWER_OF_TWO.map(Cluster.parse),
    steps=st.lists(st.dictionaries(JOBS, st.sampled_from([0, 1, 2, 4, 8, 16]), min_size=1), max_size=12),
)
def test_buddy_shares_are_aligned_blocks_whenever_that_many_gpus_are_free(cluster, steps):
    placer = make_placer("buddy", cluster)
    for changes in steps:
        # A share above the largest power of two in the cluster cannot be one block.
        changes = {job: gpus for job, gpus in changes.items() if gpus <= cluster.capacity}
        try:
            placer.place(changes)
        except NoRoom:
            continue
        for gpus in placer.occupancy.jobs.values():
            assert gpus[0] % len(gpus) == 0
            assert gpus == tuple(range(gpus[0], gpus[0] + len(gpus)))


@settings(max_examples=100)
@given(
    sizes=st.lists(st.sampled_from([2, 3, 4, 6, 8]), min_size=2, max_size=6),
    shares=st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=12),
)
def test_buddy_blocks_are_aligned_inside_nodes_of_any_size(sizes, shares):
    cluster = Cluster(tuple(Node(f"n{i}", gpus) for i, gpus in enumerate(sizes)))
    placer = make_placer("buddy", cluster)
    for job, gpus in enumerate(shares):
        if gpus > placer.occupancy.free_gpus:
            continue
        placer.place({job: gpus})
        held = placer.occupancy.held(job)
        start = held[0] - int(cluster.first_gpu[cluster.node_of_gpu[held[0]]])
        if len(cluster.nodes_of(held)) == 1:
            assert held == tuple(range(held[0], held[0] + gpus))
            assert start % gpus == 0


@settings(max_examples=200)
@given(
    cluster=st.one_of(POWER_OF_TWO, ODD).map(Cluster.parse),
    shares=st.lists(st.integers(1, 9), min_size=1, max_size=12),
)
def test_packed_uses_one_node_if_any_has_room_and_else_the_fewest(cluster, shares):
    placer = make_placer("packed", cluster)
    for job, gpus in enumerate(shares):
        free = placer.occupancy.free.copy()
        if gpus > free.sum():
            break
        fewest, room = 0, 0
        for most in sorted(free.tolist(), reverse=True):
            fewest, room = fewest + 1, room + most
            if room >= gpus:
                break
        (held,) = placer.place({job: gpus}).values()
        nodes = placer.cluster.nodes_of(held)
        assert len(nodes) == fewest
        if fewest == 1:
            (node,) = nodes
            assert free[node] == min(most for most in free if most >= gpus)


@settings(max_examples=200)
@given(
    cluster=st.one_of(POWER_OF_TWO, ODD).map(Cluster.parse),
    steps=st.lists(st.dictionaries(JOBS, st.integers(0, 9), min_size=1), max_size=8),
)
def test_most_free_follows_its_rule_gpu_by_gpu(cluster, steps):
    """Against the rule written out plainly: take what the node with the most free GPUs has, and again."""
    placer = make_placer("most-free", cluster)
    rows = {}
    for changes in steps:
        changes = {job: gpus for job, gpus in changes.items() if gpus != sum(rows.get(job, {}).values())}
        try:
            placer.place(changes)
        except NoRoom:
            continue
        for job in changes:
            rows.pop(job, None)
        for job, gpus in changes.items():
            free = [
                node.gpus - sum(row.get(i, 0) for row in rows.values())
                for i, node in enumerate(cluster.nodes)
            ]
            row = {}
            while gpus:
                node = free.index(max(free))
                row[node] = min(gpus, free[node])
                gpus -= row[node]
                free[node] -= row[node]
            if row:
                rows[job] = row
        got = {job: dict(Counter(cluster.node_of_gpu[list(g)])) for job, g in placer.occupancy.jobs.items()}
        assert got == rows


@pytest.mark.parametrize("name", sorted(PLACERS))
@pytest.mark.parametrize("shape", ["32x8", "16x8:t4,16x8:a100"])
def test_placements_do_not_depend_on_the_names_of_the_jobs(name, shape):
    """2,000 jobs come and go and nodes are lost; one ledger knows the jobs by number, the other by row."""
    rng = np.random.default_rng(3)
    cluster = Cluster.parse(shape)
    by_number, by_row = make_placer(name, cluster), make_placer(name, cluster)
    free_rows = rng.permutation(300).tolist()
    row = {}
    started = 0
    while started < 2000:
        if rng.random() < 0.05:
            lost = int(rng.integers(len(cluster.nodes)))
            cluster = cluster.with_node(lost, up=not cluster.nodes[lost].up)
            hurt = by_number.set_cluster(cluster, keep_survivors=True)
            answer = by_row.set_cluster(cluster, keep_survivors=True)
            assert list(answer.items()) == [(row[n], gpus) for n, gpus in hurt.items()]
        changes = (
            dict.fromkeys(rng.choice(list(row), len(row) // 10, replace=False).tolist(), 0) if row else {}
        )
        room = by_number.occupancy.free_gpus + sum(len(by_number.occupancy.held(n)) for n in changes)
        for number in range(started, started + 30):
            gpus = int(2 ** rng.integers(0, 6))
            if gpus <= room and free_rows:
                changes[number], row[number] = gpus, free_rows.pop(-int(rng.integers(1, len(free_rows) + 1)))
                room -= gpus
        started += 30
        moved = by_number.place(changes)
        answer = by_row.place({row[n]: gpus for n, gpus in changes.items()})
        assert list(answer.items()) == [(row[n], gpus) for n, gpus in moved.items()]
        for number in [n for n in row if not by_number.occupancy.held(n)]:
            free_rows.append(row.pop(number))
    check_ledger(by_row)


def test_new_nodes_join_at_the_end_and_are_used():
    for name in PLACERS:
        cluster = Cluster.parse("3x4")
        placer = make_placer(name, cluster)
        placer.place({1: 8, 2: 4})
        assert placer.set_cluster(Cluster((*cluster.nodes, Node("n3", 4)))) == {}
        assert placer.place({3: 4}) == {3: (12, 13, 14, 15)}


def test_buddy_counts_the_jobs_it_moved():
    placer = make_placer("buddy", Cluster.parse("2x2"))
    placer.place({1: 1, 2: 1, 3: 1, 4: 1})
    placer.place({2: 0, 4: 0})
    answer = placer.place({5: 2})
    assert placer.migrations == 1
    assert len(answer) == 2
    assert answer.keys() - {5} <= {1, 3}


def test_buddy_takes_whole_aligned_nodes_for_a_job_larger_than_a_node():
    placer = make_placer("buddy", Cluster.parse("4x4"))
    placer.place({1: 1})
    assert placer.place({2: 8}) == {2: tuple(range(8, 16))}
    assert placer.place({3: 4}) == {3: (4, 5, 6, 7)}


def test_buddy_splits_a_share_only_where_lost_nodes_leave_no_aligned_block():
    cluster = Cluster.parse("4x4")
    placer = make_placer("buddy", cluster)
    placer.set_cluster(cluster.with_node(1, up=False).with_node(2, up=False))
    assert placer.place({1: 8}) == {1: (0, 1, 2, 3, 12, 13, 14, 15)}
