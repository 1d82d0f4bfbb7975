"""Crew between threads: who gets whose state, and which operation counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.train.sync.test_mesh import meshes, together
from torch import nn

from swell.train.agent.errors import Misfit, OutOfStep, PeerLost, UsageError
from swell.train.job import Job
from swell.train.options import Options
from swell.train.sync.generation import RollCall
from swell.train.sync.mesh import Mesh


def job(scale: float = 1.0, width: int = 1, **options: Any) -> Job:
    """A job of one whose weights are all `scale`."""
    model = nn.Linear(2, width)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(scale)
    return Job(model, torch.optim.SGD(model.parameters(), lr=0.01), Options.of(options))


def weight(one: Job) -> list[float]:
    return [float(v) for p in one.model.parameters() for v in p.detach().flatten()]


def enter(one: Job, mesh: Mesh) -> Callable[[], Any]:
    return lambda: one._crew.enter(mesh, {})


def test_who_has_no_state_gets_that_of_the_member_that_is_furthest() -> None:
    old, new = job(2.0), job(5.0)
    (alone,) = meshes(1)
    old._crew.enter(alone, {})
    old._crew.completed()
    entered = together(*map(enter, (new, old), meshes(2)))
    assert [e.joined for e in entered] == [True, False] and not any(e.complete for e in entered)
    assert weight(new) == weight(old) == [2.0] * 3 and new._crew.operation == old._crew.operation == 1


def test_without_any_state_all_begin_with_the_firsts() -> None:
    ones = [job(3.0), job(4.0), job(5.0)]
    together(*map(enter, ones, meshes(3)))
    assert [weight(one) for one in ones] == [[3.0] * 3] * 3


def test_members_that_built_different_models_are_told_so() -> None:
    results = together(*map(enter, (job(), job(width=2)), meshes(2)))
    assert all(isinstance(r, UsageError) and "model" in str(r) for r in results)


def test_an_operation_that_one_completed_counts_for_all_who_hold_it() -> None:
    ahead, behind = job(), job()
    together(*map(enter, (ahead, behind), meshes(2)))
    together(lambda: ahead._crew.share({"n": 1}), lambda: behind._crew.share({"n": 2}))
    ahead._crew.completed()  # and then the other lost its connection
    entered = together(*map(enter, (ahead, behind), meshes(2)))
    assert [e.complete for e in entered] == [False, True]
    assert behind._crew.held_headers() == [{"n": 1}, {"n": 2}]


def test_who_has_no_state_does_not_join_members_that_are_past_their_batches() -> None:
    """A newcomer that lost a peer while it got its state comes again in a recovery, which may be anywhere in
    the script; there it would make a step while the others call job.reduce."""
    old, new = job(), job()
    (alone,) = meshes(1)
    old._crew.enter(alone, {})
    broken = meshes(2)[0]
    old._crew.mesh = broken
    broken.abandon()
    with pytest.raises(PeerLost):
        old._crew.share({"what": "reduce"})
    member, newcomer = together(*map(enter, (old, new), meshes(2)))
    assert isinstance(member, PeerLost) and isinstance(newcomer, Misfit) and not new._crew.live
    assert "job.reduce" in str(newcomer) and old._crew.mesh.lost == "w1"


def at(operation: int, doing: str = "", *, held: int = -1, live: bool = True) -> dict[str, Any]:
    return {"live": live, "operation": operation, "doing": doing, "held": held}


NEW = at(0, live=False)


@pytest.mark.parametrize(
    ("headers", "out"),
    [
        ([NEW, NEW], set()),
        ([at(5), NEW], set()),
        ([at(5, "step"), at(5), NEW], set()),
        ([at(5), at(5, "reduce"), NEW], {2}),
        ([at(6, "agree"), at(5, "step", held=5), NEW], {2}),
        ([at(6, "step"), at(5, "reduce", held=5), NEW], set()),
        ([at(5, "step"), at(5, "reduce"), at(5, "step")], {1}),
        ([at(5, "reduce"), at(5, "step"), at(5, "")], {1}),
        ([at(4, "step", held=4), at(6, "step")], {0}),
        ([at(5, "step", held=4), at(6, "step")], {0}),
    ],
)
def test_whoever_stands_elsewhere_in_the_script_is_found_by_all(headers: Any, out: set[int]) -> None:
    assert set(RollCall(headers).misfits()) == out


@pytest.mark.parametrize(
    ("headers", "complete", "covered"),
    [
        pytest.param([at(5, held=5), at(5, held=5)], [True, True], {}, id="all hold the sum"),
        pytest.param([at(5, held=5), at(5)], [False, False], {"l": [(0, 5), (0, 5)]}, id="one does not"),
        pytest.param([at(6), at(5, held=5)], [False, True], {"l": [(0, 6)]}, id="one has used it"),
        pytest.param([at(5, held=5), NEW], [False, False], {"l": [(0, 5)]}, id="a newcomer has no sum"),
        pytest.param([NEW, NEW], [False, False], {}, id="nobody has state"),
    ],
)
def test_what_is_complete_and_what_is_covered_follows_from_what_all_said(
    headers: Any, complete: list[bool], covered: Any
) -> None:
    roll = RollCall([{**header, "covered": {"l": [[0, header["operation"]]]}} for header in headers])
    assert [roll.complete(rank) for rank in range(2)] == complete
    assert roll.covered() == covered


def test_a_member_that_is_out_of_step_says_what_it_did() -> None:
    first, second = meshes(2)
    together(lambda: first.exchange(3, 0, {"what": "step"}), lambda: second.exchange(3, 0, {"what": "step"}))
    told = together(lambda: first.exchange(4, 0, {"what": "agree"}), lambda: second.exchange(5, 0, {}))
    assert any(isinstance(error, OutOfStep) for error in told)
    assert first.history().endswith("2 exchanges, the last ones (operation.phase): 3.0 step, 4.0 agree")
