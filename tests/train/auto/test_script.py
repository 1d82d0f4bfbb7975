"""What `--auto` finds out about a script, and the parts that observe it, each by itself."""

from __future__ import annotations

import io
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from swell.train.agent.protocol import JobFile
from swell.train.auto import trained
from swell.train.auto.files import LeaderOnly
from swell.train.auto.job import ALONE, REPORT_S, ScriptJob, ScriptRun, ScriptStage
from swell.train.auto.observer import Agreement, Observer
from swell.train.auto.passes import Order, Pass
from swell.train.auto.position import Position, Rhythm
from swell.train.auto.trained import find_model
from swell.train.data.samples import fetch


def _loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(10)), batch_size=4, **options)


def _all(order: Order) -> list[list[int]]:
    out: list[list[int]] = []
    while (batch := order.get(len(out))) is not None:
        out.append(batch)
    return out


class Shuffled(SequentialSampler):
    """A sampler of the script's own, which draws from other generators than torch's."""

    def __iter__(self) -> Iterator[int]:
        indices = list(range(10))
        random.shuffle(indices)
        return iter(int(i) for i in np.random.permutation(indices))  # noqa: NPY002


def _seed() -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002


def _drawn() -> tuple[float, float, float]:
    return float(torch.rand(1)), random.random(), float(np.random.rand())  # noqa: NPY002


def _kinds() -> list[DataLoader[Any]]:
    weighted = WeightedRandomSampler([0.1] * 5 + [1.0] * 5, 10)
    own = {"shuffle": True, "generator": torch.Generator().manual_seed(9)}
    return [
        _loader(),
        _loader(shuffle=True),
        _loader(**own),
        _loader(sampler=weighted),
        _loader(sampler=Shuffled(range(10))),
        _loader(shuffle=True, num_workers=1),
        _loader(shuffle=True, num_workers=1, persistent_workers=True),
    ]


@pytest.mark.parametrize("kind", range(7))
def test_the_order_of_a_pass_is_that_of_a_plain_run_and_leaves_the_same_random_numbers(kind: int) -> None:
    _seed()
    loader, expected = _kinds()[kind], []
    for _ in range(3):
        expected += [[int(i) for (i,) in zip(batch[0])] for batch in loader]
    after = _drawn()
    _seed()
    loader, position, found = _kinds()[kind], Position(), []
    for _ in range(3):
        found += _all(position.open(loader, lambda p: None).order)
    assert found == expected
    assert _drawn() == after


@pytest.mark.parametrize("kind", range(7))
def test_another_worker_that_is_given_what_an_order_began_with_has_the_same(kind: int) -> None:
    _seed()
    theirs = Order(_kinds()[kind])
    expected = _all(theirs)
    random.random(), torch.rand(2)
    kept = _drawn(), torch.get_rng_state()
    loader = _kinds()[kind]
    mine = Order(loader, theirs.begun)
    assert _all(mine) == expected
    assert torch.equal(torch.get_rng_state(), kept[1]), "this worker's own numbers go on as they were"


def test_an_endless_sampler_is_drawn_from_as_needed() -> None:
    data = TensorDataset(torch.arange(10))
    loader = DataLoader(data, batch_size=4, sampler=RandomSampler(data, replacement=True, num_samples=10**10))
    order = Order(loader)
    order.peek(0)
    again = Order(loader, order.begun)
    assert [order.get(i) for i in range(40)] == [again.peek(i) for i in range(40)]
    assert again.get(500) == order.get(500), "positions far ahead are found by drawing up to them"


def test_a_newcomer_takes_over_what_is_in_flight() -> None:
    leader = Pass(_loader(), 3, lambda p: None, training=True)
    first, second = leader.take(), leader.take()
    assert first is not None and second is not None
    newcomer = Pass(_loader(), 3, lambda p: None, training=True)
    newcomer.idle()
    newcomer.go_to(leader.position())
    assert "1 batches ahead, and the others 2" in newcomer.astray
    newcomer.astray = ""
    newcomer.idle()
    newcomer.go_to(leader.position())
    assert (newcomer.index, newcomer.astray) == (2, "") and list(newcomer.flight) == [first, second]


def test_one_module_is_the_model_itself() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert find_model([torch.optim.SGD(model.parameters(), lr=1.0)]) is model


def test_several_modules_and_loose_parameters_are_one_model() -> None:
    encoder, decoder = nn.Linear(2, 3), nn.Linear(3, 2)
    loose = torch.zeros(4, requires_grad=True)
    optimizer = torch.optim.SGD([loose, *decoder.parameters(), *encoder.parameters()], lr=1.0)
    found = find_model([optimizer])
    assert {id(p) for p in found.parameters()} == {id(p) for g in optimizer.param_groups for p in g["params"]}
    assert list(found.state_dict()) == [
        *("parts.0.weight", "parts.0.bias", "parts.1.weight", "parts.1.bias", "loose.0")
    ], "in the optimizer's order, so that all workers agree"
    assert found.state_dict()["parts.0.weight"].shape == decoder.weight.shape


@pytest.mark.parametrize(("leads", "expected"), [(True, "a"), (False, "")])
def test_only_the_leaders_output_is_shown(tmp_path: Path, leads: bool, expected: str) -> None:
    stream = io.StringIO()
    worker = Mock(steps=0, behind=False, leads=lambda: leads)
    output = LeaderOnly(stream, worker, tmp_path / "mark")
    assert output.write("a") == 1
    assert stream.getvalue() == expected
    assert not output.isatty() and sys.stdout is not output


