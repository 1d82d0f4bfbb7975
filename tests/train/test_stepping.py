"""Steps and changes of membership, between threads: what a worker does in a step, and when it leaves."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from tests.train.sync.test_crew import enter, job, weight
from tests.train.sync.test_mesh import meshes, together
from torch import nn

from swell.train.agent.errors import PeerLost, UsageError
from swell.train.agent.protocol import JobFile
from swell.train.job import Job
from swell.train.sync.control import STOP, Link
from swell.train.sync.mesh import Mesh
from swell.train.worker import Change, Stage

DATA = [(torch.tensor([float(i), 1.0]), torch.tensor([float(i % 3)])) for i in range(12)]


class FakeLink:
    """Offers one candidate, and keeps what it is told."""

    name, config, step, report = "w0", JobFile(slots=[0, 1]), 0, dict[str, Any]()

    def __init__(self, number: int = 0, mesh: Mesh | None = None, newcomers: bool = False) -> None:
        self.number, self.mesh, self.newcomers = number, mesh, newcomers
        self.said: list[str] = []

    def offer(self, epoch: int) -> int:
        return self.number

    def take(self, number: int) -> Mesh | None:
        return self.mesh

    def brings_newcomers(self, number: int) -> bool:
        return self.newcomers and number > 0

    def wait_recovery(self, broken: Mesh, operation: int) -> Mesh:
        assert self.mesh is not None
        return self.mesh

    def entered(self, mesh: Mesh, step: int, epoch: int) -> None:
        self.said.append("entered")

    def release(self) -> None:
        self.said.append("release")

    def leaving(self, number: int) -> None:
        self.said.append("leaving")

    def stopped(self) -> None:
        self.said.append("stopped")

    def event(self, name: str, **fields: Any) -> None:
        self.said.append(name)


def test_the_link_of_these_tests_takes_what_the_real_one_takes() -> None:
    for name, method in inspect.getmembers(FakeLink, inspect.isfunction):
        if name != "__init__":
            assert inspect.signature(method) == inspect.signature(getattr(Link, name)), name
    with pytest.raises(AttributeError):
        FakeLink().no_call_of_the_link()  # type: ignore[attr-defined]


def linked(one: Job, link: FakeLink) -> Job:
    for part in (one._member, one._saver, one._reporter):
        part._link = link  # type: ignore[assignment]
    return one


def train(one: Job, *, batch: int = 5) -> list[float]:
    loader = one.loader(DATA, batch_size=batch, shuffle=False)
    seen = 0
    for x, y in loader:
        seen += len(x)
        one.step(nn.functional.mse_loss(one.model(x), y))
    return [seen, *weight(one)]


def pair_of(*ones: Job) -> None:
    """Have jobs be the members of one generation, with the state of the first."""
    assert all(not isinstance(e, Exception) for e in together(*map(enter, ones, meshes(len(ones)))))
    for one in ones:
        one._member.stage = Stage.MEMBER


# ---------------------------------------------------------------------- steps


@pytest.mark.parametrize("mode", ["fixed", "consistent"])
def test_a_step_of_two_is_a_step_of_one(mode: str) -> None:
    alone = job(mode=mode, logical_ranks=4)
    wanted = train(alone)
    pair = [job(mode=mode, logical_ranks=4), job(7.0, mode=mode, logical_ranks=4)]
    pair_of(*pair)
    first, second = together(*[lambda one=one: train(one) for one in pair])
    assert first[0] + second[0] == wanted[0] == 12, "every sample once"
    assert [one.steps for one in (alone, *pair)] == [3, 3, 3] and first[1:] == second[1:]
    exact = mode == "consistent"
    assert first[1:] == wanted[1:] if exact else first[1:] == pytest.approx(wanted[1:], rel=1e-5)


def test_a_worker_without_samples_takes_part_in_the_step() -> None:
    pair = [job(), job()]
    pair_of(*pair)
    first, second = together(*[lambda one=one: train(one, batch=1) for one in pair])
    assert sorted([first[0], second[0]]) == [0, 12] and [one.steps for one in pair] == [12, 12]
    assert first[1:] == second[1:]


def test_a_step_without_a_batch_is_refused() -> None:
    one = job()
    with pytest.raises(UsageError, match="no batch was drawn"):
        one.step(one.model(torch.ones(1, 2)).sum())


def test_a_batch_that_is_drawn_and_not_stepped_on_counts_as_used() -> None:
    one, stepped = job(), 0
    loader = one.loader(DATA, batch_size=4, micro_batch=2, shuffle=False)
    for number, (x, y) in enumerate(loader):
        if number % 2:
            stepped += one.step(nn.functional.mse_loss(one.model(x), y))
    assert stepped == one.steps == 3 and loader.passes == 1


def test_after_a_death_the_survivor_computes_the_lost_samples_in_the_same_step() -> None:
    ones = [job(), job()]
    pair_of(*ones)
    survivor, (after,) = ones[0], meshes(1)
    link = FakeLink(mesh=after)
    linked(survivor, link)
    loader = survivor.loader(DATA, batch_size=6, shuffle=False)
    seen: list[list[float]] = []
    for x, y in loader:
        if not seen:
            ones[1]._crew.close()  # the other member dies in the first step
        seen.append(x[:, 0].tolist())
        survivor.step(nn.functional.mse_loss(survivor.model(x), y))
    assert seen == [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9, 10, 11]], "its own part was not computed again"
    assert survivor.steps == 2 and "recovery" in link.said
    whole = job()
    train(whole, batch=6)
    assert weight(survivor) == pytest.approx(weight(whole), rel=1e-5)


def test_a_value_is_exchanged_again_without_a_member_that_died() -> None:
    ones = [job(), job()]
    pair_of(*ones)
    ones[1]._crew.close()
    linked(ones[0], FakeLink(mesh=meshes(1)[0]))
    assert ones[0].reduce(loss=2.5) == {"loss": 2.5}


def test_before_it_is_part_of_the_job_a_worker_exchanges_nothing() -> None:
    one = job()
    for stage in (Stage.NEW, Stage.REHEARSING):
        one._member.stage = stage
        assert one.reduce(n=3.0) == {"n": 3.0} and one._crew.operation == 0


def test_a_rehearsal_changes_weights_and_neither_steps_nor_sums() -> None:
    one = job()
    loader = one.loader(DATA, batch_size=4)
    one._member.stage, one._shares.drawn = Stage.REHEARSING, [loader]
    assert not one.step(one.model(torch.ones(2, 2)).sum())
    assert one.steps == 0 and loader.cursor == 0 and weight(one) != [1.0] * 3
    early = one._stepper._early
    assert early._fires_once is True, "it shows that the first sum can begin during backward"


# ---------------------------------------------------------------------- changes of membership


def changed(link: FakeLink, headers: list[int]) -> tuple[Job, Change | None]:
    one = linked(job(), link)
    said = [{"candidate": number} for number in headers]
    return one, one._member.agreed_on(link.number, said, same_generation=True)


def test_a_candidate_with_newcomers_waits_for_the_next_batch() -> None:
    link = FakeLink(7, *meshes(1), newcomers=True)
    one, change = changed(link, [7, 7])
    assert change == Change(7, at_next_batch=True)
    one._member.after_step(7, change)
    assert "entered" not in link.said
    one._member.between_steps()
    assert link.said == ["entered", "switch"]


def test_a_candidate_without_newcomers_is_entered_in_the_step() -> None:
    link = FakeLink(7, *meshes(1))
    one, change = changed(link, [7, 7])
    one._member.after_step(7, change)
    assert link.said == ["entered", "switch"]


@pytest.mark.parametrize("headers", [[7, 0], [7, 6]])
def test_a_candidate_that_not_all_offer_is_let_go(headers: list[int]) -> None:
    link = FakeLink(7, *meshes(1))
    one, change = changed(link, headers)
    assert change is None
    one._member.after_step(7, change)
    assert link.said == ["release"]


def test_an_offer_of_a_generation_that_broke_counts_for_nothing() -> None:
    one = linked(job(), FakeLink(7, *meshes(1)))
    assert one._member.agreed_on(7, [{"candidate": 7}], same_generation=False) is None


def test_a_worker_that_the_candidate_leaves_out_goes_before_the_update() -> None:
    link = FakeLink(7, None)
    with pytest.raises(SystemExit) as left:
        changed(link, [7, 7])
    assert left.value.code == 0 and link.said == ["leaving"]


def test_a_job_that_is_to_stop_saves_first_and_its_end_is_not_the_end_of_training() -> None:
    link = FakeLink(STOP)
    one, change = changed(link, [STOP])
    saved: list[bool] = []
    one._saver.save = lambda *, wait=False: saved.append(wait)  # type: ignore[method-assign]
    with pytest.raises(SystemExit):
        one._member.after_step(STOP, change)
    one._member.end()
    assert saved == [True] and link.said == ["stopped"], "it does not say that training is done"


def test_what_was_agreed_on_in_an_epoch_that_the_script_left_is_let_go() -> None:
    link = FakeLink(7, *meshes(1), newcomers=True)
    one, change = changed(link, [7])
    one._member.after_step(7, change)
    one._progress.epoch += 1
    one._member.between_steps()
    one._member.between_steps()
    assert link.said == ["release"], "its newcomers wait in the epoch before"


def test_a_worker_alone_has_nobody_to_lose() -> None:
    with pytest.raises(PeerLost, match="a job of one"):
        job()._member.recover()
