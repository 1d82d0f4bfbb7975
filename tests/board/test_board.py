"""The board: rows and numbers, what a decision does to the books, and what a lost node does."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swell.board import Board, DecisionRhythm, Move
from swell.board.board import in_replicas
from swell.domain import ANY_GPU, Cluster, Event, EventKind, InputError, JobSpec, overlapping
from swell.perf.curves import Curves
from swell.perf.profiles import MeasuredCounts, ProfileSet
from swell.placement import PLACERS
from swell.policies import Decision, Snapshot, make_policy, policy_names
from swell.sim import simulate

CURVES = Curves(np.tile(np.arange(17.0), (64, 1)))


def spec(name: str, submit_s: float = 0.0) -> JobSpec:
    return JobSpec(job_id=name, submit_s=submit_s, model="m", batch_size=1, work=100.0)


def make(cluster: str = "2x4", placer: str = "packed", start_s: float = 10.0, resize_s: float = 2.0) -> Board:
    return Board(Cluster.parse(cluster), placer, lambda row, before, after: resize_s if before else start_s)


def look(board: Board, now_s: float) -> Snapshot:
    return board.snapshot(now_s, CURVES, 0.0, 0.0)


def decide(board: Board, now_s: float, *gpus: int, order: list[int] | None = None) -> list[Move]:
    wanted = Decision(np.array(gpus), order=None if order is None else np.array(order))
    return board.carry_out(look(board, now_s), wanted)


def test_rows_are_used_again_and_numbers_are_not() -> None:
    board = make()
    first, second = board.add(spec("a")), board.add(spec("b"))
    board.remove(first)
    third = board.add(spec("c"))
    assert third == first
    assert look(board, 0.0).rows.tolist() == [second, third]
    assert look(board, 0.0).numbers.tolist() == [1, 2]
    assert board.table.specs[third].job_id == "c" and board.next_number == 3


def test_more_jobs_than_there_were_rows() -> None:
    board = make()
    rows = [board.add(spec(str(i), float(i))) for i in range(500)]
    assert len(set(rows)) == 500
    assert look(board, 0.0).numbers.tolist() == list(range(500))
    assert [board.table.specs[row].job_id for row in board.active.tolist()] == [str(i) for i in range(500)]


def test_a_board_grows_only_when_every_row_has_a_job() -> None:
    board = make()
    rows = {board.add(spec(str(i))) for i in range(len(board.table))}
    assert rows == set(range(len(board.table)))


def test_a_start_a_resize_and_an_end_are_in_the_books() -> None:
    board = make()
    row = board.add(spec("a"))
    table = board.table
    (move,) = decide(board, 5.0, 2)
    assert move == Move(row, (), (0, 1), 10.0, 0.0)
    assert (table.gpus[row], table.first_start_s[row], table.paused_until_s[row]) == (2, 5.0, 15.0)
    table.left[row], table.rate[row] = 100.0, 2.0
    (move,) = decide(board, 20.0, 3)
    assert (move.before, move.after, move.pause_s, move.ran_s) == ((0, 1), (0, 1, 2), 2.0, 5.0)
    assert (table.left[row], table.attained_gpu_s[row], table.run_s[row]) == (90.0, 30.0, 15.0)
    assert (table.resizes[row], table.paused_until_s[row], table.last_start_s[row]) == (1, 22.0, 5.0)
    board.deactivate(row)
    assert board.placer.occupancy.free_gpus == 8 and not len(board.active)


def test_going_from_nothing_to_gpus_again_counts_as_a_resize_and_as_a_start() -> None:
    board = make()
    row = board.add(spec("a"))
    decide(board, 0.0, 2)
    (move,) = decide(board, 20.0, 0)
    assert (move.after, board.table.rate[row], board.table.resizes[row]) == ((), 0.0, 0)
    (move,) = decide(board, 30.0, 2)
    assert (move.pause_s, board.table.resizes[row]) == (10.0, 1)
    assert (board.table.first_start_s[row], board.table.last_start_s[row]) == (0.0, 30.0)


def test_a_resize_during_start_up_does_not_cut_it_short() -> None:
    board = make()
    row = board.add(spec("a"))
    decide(board, 0.0, 1)
    decide(board, 3.0, 2)
    assert board.table.paused_until_s[row] == 10.0


def test_the_decision_says_who_is_placed_first() -> None:
    board = make()
    for name in "ab":
        board.add(spec(name))
    moves = decide(board, 0.0, 2, 2, order=[1, 0])
    assert {board.table.specs[m.row].job_id: m.after for m in moves} == {"b": (0, 1), "a": (2, 3)}


def test_jobs_that_the_policy_does_not_see_are_placed_with_its_decision() -> None:
    board = make("1x4")
    a, b = board.add(spec("a")), board.add(spec("b"))
    decide(board, 0.0, 4, 0)
    seen = look(board, 1.0).with_rows(np.array([a]))
    moves = board.carry_out(seen, Decision(np.array([1])), {b: 3})
    assert {m.row: len(m.after) for m in moves} == {a: 1, b: 3}


def test_a_lost_node_and_the_next_decision_are_one_move() -> None:
    board = make("2x2")
    row = board.add(spec("a"))
    decide(board, 0.0, 4)
    board.set_cluster(board.cluster.with_node(1, up=False), 20.0, "node n1 was lost")
    assert (board.table.gpus[row], board.table.placement[row]) == (2, (0, 1))
    (move,) = decide(board, 20.0, 1)
    assert (move.before, len(move.after), move.reason) == ((0, 1, 2, 3), 1, "node n1 was lost")
    assert board.table.resizes[row] == 1


def test_a_job_left_with_its_survivors_is_told_too() -> None:
    board = make("2x2")
    board.add(spec("a"))
    decide(board, 0.0, 4)
    board.set_cluster(board.cluster.with_node(1, up=False), 20.0, "node n1 was lost")
    (move,) = decide(board, 20.0, 2)
    assert (move.before, move.after, move.pause_s) == ((0, 1, 2, 3), (0, 1), 2.0)


def test_a_job_that_lost_everything_starts_anew() -> None:
    board = make("2x2")
    row = board.add(spec("a"))
    decide(board, 0.0, 2)
    board.set_cluster(board.cluster.with_node(0, up=False), 20.0, "node n0 was lost")
    (move,) = decide(board, 20.0, 2)
    assert (move.before, move.after, move.pause_s) == ((0, 1), (2, 3), 10.0)
    assert board.table.last_start_s[row] == 20.0


def test_a_policy_that_names_nodes_moves_only_those_whose_nodes_change() -> None:
    board = make()
    for name in "ab":
        board.add(spec(name))

    def per_node(*counts: list[int]) -> list[Move]:
        table = np.array(counts)
        return board.carry_out(look(board, 0.0), Decision(table.sum(axis=1), table))

    assert [m.after for m in per_node([2, 0], [0, 3])] == [(0, 1), (4, 5, 6)]
    assert per_node([2, 0], [0, 3]) == []
    assert [m.after for m in per_node([2, 0], [1, 2])] == [(2, 4, 5)]


def test_slots_are_adopted_after_a_restart_if_they_are_still_there() -> None:
    board = make("1x4")
    a, b = board.add(spec("a")), board.add(spec("b"))
    assert board.adopt(a, (1, 2), 3.0)
    assert not board.adopt(b, (2, 3), 3.0), "another has one of them"
    assert not board.adopt(b, (7,), 3.0), "there is no such slot"
    assert (board.table.gpus[a], board.table.first_start_s[a], board.table.gpus[b]) == (2, 3.0, 0)


def test_another_placer_finds_everybody_where_they_are() -> None:
    board = make("1x4")
    row = board.add(spec("a"))
    decide(board, 0.0, 3)
    board.set_placer("buddy")
    assert board.placer.occupancy.held(row) == (0, 1, 2)


@settings(max_examples=30)
@given(st.data())
@pytest.mark.parametrize("placer", sorted(PLACERS))
def test_the_books_agree_whatever_comes_and_goes(placer: str, data: st.DataObject) -> None:
    board = make("3x4", placer)
    names = iter(range(1000))
    for now_s in range(12):
        for _ in range(data.draw(st.integers(0, 3), label="arrivals")):
            board.add(spec(f"j{next(names)}", float(now_s)))
        active = board.active.tolist()
        for row in data.draw(st.lists(st.sampled_from(active), unique=True) if active else st.just([])):
            board.remove(row)
        if data.draw(st.booleans(), label="node changes"):
            node = data.draw(st.integers(0, 2))
            up = not board.cluster.nodes[node].up
            if up or sum(n.up for n in board.cluster.nodes) > 1:
                board.set_cluster(board.cluster.with_node(node, up=up), float(now_s))
        free, wanted = board.cluster.capacity, []
        for _ in range(len(board.active)):
            share = data.draw(st.sampled_from([s for s in (0, 1, 2, 4) if s <= free]))
            free -= share
            wanted.append(share)
        decide(board, float(now_s), *wanted)
        table, rows = board.table, board.active
        placements = [table.placement[row] for row in rows.tolist()]
        assert overlapping(placements) is None
        assert table.gpus[rows].tolist() == [len(p) for p in placements] == wanted
        assert {r: board.placer.occupancy.held(r) for r in rows.tolist()} == dict(
            zip(rows.tolist(), placements)
        )
        assert np.all(np.diff(table.number[rows]) > 0)


# Jobs whose GPUs come in replicas get whole ones, from every policy.


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), min_size=1, max_size=6))
def test_shares_become_multiples_and_never_more_in_sum(jobs: list[tuple[int, int]]) -> None:
    gpus, size = np.array(jobs).T
    rounded = in_replicas(Decision(gpus), size, np.full(len(jobs), 8)).gpus
    assert not (rounded % size).any()
    assert rounded.sum() <= gpus.sum()
    assert (rounded[size == 1] == gpus[size == 1]).all()


def test_what_rounding_frees_completes_the_replica_that_lacks_least() -> None:
    decision = Decision(np.array([3, 5, 2]))
    assert in_replicas(decision, np.array([2, 4, 1]), np.full(3, 8)).gpus.tolist() == [4, 4, 2]
    assert in_replicas(decision, np.array([2, 4, 1]), np.array([3, 8, 8])).gpus.tolist() == [2, 4, 2]


def test_a_policy_that_names_nodes_gives_up_the_rest_where_a_job_has_fewest() -> None:
    named = Decision(np.array([5]), np.array([[1, 4]]))
    rounded = in_replicas(named, np.array([2]), np.array([8]))
    assert rounded.per_node is not None and rounded.per_node.tolist() == [[0, 4]]


@pytest.mark.parametrize("policy", policy_names())
def test_in_the_simulator_every_policy_gives_whole_replicas(policy: str) -> None:
    counts = np.arange(1.0, 9.0)
    profile = MeasuredCounts("m", {ANY_GPU: (counts, {8: counts**0.9})}, 1e6)
    jobs = [
        JobSpec(job_id="a", submit_s=0.0, model="m", batch_size=8, gpus=2, work=900.0, gpus_per_replica=2),
        JobSpec(job_id="b", submit_s=9.0, model="m", batch_size=8, gpus=1, work=500.0),
        JobSpec(job_id="c", submit_s=30.0, model="m", batch_size=8, gpus=3, work=600.0, gpus_per_replica=3),
    ]
    events: list[Event] = []
    simulate(jobs, ProfileSet([profile]), Cluster.parse("2x4"), policy, on_event=events.append)
    moves = [e for e in events if e.kind in (EventKind.ALLOCATED, EventKind.RESIZED)]
    sizes = {job.job_id: job.gpus_per_replica for job in jobs}
    held = [(e.job_id, len(e.data["gpus"])) for e in moves]
    assert {job for job, _ in held} == set(sizes)
    assert all(count % sizes[str(job)] == 0 for job, count in held), held


@pytest.mark.parametrize("policy", ["tide", "optimus", "afs-l", "max-min"])
def test_a_job_of_replicas_alone_gets_as_many_as_fit(policy: str) -> None:
    counts = np.arange(1.0, 9.0)
    profile = MeasuredCounts("m", {ANY_GPU: (counts, {8: counts})}, 1e6)
    job = JobSpec(job_id="a", submit_s=0.0, model="m", batch_size=8, work=900.0, gpus_per_replica=3)
    events: list[Event] = []
    simulate([job], ProfileSet([profile]), Cluster.parse("2x4"), policy, on_event=events.append)
    held = [len(e.data["gpus"]) for e in events if e.kind in (EventKind.ALLOCATED, EventKind.RESIZED)]
    assert held[-1] == 6


def test_bounds_of_a_job_of_replicas_are_multiples() -> None:
    spec = JobSpec(job_id="a", submit_s=0.0, model="m", batch_size=8, gpus_per_replica=4)
    assert (spec.gpus, spec.min_gpus) == (4, 4)
    with pytest.raises(InputError, match=r"max_gpus must be a multiple of gpus_per_replica \(4\), got 6"):
        JobSpec(job_id="a", submit_s=0.0, model="m", batch_size=8, max_gpus=6, gpus_per_replica=4)


# When a policy is asked.


def test_without_rounds_a_policy_is_asked_at_once() -> None:
    rhythm = DecisionRhythm(make_policy("elasticflow"))
    assert rhythm.due_s == math.inf
    rhythm.ask(7.0)
    assert rhythm.due_s == 7.0
    rhythm.decided(7.0, math.inf)
    assert rhythm.due_s == math.inf


def test_with_rounds_it_waits_for_the_next_one_unless_it_is_urgent() -> None:
    rhythm = DecisionRhythm(make_policy("elasticflow"), 60.0)
    rhythm.ask(61.0)
    assert rhythm.due_s == 120.0
    rhythm.ask(62.0, urgent=True)
    assert rhythm.due_s == 62.0
    rhythm.ask(120.0)
    assert rhythm.due_s == 62.0, "the earlier one stands"


def test_a_round_that_begins_now_is_now() -> None:
    rhythm = DecisionRhythm(make_policy("elasticflow"), 60.0)
    rhythm.ask(120.0)
    assert rhythm.due_s == 120.0


def test_a_wake_up_is_put_off_to_a_round() -> None:
    rhythm = DecisionRhythm(make_policy("elasticflow"), 60.0)
    rhythm.decided(60.0, 130.0)
    assert rhythm.due_s == 180.0
    rhythm.decided(60.0, 61.0)
    assert rhythm.due_s == 120.0


def test_a_policy_whose_decision_changes_with_time_is_asked_in_every_round() -> None:
    rhythm = DecisionRhythm(make_policy("pollux"), 60.0)
    rhythm.decided(60.0, math.inf)
    assert rhythm.due_s == 120.0


def test_nobody_is_asked_twice_in_one_moment() -> None:
    rhythm = DecisionRhythm(make_policy("elasticflow"))
    rhythm.decided(5.0, 5.0)
    assert rhythm.due_s > 5.0
