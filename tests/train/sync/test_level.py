"""Newcomers that become level while the members train: equal bits, and what happens where they cannot."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.train.sync.test_mesh import meshes
from tests.waiting import wait_until
from torch import Tensor, nn

from swell.train.agent.errors import PeerLost
from swell.train.sync.level import Optimized, Source, divide, fingerprint, follow

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
}


class Noisy(torch.optim.SGD):
    """An optimizer whose step is no function of parameter, gradient and state."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        out = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(torch.rand(()) * 1e-3)
        return out


class Worker:
    """One worker's model and optimizer, whose state a step has built."""

    def __init__(self, kind: Callable[[Any], torch.optim.Optimizer], seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(5, 40), nn.Linear(40, 7), nn.Linear(7, 3))
        self.optimizer = kind(self.model.parameters())
        self.step(98)

    @property
    def optimized(self) -> Optimized:
        return Optimized(dict(self.model.named_parameters()), self.optimizer)

    def step(self, number: int) -> None:
        """A step with the gradients and the learning rate of that number; one parameter has none."""
        generator = torch.Generator().manual_seed(number)
        for parameter in self.model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        if number % 2:
            self.model[2].bias.grad = None  # type: ignore[union-attr]
        self.optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)
        self.optimizer.step()

    def tensors(self) -> dict[str, Tensor]:
        out = {name: p.detach() for name, p in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                out[f"{name}.{key}"] = value
        return out


class Growth:
    """Members that train, and newcomers that follow them in threads."""

    def __init__(self, kind: Callable[[Any], torch.optim.Optimizer], members: int, newcomers: int) -> None:
        self.crowd = meshes(members + newcomers)
        self.members = [Worker(kind, 0) for _ in range(members)]
        self.newcomers = [Worker(kind, 7 + i) for i in range(newcomers)]
        self.results: dict[int, Any] = {}
        self.steps = 0
        self.tries = 0

    def begin(self) -> None:
        pairs = zip(self.crowd, self.members)
        self.sources = [Source(mesh, worker.optimized, []) for mesh, worker in pairs]
        self.threads = []
        for index, worker in enumerate(self.newcomers):
            mesh = self.crowd[len(self.members) + index]
            self.threads.append(threading.Thread(target=self._follow, args=(index, mesh, worker)))
            self.threads[-1].start()

    def _follow(self, index: int, mesh: Any, worker: Worker) -> None:
        try:
            self.results[index] = follow(mesh, worker.optimized, [], self.tries)
        except Exception as error:
            self.results[index] = error

    def train(self) -> None:
        for worker in self.members:
            worker.step(self.steps)
        self.steps += 1

    def until_agreed(self, timeout_s: float = 30.0) -> None:
        """Train until all members would switch in the same step, and make that step."""
        deadline = time.monotonic() + timeout_s
        while True:
            agreed = [source.at_boundary() for source in self.sources]
            self.train()
            if all(agreed):
                return
            assert time.monotonic() < deadline, "they never agree"
            time.sleep(0.001)

    def switch(self) -> None:
        for source in self.sources:
            source.finish()
        for thread in self.threads:
            thread.join(20)
            assert not thread.is_alive()


@pytest.mark.parametrize(("members", "newcomers"), [(1, 1), (2, 2), (3, 1)])
@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_newcomers_are_level_bit_for_bit_at_the_switch(kind: str, members: int, newcomers: int) -> None:
    growth = Growth(OPTIMIZERS[kind], members, newcomers)
    growth.train()
    growth.begin()
    growth.until_agreed()
    growth.switch()
    assert growth.results == dict.fromkeys(range(newcomers), True)
    assert growth.steps > 2, "no step was made while the newcomers became level"
    expected = growth.members[0].tensors()
    for newcomer in growth.newcomers:
        found = newcomer.tensors()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    growth.train()  # and no step of the members reaches them any more
    assert not torch.equal(growth.members[0].model[0].weight, growth.newcomers[0].model[0].weight)  # type: ignore[arg-type]


def test_an_optimizer_with_noise_of_its_own_is_found_out_by_the_fingerprint() -> None:
    growth = Growth(lambda p: Noisy(p, lr=0.1), 1, 1)
    growth.begin()
    growth.until_agreed()
    growth.switch()
    assert growth.results == {0: True}
    prints = [fingerprint(w.tensors()) for w in (growth.members[0], growth.newcomers[0])]
    assert prints[0] != prints[1]


def test_a_newcomer_with_another_optimizer_state_gets_its_state_in_the_pause() -> None:
    growth = Growth(OPTIMIZERS["adamw"], 2, 1)
    growth.newcomers = [Worker(OPTIMIZERS["sgd"], 3)]
    growth.begin()
    growth.until_agreed()
    growth.switch()
    assert growth.results == {0: False}


def test_after_several_tries_a_newcomer_gets_its_state_in_the_pause() -> None:
    growth = Growth(OPTIMIZERS["sgd"], 1, 1)
    growth.tries = 3
    growth.begin()
    growth.until_agreed()
    growth.switch()
    assert growth.results == {0: False} and growth.sources[0].newcomers == []


def test_a_newcomer_on_the_same_host_as_the_source_is_not_sent_anything() -> None:
    crowd = meshes(2)
    member, newcomer = Worker(OPTIMIZERS["sgd"], 0), Worker(OPTIMIZERS["sgd"], 1)
    before = {name: tensor.clone() for name, tensor in newcomer.tensors().items()}
    source = Source(crowd[0], member.optimized, [1])
    assert follow(crowd[1], newcomer.optimized, [0], 0) is False
    deadline = time.monotonic() + 20
    while not source.at_boundary():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    source.finish()
    assert all(torch.equal(before[name], tensor) for name, tensor in newcomer.tensors().items())


def test_a_candidate_that_is_given_up_wakes_the_newcomer_and_stops_the_recording() -> None:
    growth = Growth(OPTIMIZERS["sgd"], 2, 1)
    growth.begin()
    for _ in range(3):
        for source in growth.sources:
            source.at_boundary()
        growth.train()
    for mesh in growth.crowd:
        mesh.abandon()
    for source in growth.sources:
        source.close()
    growth.threads[0].join(20)
    assert isinstance(growth.results[0], PeerLost)
    growth.train()
    assert not growth.members[0].optimizer._optimizer_step_pre_hooks


def test_a_newcomer_that_is_too_far_behind_is_left_to_the_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("swell.train.sync.level._MOST_RECORDS", 0)
    monkeypatch.setattr("swell.train.sync.level._PATIENCE_S", 0.0)
    growth = Growth(OPTIMIZERS["sgd"], 1, 1)
    growth.begin()
    growth.until_agreed()
    growth.switch()
    assert growth.results == {0: False}


def test_parts_are_cut_by_size_and_lose_nothing() -> None:
    sizes = {"a": 10, "b": 80, "c": 10, "d": 100}
    parameters = {name: torch.zeros(size) for name, size in sizes.items()}
    assert divide(parameters, 2) == [["a", "b", "c"], ["d"]]
    for parts in (1, 2, 3, 7):
        cut = divide(parameters, parts)
        assert len(cut) == parts and [n for part in cut for n in part] == list(sizes)


@pytest.mark.parametrize("moment", ["at once", "before the copy", "after the copy"])
def test_a_candidate_that_is_replaced_leaves_no_thread_behind(moment: str) -> None:
    before = set(threading.enumerate())
    growth = Growth(OPTIMIZERS["sgd"], 2, 2)
    growth.begin()
    if moment != "at once":
        wait_until(
            lambda: all(source.newcomers for source in growth.sources), 20, "the newcomers to be known"
        )
    if moment == "after the copy":
        while any(source.at_boundary() is False and source._snapshot is None for source in growth.sources):
            growth.train()
    for mesh in growth.crowd:
        mesh.abandon()
    for source in growth.sources:
        source.close()
    wait_until(lambda: set(threading.enumerate()) <= before, 20, "the threads of the candidate to end")
