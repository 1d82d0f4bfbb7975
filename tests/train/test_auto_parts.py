"""The parts that observe an unmodified script, each by itself."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from swell.train.auto.agreement import Agreement
from swell.train.auto.loss import Loss, scaled
from swell.train.auto.passes import Drawn, Pass
from swell.train.auto.position import Position
from swell.train.auto.reduction import SUM
from swell.train.auto.rhythm import Rhythm
from swell.train.auto.run import ScriptRun, ScriptStage


def _loader(samples: int = 8) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(samples)), batch_size=2)


def _open(position: Position) -> Pass:
    return position.open(_loader(), lambda here: None)


@pytest.mark.parametrize(
    ("stage", "first", "expected"),
    [
        (ScriptStage.WATCHED, True, True),
        (ScriptStage.WATCHED, False, False),
        (ScriptStage.FOUNDING, False, False),
        (ScriptStage.SHARED, False, True),  # a member that became the leader
        (ScriptStage.ALONE, False, True),
    ],
)
def test_whose_output_counts_at_each_stage(stage: ScriptStage, first: bool, expected: bool) -> None:
    run = ScriptRun(Mock(), leads=first)
    if stage in (ScriptStage.FOUNDING, ScriptStage.SHARED):
        run.found(Mock(is_leader=True, forwarding=False))
    run.stage = stage
    assert run.leads() == expected


def test_the_rhythm_of_a_script_that_accumulates_three_batches_which_it_has_drawn_before() -> None:
    here, rhythm = Pass(_loader(), 0, lambda p: None, training=True), Rhythm()
    for _ in range(3):
        here.take_whole()
    for _ in range(3):
        here.flight.popleft()
        rhythm.computed([here])
    rhythm.stepped()
    assert (rhythm.per_step, rhythm.most_in_flight, rhythm.pending) == (3, 2, False)


def test_a_script_that_leaves_a_pass_early_is_followed_by_its_count_of_batches() -> None:
    position = Position()
    first, second = _open(position), _open(position)
    position.begin(first)
    assert position.main() is first and not position.counts
    position.begin(second)
    assert position.main() is second and position.counts and second.ordinal == 1


def test_a_newcomer_goes_to_the_position_in_every_loader_that_its_script_draws_from() -> None:
    leader, newcomer = Position(), Position()
    passes = {}
    for position in (leader, newcomer):
        here, beside = passes[position] = _open(position), _open(position)
        position.begin(here)
        position.begin(beside, here)
    for here in (*passes[leader], passes[leader][1]):
        here.take_whole()
        here.flight.clear()
    newcomer.restore(leader.capture())
    newcomer.arrive(passes[newcomer][0], live=True)
    assert [here.index for here in passes[newcomer]] == [1, 2]


@pytest.mark.parametrize("pending", [False, True])
def test_membership_changes_between_steps_and_not_while_gradients_are_pending(pending: bool) -> None:
    run, job, rhythm = ScriptRun(Mock(), leads=True), Mock(), Rhythm()
    agreement = Agreement(run, Position(), rhythm)
    agreement.settle(7, [{"candidate": 7}, {"candidate": 7}])
    rhythm.pending = pending
    agreement.carry_out(job)
    assert run.link.release.called == pending and job.boundary.called != pending  # type: ignore[attr-defined]
    assert agreement.number == 0


def test_a_worker_that_is_told_to_leave_notes_that_it_left() -> None:
    run = ScriptRun(Mock(), leads=True)
    with pytest.raises(SystemExit):
        Agreement(run, Position(), Rhythm()).carry_out(Mock(boundary=Mock(side_effect=SystemExit)))
    assert run.left


def test_the_sum_over_a_part_is_made_as_large_as_that_over_the_whole_batch() -> None:
    drawn, loss = Drawn(0, 0, list(range(6)), (0, 2)), Loss()
    loss.reduction.kind = SUM
    assert loss.take(torch.tensor(4.0)) and not loss.take(torch.zeros(2))
    assert scaled(torch.tensor(4.0), drawn) == 3.0
    header: dict[str, Any] = {"n": 2}
    loss.tell(drawn, header, steps=0)
    assert loss.of_all([header, header]) == 8.0
    assert loss.of_all([header, {"n": 4}]) is None, "a worker has not read its loss"
