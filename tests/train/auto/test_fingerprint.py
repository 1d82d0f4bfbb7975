"""What must be equal on all workers of an unmodified script, and what happens if it is not."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from swell.train.auto.fingerprint import (
    ROTATION,
    Fingerprint,
    exact,
    far_from,
    follow,
    odd_ones,
    rough,
    settings,
)
from swell.train.learner import Several


def _model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))


def _stepped(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **options)
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    return optimizer


class Job:
    """What a fingerprint looks at."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world, self.generation, self.steps = rank, world, 1, 0
        self.model: nn.Module = _model()
        self.optimizer = _stepped(self.model)


class Gone(Exception):
    """A worker ended, to be replaced."""


class Crew:
    """Workers that tell each other their headers, as `Exchange` does."""

    def __init__(self, directory: Path, world: int, monkeypatch: pytest.MonkeyPatch) -> None:
        (directory / "logs").mkdir()
        self.jobs: list[Any] = [Job(rank, world) for rank in range(world)]
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.links = [self._link(f"w{rank}", directory) for rank in range(world)]
        self.fingerprints = [Fingerprint(link) for link in self.links]
        self.replaced: list[int] = []
        monkeypatch.setattr("os._exit", Mock(side_effect=Gone))

    def _link(self, name: str, directory: Path) -> Any:
        link = Mock(directory=Mock(path=directory))
        link.name = name
        link.event = lambda kind, **fields: self.events.append((kind, fields))
        return link

    def step(self) -> None:
        headers: list[dict[str, Any]] = [{} for _ in self.jobs]
        for one, job, header in zip(self.fingerprints, self.jobs, headers):
            one.tell(job, header)
        for rank, (one, job) in enumerate(zip(self.fingerprints, self.jobs)):
            try:
                one.take(job, headers)
            except Gone:
                self.replaced.append(rank)
        for job in self.jobs:
            job.steps += 1

    def steps(self, most: int) -> None:
        """Step until a worker is replaced."""
        for _ in range(most):
            if not self.replaced:
                self.step()


def test_the_settings_of_an_optimizer_are_its_plain_values() -> None:
    optimizer = _stepped(_model(), betas=(0.8, 0.9))
    (found,) = settings(optimizer)
    assert found["lr"] == 0.01 and found["betas"] == [0.8, 0.9] and "params" not in found


def test_a_worker_follows_every_setting_of_the_leaders_optimizer() -> None:
    leader, other = _stepped(_model(), betas=(0.8, 0.9)), _stepped(_model())
    leader.param_groups[0] |= {"lr": 0.005, "weight_decay": 0.3, "own": "text"}
    other.param_groups[0] |= {"own": None}
    changed = follow(other, settings(leader))
    assert {text.split(" ")[0] for text in changed} == {"lr", "betas", "weight_decay", "own"}
    assert settings(other) == settings(leader)
    assert other.param_groups[0]["betas"] == (0.8, 0.9), "still a tuple"
    assert follow(other, settings(leader)) == []


def test_a_learning_rate_that_is_a_tensor_is_set_in_place() -> None:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), foreach=False)
    rate = optimizer.param_groups[0]["lr"]
    theirs = settings(optimizer)
    theirs[0]["lr"] = 0.5
    assert follow(optimizer, theirs) and optimizer.param_groups[0]["lr"] is rate and float(rate) == 0.5


def test_a_script_that_changes_its_groups_is_left_alone_and_nan_is_equal_to_nan() -> None:
    optimizer = _stepped(_model())
    assert follow(optimizer, settings(optimizer) * 2) == []
    optimizer.param_groups[0]["odd"] = math.nan
    assert follow(optimizer, settings(optimizer)) == []


