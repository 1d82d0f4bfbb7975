"""A quote changes nothing: not the books, not the policy's memory, not what is decided later."""

from __future__ import annotations

import copy
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.control.virtual import VirtualPlatform, make_trace

from swell.control import promises
from swell.control.plane import ControlPlane
from swell.policies import Policy
from swell.policies.memory import JobMemory

TRACE = make_trace(5, 16, "2x4", 0.2)
QUOTES = 1000


@pytest.fixture(autouse=True)
def _no_looking_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promises, "MOST_JOBS", 0)


def state(plane: ControlPlane) -> list[Any]:
    """Everything that a decision may depend on."""
    scheduler, board = plane._conductor.scheduler, plane._conductor.scheduler.board
    columns = {name: copy.deepcopy(column) for name, column in vars(board.table).items() if name != "belief"}
    # The last decision, which is kept with the snapshots it was made on, is over.
    policy = {
        name: copy.deepcopy(value) for name, value in vars(scheduler.policy).items() if name != "_parts"
    }
    return [
        columns, board.active.tolist(), board.next_number, list(board._free_rows), dict(board._node_counts),
        dict(scheduler.roster.rows), dict(scheduler.roster._entered), scheduler.rhythm.due_s,
        list(scheduler.profiling.runs), policy,
        dict(plane._conductor.book.records), list(plane._conductor.book.known), plane.store.last_seq(),
        board.placer.occupancy.owner.copy(),
    ]  # fmt: skip


def same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return bool(np.array_equal(a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, JobMemory | Policy):
        return same(vars(a), vars(b))
    if is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b))
    return bool(a == b)


@pytest.mark.parametrize("policy", ["elasticflow", "oasis", "edf-admission", "tide"])
def test_a_thousand_quotes_change_nothing(policy: str, tmp_path: Path) -> None:
    undisturbed = VirtualPlatform(TRACE, policy, tmp_path / "a", cost_s=5.0, round_s=None)
    expected = [(e.time_s, e.kind, e.data.get("gpus")) for e in undisturbed.run()]

    asked = VirtualPlatform(TRACE, policy, tmp_path / "b", cost_s=5.0, round_s=None)
    turn, turns = asked.plane.turn, []

    def turn_and_ask() -> None:
        turn()
        turns.append(asked.now_s)
        if len(turns) == 12:
            before = state(asked.plane)
            soon = [job for job in TRACE.jobs if job.submit_s > asked.now_s] or list(TRACE.jobs)
            for i in range(QUOTES):
                job = soon[i % len(soon)]
                deadline_s = asked.now_s + 30.0 * (1 + i % 100)
                asked.plane.jobs.quote(
                    asked.request(replace(job, submit_s=0.0, deadline_s=deadline_s)), "bob"
                )
            assert same(before, state(asked.plane))

    asked.plane.turn = turn_and_ask  # type: ignore[method-assign]
    found = [(e.time_s, e.kind, e.data.get("gpus")) for e in asked.run()]
    assert len(turns) > 12, "the quotes were asked"
    assert found == expected
