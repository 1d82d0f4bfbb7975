"""What `--auto` finds out about a script: model, batches, parts, variables, output."""

from __future__ import annotations

import io
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from swell.train.auto import script as auto_script
from swell.train.auto.output import LeaderOnly
from swell.train.auto.passes import Pass

HERE = Path(__file__).resolve().parent


def _loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(10)), batch_size=4, **options)


@given(st.integers(1, 200), st.integers(1, 8))
def test_parts_that_count_cover_a_batch_once(size: int, world: int) -> None:
    cut = [auto_script.part(size, rank, world) for rank in range(world)]
    covered = [i for (low, high), counts in cut if counts for i in range(low, high)]
    assert covered == list(range(size))
    assert all(high - low >= min(2, size) for (low, high), _ in cut), "nobody has a single sample or none"


def test_the_samplers_own_order_is_the_same_everywhere_and_leaves_the_generators_alone() -> None:
    torch.manual_seed(1)
    random.seed(1)
    expected = torch.rand(3), random.random()
    torch.manual_seed(1)
    random.seed(1)
    weighted = WeightedRandomSampler([0.1] * 5 + [1.0] * 5, 10)
    for loader in (_loader(shuffle=True), _loader(sampler=weighted)):
        assert auto_script.batches(loader, 5) == auto_script.batches(loader, 5)
        assert auto_script.batches(loader, 5) != auto_script.batches(loader, 6)
    assert torch.equal(torch.rand(3), expected[0]) and random.random() == expected[1]
    assert auto_script.batches(_loader(), 5) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_a_samplers_own_generator_does_not_remember_earlier_passes() -> None:
    loader = _loader(shuffle=True, generator=torch.Generator().manual_seed(9))
    assert auto_script.batches(loader, 5) == auto_script.batches(loader, 5)


def test_samples_a_dead_worker_took_along_come_back_with_the_next_batch() -> None:
    here = Pass(_loader(), 0, 5, lambda p: None, training=True)
    assert here.take(0, 2) == [0, 1]
    here.reduced, here.missing = True, [2, 3]
    here.advance()
    assert here.take(0, 1) == [2, 3, 4, 5, 6, 7]
    here.reduced = True
    here.advance()
    assert here.take(0, 1) == [8, 9]
    here.reduced, here.missing = True, [9]
    here.advance()
    assert not here.at_end(), "the last batch's samples are not lost either"
    assert here.take(0, 1) == [9]
    here.reduced = True
    here.advance()
    assert here.at_end()


def test_a_pass_that_turns_out_not_to_train_shows_every_sample() -> None:
    here = Pass(_loader(), 0, 5, lambda p: None, training=True)
    seen = here.take(1, 2)
    here.to_evaluation()
    while here.index < len(here.batches):
        seen = seen + here.take_whole()
        here.index += 1
    assert sorted(seen) == list(range(10))


def test_one_module_is_the_model_itself() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert auto_script.find_model(torch.optim.SGD(model.parameters(), lr=1.0)) is model


def test_several_modules_and_loose_parameters_are_one_model() -> None:
    encoder, decoder = nn.Linear(2, 3), nn.Linear(3, 2)
    loose = torch.zeros(4, requires_grad=True)
    optimizer = torch.optim.SGD([loose, *decoder.parameters(), *encoder.parameters()], lr=1.0)
    found = auto_script.find_model(optimizer)
    assert {id(p) for p in found.parameters()} == {id(p) for g in optimizer.param_groups for p in g["params"]}
    assert list(found.state_dict()) == [
        *("parts.0.weight", "parts.0.bias", "parts.1.weight", "parts.1.bias", "loose.0")
    ], "in the optimizer's order, so that all workers agree"
    assert found.state_dict()["parts.0.weight"].shape == decoder.weight.shape


class Meter:
    def __init__(self) -> None:
        self.total, self.inner = 1.5, Count()


class Count:
    def __init__(self) -> None:
        self.n = 7


def _frames() -> list[Any]:
    """The frame of the test that calls."""
    return [f for f in auto_script.script_frames(HERE) if f.f_code.co_name.startswith("test_")]


def test_plain_variables_and_own_objects_travel() -> None:
    epoch, best, history, meter = 3, 0.5, [1.0, 2.0], Meter()
    weights, data = torch.zeros(2), list(range(50_000))
    found = auto_script.variables(_frames(), HERE)
    assert found["0.epoch"] == 3 and found["0.history"] == [1.0, 2.0]
    assert found["0.meter.total"] == 1.5 and found["0.meter.inner.n"] == 7
    assert "0.weights" not in found and "0.data" not in found, "tensors and data stay"
    changed = {**found, "0.epoch": 9, "0.best": 0.75, "0.meter.inner.n": 8, "5.none": 1}
    auto_script.set_variables(_frames(), changed, HERE)
    assert (epoch, best, history, meter.total, meter.inner.n) == (9, 0.75, [1.0, 2.0], 1.5, 8)
    assert len(data) == 50_000 and weights.sum() == 0


def test_what_has_a_state_is_found_but_the_model_and_its_optimizer() -> None:
    model, ema = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    besides = {id(model), id(optimizer)}
    found = auto_script.stateful(_frames(), HERE, besides)
    assert found == {"0.ema": ema, "0.scheduler": scheduler}


@pytest.mark.parametrize(("leads", "expected"), [(True, "ab"), (False, "")])
def test_output_waits_until_it_is_known_who_leads(leads: bool, expected: str) -> None:
    role: list[bool | None] = [None]
    stream = io.StringIO()
    output = LeaderOnly(stream, lambda: role[0])
    output.write("a")
    assert stream.getvalue() == ""
    role[0] = leads
    output.write("b")
    assert stream.getvalue() == expected
    assert not output.isatty() and sys.stdout is not output