@given(
    st.integers(0, 10**6),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int16, torch.bool]),
)
def test_a_sum_of_bits_changes_with_any_element(seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensor = (torch.rand(13, 3, generator=generator) * 100).to(dtype)
    before = exact(tensor)
    assert exact(tensor.clone()) == before and isinstance(before, int)
    index = seed % tensor.numel()
    value = tensor.view(-1)[index]
    tensor.view(-1)[index] = ~value if dtype == torch.bool else value * 2 + 1
    assert exact(tensor) != before


def test_sums_of_strange_shapes() -> None:
    assert exact(torch.zeros(0)) == 0 and exact(torch.tensor(1.0)) != exact(torch.tensor(2.0))
    transposed = torch.arange(6.0).reshape(2, 3).T
    assert exact(transposed) == exact(transposed.contiguous())
    assert rough(torch.tensor([1.0, -2.0])) == (-1.0, 3.0)


@pytest.mark.parametrize(
    ("values", "odd"),
    [
        ([[1], [1], [1]], set()),
        ([[1], [1], [2]], {2}),
        ([[2], [1], [1]], {0}),
        ([[1], [2]], {1}),
        ([[1], [2], [3]], {1, 2}),
        ([None, [2], [2], [1]], {3}),
        ([[1], None, None], set()),
        ([None, None], set()),
        ([[1, 2], [1, 3], [1, 3], [1, 2]], {1, 2}),
    ],
)
def test_those_that_differ_from_most_are_the_odd_ones(values: list[Any], odd: set[int]) -> None:
    assert odd_ones(values) == odd


def test_machines_that_compute_differently_may_differ_a_little() -> None:
    assert far_from([[(1.0, 9.0)], [(1.0002, 9.0)], None]) == set()
    assert far_from([[(1.0, 9.0)], [(1.2, 9.0)]]) == {1}
    assert far_from([[(1.2, 9.0)], [(1.0, 9.0)], [(1.0, 9.0)]]) == {0}
    assert far_from([[(1.0, 9.0)], [(math.nan, 9.0)]]) == {1}
    assert far_from([None, None]) == set()


def test_workers_that_are_equal_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crew = Crew(tmp_path, 3, monkeypatch)
    for _ in range(2 * ROTATION):
        crew.step()
    assert not crew.replaced and not crew.events


@pytest.mark.parametrize("number", range(40))
def test_whatever_makes_a_worker_differ_is_noticed_within_fifty_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    crew, chance = Crew(tmp_path, 2 + number % 3, monkeypatch), random.Random(number)
    for _ in range(chance.randrange(50)):
        crew.step()
    rank = chance.randrange(0 if len(crew.jobs) > 2 else 1, len(crew.jobs))
    job = crew.jobs[rank]
    tensors = [p.detach() for p in job.model.parameters()] + [
        b for b in job.model.buffers() if b.is_floating_point()
    ]
    tensors += [v for s in job.optimizer.state.values() for v in s.values()]
    victim = chance.choice(tensors).view(-1)
    victim[chance.randrange(len(victim))] += 1e-3
    crew.steps(50)
    assert crew.replaced == [rank]
    ((kind, fields),) = crew.events
    assert kind == "differs" and fields["worker"] == f"w{rank}" and fields["then"] == "it is replaced"


def test_a_learning_rate_that_differs_is_set_and_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crew = Crew(tmp_path, 3, monkeypatch)
    crew.step()
    for _ in range(2):
        crew.jobs[2].optimizer.param_groups[0]["lr"] = 0.5
        crew.step()
    assert [job.optimizer.param_groups[0]["lr"] for job in crew.jobs] == [0.01] * 3
    ((kind, fields),) = crew.events
    assert kind == "differs" and fields["worker"] == "w2" and fields["step"] == 1
    assert fields["what"] == "lr of group 0: 0.5, on the leader 0.01"
    assert fields["then"] == "it follows the leader"


def test_what_the_leader_changes_holds_for_all_in_the_same_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crew = Crew(tmp_path, 2, monkeypatch)
    crew.step()
    crew.jobs[0].optimizer.param_groups[0]["lr"] = 0.005
    crew.step()
    assert crew.jobs[1].optimizer.param_groups[0]["lr"] == 0.005


def test_several_optimizers_are_compared_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crew = Crew(tmp_path, 2, monkeypatch)
    for job in crew.jobs:
        parts = [torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9) for layer in job.model]
        for part in parts:
            part.step()
        job.optimizer = Several(parts)
    next(iter(crew.jobs[1].optimizer.parts[1].state.values()))["momentum_buffer"][0] += 1e-3
    crew.steps(50)
    assert crew.replaced == [1] and crew.events[0][1]["what"] == "optimizer state of 1.weight"


def test_what_differs_again_and_again_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crew = Crew(tmp_path, 2, monkeypatch)
    with torch.no_grad():
        crew.jobs[1].model.get_parameter("0.weight")[0, 0] += 1.0
    for _ in range(6 * ROTATION):
        crew.step()
    assert crew.replaced == [1, 1, 1]
    said = [fields["then"] for _, fields in crew.events]
    assert said == ["it is replaced"] * 3 + ["it goes on: that differs again and again"]


def test_sums_of_another_generation_or_another_step_are_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crew = Crew(tmp_path, 2, monkeypatch)
    crew.step()
    with torch.no_grad():
        for parameter in crew.jobs[1].model.parameters():
            parameter.add_(1.0)
    crew.step()
    for job in crew.jobs:
        job.generation += 1
    crew.jobs[1].model.load_state_dict(crew.jobs[0].model.state_dict())
    for _ in range(ROTATION):
        crew.step()
    assert not crew.replaced


def test_a_worker_on_another_machine_is_compared_roughly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crew = Crew(tmp_path, 2, monkeypatch)
    crew.fingerprints[1]._machine = "another"
    with torch.no_grad():
        crew.jobs[1].model.get_parameter("0.weight")[0, 0] += 1e-6
    for _ in range(ROTATION + 2):
        crew.step()
    assert not crew.replaced
    with torch.no_grad():
        crew.jobs[1].model.get_parameter("0.weight")[0, 0] += 0.1
    crew.steps(50)
    assert crew.replaced == [1]
