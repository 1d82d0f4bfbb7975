"""What `--auto` finds out about a script: model, batches, parts, variables, output."""

from __future__ import annotations

import io
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from swell.train.auto import layout
from swell.train.auto import script as auto_script
from swell.train.auto.dropout import Dropout
from swell.train.auto.job import ALONE, REPORT_S, ScriptJob
from swell.train.auto.observer import Observer
from swell.train.auto.output import LeaderOnly
from swell.train.auto.passes import Drawn, Order, Pass
from swell.train.auto.position import Position
from swell.train.auto.reduction import MOST_ROUNDS, Reduction, Round, compare, judge
from swell.train.auto.run import ScriptRun
from swell.train.data.samples import fetch
from swell.train.sync.reducer import Reduced


def _loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(10)), batch_size=4, **options)


def _all(order: Order) -> list[list[int]]:
    out: list[list[int]] = []
    while (batch := order.get(len(out))) is not None:
        out.append(batch)
    return out


@given(st.integers(1, 200), st.integers(1, 8))
def test_parts_that_count_cover_a_batch_once(size: int, world: int) -> None:
    cut = [auto_script.part(size, rank, world) for rank in range(world)]
    covered = [i for (low, high), counts in cut if counts for i in range(low, high)]
    assert covered == list(range(size))
    assert all(high - low >= min(2, size) for (low, high), _ in cut), "nobody has a single sample or none"


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


def _mine(drawn: Drawn) -> list[int]:
    return drawn.window[drawn.part[0] : drawn.part[1]]


def test_samples_a_dead_worker_took_along_come_back_with_the_next_batch() -> None:
    here = Pass(_loader(), 0, lambda p: None, training=True)
    assert _mine(here.take(0, 2)) == [0, 1]
    here.carry = [2, 3]
    assert _mine(here.take(0, 1)) == [2, 3, 4, 5, 6, 7]
    assert _mine(here.take(0, 1)) == [8, 9]
    assert here.at_end()
    here.carry = [9]
    assert not here.at_end(), "the last batch's samples are not lost either"
    assert _mine(here.take(0, 1)) == [9]
    assert here.at_end()


def test_a_pass_that_turns_out_not_to_train_shows_every_sample() -> None:
    here = Pass(_loader(), 0, lambda p: None, training=True)
    seen = _mine(here.take(1, 2)) + _mine(here.take(1, 2))
    here.to_evaluation()
    while (drawn := here.take_whole()) is not None:
        seen = seen + drawn.window
    assert sorted(seen) == list(range(10))


def test_a_newcomer_takes_over_what_is_in_flight_and_a_restarted_worker_draws_it_again() -> None:
    leader = Pass(_loader(), 3, lambda p: None, training=True)
    leader.take(0, 1)
    leader.take(0, 1)
    for live, expected in ((True, 2), (False, 0)):
        newcomer = Pass(_loader(), 3, lambda p: None, training=True)
        newcomer.idle()
        newcomer.idle()
        newcomer.go_to(leader.position(), live=live)
        assert newcomer.index == expected
        assert [drawn.samples for drawn in newcomer.flight] == [0, 0], "what it has in hand does not count"


@pytest.mark.parametrize(
    ("losses", "kind"),
    [
        ([2.0, 2.0, 2.0], "mean"),
        ([2.0, 1.97, 1.9], "mean"),
        ([2.0, 3.95, 1.9], "sum"),
        ([-4.0, -8.0, -4.0], "sum"),
        ([2.0, 1.6, 1.3], None),  # the loss changed a lot between the tries
        ([2.0, 3.0, 2.0], None),
        ([float("nan"), 1.0, 1.0], None),
        ([0.0, 0.0, 0.0], None),
    ],
)
def test_a_sum_is_told_from_a_mean_by_the_same_samples_twice(losses: list[float], kind: str | None) -> None:
    assert judge([compare(losses)] * 2) == kind
    assert judge([compare(losses)]) is None, "one round may be by chance"


@pytest.mark.parametrize(
    ("noise", "wrong", "undecided"), [(0.1, 0, 0), (0.4, 0, 3), (0.6, 2, 60), (2.0, 2, 600)]
)
def test_losses_that_differ_from_try_to_try_are_told_apart_in_more_rounds(
    noise: float, wrong: int, undecided: int
) -> None:
    """As with augmented data late in training. `noise`: of each loss, as a power of two. By the first round
    alone, one mean in seven would count as a sum at 0.6."""
    generator = random.Random(1)
    told: Counter[tuple[str, str | None]] = Counter()
    for kind, times in (("mean", 1.0), ("sum", 2.0)):
        for _ in range(300):
            rounds: list[Round | None] = []
            while (found := judge(rounds)) is None:
                losses = [2 ** generator.gauss(0, noise) for _ in range(3)]
                losses[1] *= times
                rounds.append(compare(losses))
            told[kind, found] += 1
    assert told["mean", "sum"] + told["sum", "mean"] <= wrong, told
    assert told["mean", "neither"] + told["sum", "neither"] <= undecided, told


def _with_dropout() -> dict[str, Any]:
    attention = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)
    nn.init.ones_(attention.in_proj_weight)

    def attend(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)

    def by_position(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x, None, 0.5, is_causal=True)

    return {
        "layer": nn.Dropout(0.5),
        "channels": nn.Dropout1d(0.5),
        "alpha": nn.AlphaDropout(0.5),
        "function": lambda x: nn.functional.dropout(x, p=0.5),
        "attention": attend,
        "attention by position": by_position,
        "transformer": lambda x: attention(x, x, x)[0],
    }