def test_what_was_agreed_on_in_the_middle_of_an_accumulated_step_is_let_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise no later candidate is looked at, and the job never grows again."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    link, job = Mock(), Mock(rank=0, world=2, steps=0, model=model, optimizer=optimizer)
    monkeypatch.setattr("swell.train.auto.observer.trains_others", lambda job, optimizer: False)
    job.offer, job.share = Mock(side_effect=[7, 0]), lambda header, check: [header]
    run = ScriptRun(link, leads=True)
    run.found(job)
    observer = Observer(run, iter)
    observer.exchange.average(job)
    assert observer.agreement.number == 7 and not link.release.called
    observer.exchange.average(job)  # the step's last batch: the pass is over, and nobody may come now
    assert observer.agreement.number == 0 and link.release.called


def test_a_single_worker_asks_for_newcomers_after_a_step_and_lets_go_of_what_it_agreed_to_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With two optimizers it asks twice for one batch, and only the last answer counts."""
    link, job = Mock(), Mock(rank=0, world=1, steps=0, forwarding=False, confined="")
    monkeypatch.setattr("swell.train.auto.observer.trains_others", lambda job, optimizer: False)
    job.offer = Mock(side_effect=[7, 0])
    run = ScriptRun(link, leads=True)
    run.found(job)
    observer = Observer(run, iter)
    observer.after_step(Mock(), (), {})
    assert observer.agreement.number == 7 and not link.release.called
    observer.after_step(Mock(), (), {})
    assert observer.agreement.number == 0 and link.release.called


def _reporting_job(tmp_path: Path) -> Any:
    """A job of one worker, whose link only keeps what it is told."""
    link = Mock(report={})
    link.config, link.name, link.directory.path = JobFile(), "w0", tmp_path
    model = nn.Linear(2, 1)
    return ScriptJob(Mock(), model, torch.optim.SGD(model.parameters(), lr=1.0), link, 0)


def test_the_time_of_a_step_that_probes_the_loss_is_not_reported(tmp_path: Path) -> None:
    """In it the leader computes the whole batch, so it would look as if more workers were not faster."""
    job = _reporting_job(tmp_path)
    job.stepped(ALONE, 20)  # the first of a configuration tells no speed
    for divided, reported in ((False, False), (True, True)):
        job._reported_s = -1.0
        job.stepped(ALONE, 20, divided=divided)
        assert ("step_s" in job._link.report) == reported


def test_a_report_is_made_now_and_then_and_after_the_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = _reporting_job(tmp_path)
    monkeypatch.setattr(time, "perf_counter", lambda: job.steps * REPORT_S / 10)
    for _ in range(25):
        job.stepped(ALONE, 20)
        assert job._link.step == job.steps, "the step itself is always up to date"
    assert 15 <= job._link.report["step"] < 25, "reports of all steps would never be sent"
    job.report()
    assert job._link.report["step"] == 25 and job._link.report["batch_size"] == 20


def test_a_parameter_that_was_frozen_or_added_later_is_noticed_by_its_gradient() -> None:
    old, new = (nn.Parameter(torch.zeros(1)) for _ in range(2))
    optimizer = torch.optim.SGD([old], lr=1.0)
    job = Mock(unexchanged={}, parameters=lambda: [old])
    old.grad = torch.ones(1)
    assert not trained.trains_others(job, optimizer)
    optimizer.add_param_group({"params": [new]})
    assert not trained.trains_others(job, optimizer), "it is not trained yet"
    new.grad = torch.ones(1)
    assert trained.trains_others(job, optimizer)


def test_a_data_set_that_gives_many_samples_at_once_is_asked_so() -> None:
    class Many(TensorDataset):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [("at once", index) for index in indices]

    assert fetch(Many(torch.arange(4)), [2, 3], list, None) == [("at once", 2), ("at once", 3)]


def _opened(position: Position) -> Pass:
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


def test_the_rhythm_of_a_script_that_has_drawn_three_batches_before_it_computes_them() -> None:
    here, rhythm = Pass(_loader(), 0, lambda p: None, training=True), Rhythm()
    for _ in range(3):
        here.take()
    for _ in range(3):
        here.flight.popleft()
        rhythm.computed([here])
    rhythm.stepped()
    assert (rhythm.most_in_flight, rhythm.pending) == (2, False)


def test_a_script_that_leaves_a_pass_early_is_followed_by_its_count_of_batches() -> None:
    position = Position()
    first, second = _opened(position), _opened(position)
    position.begin(first)
    assert position.main() is first and not position.counts
    position.begin(second)
    assert position.main() is second and position.counts and second.ordinal == 1


def test_a_newcomer_goes_to_the_position_in_every_loader_that_its_script_draws_from() -> None:
    leader, newcomer = Position(), Position()
    passes = {}
    for position in (leader, newcomer):
        here, beside = passes[position] = _opened(position), _opened(position)
        position.begin(here)
        position.begin(beside, here)
    for here in (*passes[leader], passes[leader][1]):
        here.take()
        here.flight.clear()
    newcomer.restore(leader.capture())
    newcomer.arrive(passes[newcomer][0])
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