@pytest.mark.parametrize("name", list(_with_dropout()))
def test_dropout_can_be_turned_off_and_on_again(name: str) -> None:
    compute, dropout = _with_dropout()[name], Dropout()
    x = torch.linspace(0.5, 3.0, 2 * 16 * 4).view(2, 16, 4)

    def differs() -> bool:
        return not all(torch.equal(compute(x), compute(x)) for _ in range(5))

    assert differs()
    dropout.set(off=True)
    dropout.set(off=True)
    assert not differs()
    dropout.set(off=False)
    assert differs()


@pytest.mark.parametrize("losses", [[2.0, 3.0, 2.0], [1.0, 4.5, 1.0], [0.0, 0.0, 0.0]])
def test_a_loss_that_is_neither_is_tried_several_times(losses: list[float]) -> None:
    reduction, attempt = Reduction(), 0
    while reduction.found is None:
        number, samples = reduction.samples(list(range(10)), attempt, 1)
        assert number == attempt % 3 and len(samples) == (10 if number == 1 else 5)
        reduction.tried(number, losses[number])
        attempt += 1
    assert reduction.found == "neither" and 6 <= attempt <= 3 * MOST_ROUNDS


@pytest.mark.parametrize("kind", ["mean", "sum"])
def test_batches_of_one_step_are_of_one_try(kind: str) -> None:
    """Hugging Face's Trainer divides the sum of each batch by the samples of all batches of its step."""
    reduction, per_step, index = Reduction(), 2, 1  # the newcomer comes in the middle of a step
    while reduction.found is None:
        step = [reduction.samples(list(range(10)), i, per_step) for i in range(index, index // 2 * 2 + 2)]
        whole = sum(len(samples) for _, samples in step)
        for number, samples in step:
            reduction.tried(number, len(samples) / (whole if kind == "mean" else 1))
        index += len(step)
    assert reduction.found == kind and index == 14, "six whole steps after the first half"


def test_one_module_is_the_model_itself() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert auto_script.find_model([torch.optim.SGD(model.parameters(), lr=1.0)]) is model


def test_several_modules_and_loose_parameters_are_one_model() -> None:
    encoder, decoder = nn.Linear(2, 3), nn.Linear(3, 2)
    loose = torch.zeros(4, requires_grad=True)
    optimizer = torch.optim.SGD([loose, *decoder.parameters(), *encoder.parameters()], lr=1.0)
    found = auto_script.find_model([optimizer])
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
    monkeypatch.setattr(layout, "trains_others", lambda job, optimizer: False)
    offered = iter([7, 0])

    def average(header: dict[str, Any], *_: Any, **__: Any) -> Reduced:
        header |= {"candidate": next(offered), "n": 0}
        return Reduced([header], 0.0, 0.0)

    job.average = average
    observer = Observer(ScriptRun(link, leads=True), iter)
    observer.exchange.average(job)
    assert observer.agreement.number == 7 and not link.release.called
    observer.exchange.average(job)  # the step's last batch: the pass is over, and nobody may come now
    assert observer.agreement.number == 0 and link.release.called


def test_a_single_worker_asks_for_newcomers_after_a_step_and_lets_go_of_what_it_agreed_to_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With two optimizers it asks twice for one batch, and only the last answer counts."""
    link, job = Mock(), Mock(rank=0, world=1, steps=0, forwarding=False, confined="")
    monkeypatch.setattr(layout, "trains_others", lambda job, optimizer: False)
    job.offer = Mock(side_effect=[7, 0])
    run = ScriptRun(link, leads=True)
    run.found(job)
    observer = Observer(run, iter)
    observer.after_step(Mock(), (), {})
    assert observer.agreement.number == 7 and not link.release.called
    observer.after_step(Mock(), (), {})
    assert observer.agreement.number == 0 and link.release.called


def test_a_single_worker_with_a_part_of_a_batch_keeps_its_mean_and_computes_the_rest_later() -> None:
    """It drew the batch when there were two; no other worker's part is added, so nothing is weighted."""
    job = Mock(rank=0, world=1, steps=0, confined="")
    job.average = lambda *given, **options: ScriptJob.average(job, *given, **options)
    observer = Observer(ScriptRun(Mock(), leads=True), iter)
    here = Pass(_loader(), 0, lambda p: None, training=True)
    observer.position.active, observer.position.current = [here], [here.take(0, 2)]
    observer.exchange.average(job)
    assert not job.rescale.called and here.carry == [2, 3]


def _reporting_job(tmp_path: Path) -> Any:
    """A job of one worker, whose link only keeps what it is told."""
    link = Mock(report={})
    link.config, link.name, link.directory.path = {}, "w0", tmp_path
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
    assert not layout.trains_others(job, optimizer)
    optimizer.add_param_group({"params": [new]})
    assert not layout.trains_others(job, optimizer), "it is not trained yet"
    new.grad = torch.ones(1)
    assert layout.trains_others(job, optimizer)


def test_a_data_set_that_gives_many_samples_at_once_is_asked_so() -> None:
    class Many(TensorDataset):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [("at once", index) for index in indices]

    assert fetch(Many(torch.arange(4)), [2, 3], list, None) == [("at once", 2), ("at once", 3)]
