"""Rented nodes follow the queue: the control plane on a virtual clock, around a provider that pretends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.control.virtual import Trace, VirtualPlatform

from swell.cloud import NodeOffer, Supply, Terms
from swell.control.errors import Conflict
from swell.control.knowledge import Knowledge
from swell.control.model import Phase
from swell.control.plane import ControlPlane
from swell.control.renting import Renting
from swell.domain import Cluster, Event, EventKind, InputError, JobSpec, Reservation, SwellError

LINEAR = np.arange(9.0)
LARGEST = Cluster.parse("4x2")
NAMES = [node.name for node in LARGEST.nodes]


class Pretended:
    """Nodes of two slots that start when the test says so."""

    def __init__(self, engine: Any, **offer: Any) -> None:
        self.offer = NodeOffer(**{"gpus_per_node": 2, "start_s": 20.0} | offer)
        self.ready: list[str] = []
        self.coming: list[str] = []
        self.requests: list[int] = []
        self._engine = engine
        for name in NAMES:
            engine.set_node(name, up=False)

    def supply(self) -> Supply:
        return Supply(tuple(self.ready), len(self.coming))

    def request(self, nodes: int, spare: Sequence[str] = ()) -> None:
        self.requests.append(nodes)
        there = [*self.ready, *self.coming]
        for name in [*reversed(self.coming), *spare]:
            if len(there) > nodes:
                there.remove(name)
                self.lose(name)
        free = [name for name in NAMES if name not in there]
        self.coming += free[: max(nodes - len(there), 0)]

    def arrive(self) -> None:
        """All nodes that are coming are there."""
        for name in self.coming:
            self._engine.set_node(name, up=True)
        self.ready, self.coming = [*self.ready, *self.coming], []

    def lose(self, name: str) -> None:
        self.ready = [one for one in self.ready if one != name]
        self.coming = [one for one in self.coming if one != name]
        self._engine.set_node(name, up=False)


class Rented:
    """A platform that rents up to four nodes of two slots."""

    def __init__(self, home: Path, policy: str = "elasticflow", offer: Any = None, **terms: Any) -> None:
        jobs = [
            JobSpec(job_id=f"j{i}", submit_s=0.0, model="m", batch_size=1, work=800.0, gpus=8, max_gpus=2)
            for i in range(4)
        ]
        jobs.append(JobSpec(job_id="wide", submit_s=0.0, model="m", batch_size=1, work=800.0, gpus=8))
        trace = Trace(jobs, {job.job_id: LINEAR.copy() for job in jobs}, LARGEST)
        self.where = VirtualPlatform(trace, policy, home, cost_s=0.0, round_s=None)
        self.provider = Pretended(self.where.engine, **offer or {})
        terms = {"most_nodes": 4, "idle_s": 30.0} | terms
        self.renting = Renting(self.provider, Terms(**terms), NAMES)
        self.where.plane = self.open()
        self.where.plane.come_up()

    def open(self) -> ControlPlane:
        where = self.where
        return ControlPlane(
            where.store, where.engine, home=where.home, policy="elasticflow", clock=where.clock,
            recall=where.recall, renting=self.renting,
        )  # fmt: skip

    @property
    def plane(self) -> ControlPlane:
        return self.where.plane

    def submit(self, name: str, **changes: Any) -> str:
        spec = next(job for job in self.where.trace.jobs if job.job_id == name)
        request = self.where.request(spec)
        record = self.plane.jobs.submit(replace(request, **changes), "ann")
        self.turn()
        return record.job_id

    def turn(self, at_s: float = 0.0) -> None:
        self.where.now_s = max(self.where.now_s, at_s)
        self.plane.turn()
        self.plane.turn()

    def slots(self, job_id: str) -> int:
        return len(self.plane.jobs.get(job_id).wanted)

    def events(self, kind: EventKind) -> list[Event]:
        return [event for _, event in self.plane.events(limit=1000) if event.kind is kind]


def test_nodes_come_with_the_queue_and_go_when_it_is_empty(tmp_path: Path) -> None:
    rented = Rented(tmp_path)
    rented.turn()
    assert rented.provider.supply().nodes == 0 and rented.plane.due_s == math.inf
    jobs = [rented.submit(f"j{i}") for i in range(3)]
    assert rented.plane.jobs.get(jobs[0]).phase is Phase.QUEUED and len(rented.provider.coming) == 3
    assert "0 nodes are rented and 3 coming" in rented.plane.jobs.explain(jobs[0])["why"]
    rented.provider.arrive()
    rented.turn(20.0)
    assert [rented.slots(job) for job in jobs] == [2, 2, 2]
    state = rented.plane.nodes.autoscaler()
    assert state is not None and (state.ready, state.coming, state.wanted) == (3, 0, 3)
    assert [node.up for node in rented.plane.nodes.states()] == [True, True, True, False]
    rented.turn(rented.where.engine.next_end_s())
    assert all(rented.plane.jobs.get(job).phase is Phase.FINISHED for job in jobs)
    assert len(rented.provider.ready) == 3, "kept for a while"
    assert rented.plane.due_s <= rented.where.now_s + 30.0
    rented.turn(rented.where.now_s + 31.0)
    assert rented.provider.supply().nodes == 0 and not any(node.up for node in rented.plane.nodes.states())
    said = [(e.data["before"], e.data["nodes"], e.data["reason"]) for e in rented.events(EventKind.SCALED)]
    assert said[0] == (0, 1, "the jobs are worth 1 node") and said[-1] == (3, 0, "no jobs")
    assert [e.data["reason"] for e in rented.events(EventKind.NODE_LOST)] == ["let go: no jobs"] * 3
    assert [e.data["reason"] for e in rented.events(EventKind.NODE_JOINED)] == [
        "the jobs are worth 3 nodes"
    ] * 3


def test_a_node_with_workers_is_drained_before_it_is_let_go_and_stays_if_it_is_wanted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rented = Rented(tmp_path, interval_s=1000.0)
    wide = rented.submit("wide")
    rented.provider.arrive()
    rented.turn(20.0)
    assert rented.slots(wide) == 8
    # The workers on the slots that the job gives up take their time to leave.
    slow = dict(rented.where.engine.observe())
    monkeypatch.setattr(rented.where.engine, "observe", lambda: slow)
    rented.plane.jobs.scale(wide, 1, 2)
    rented.renting.look_s = 21.0
    rented.turn(21.0)
    assert rented.slots(wide) == 2 and len(rented.provider.ready) == 4
    state = rented.plane.nodes.autoscaler()
    assert state is not None and state.wanted == 1 and len(state.leaving) == 3
    views = rented.plane.nodes.states()
    assert [node.draining for node in views].count(True) == 3 and all(node.up for node in views)
    rented.plane.jobs.scale(wide, 1, 4)
    rented.renting.look_s = 22.0
    rented.turn(22.0)
    state = rented.plane.nodes.autoscaler()
    assert state is not None and len(state.leaving) == 2 and rented.slots(wide) == 4
    monkeypatch.undo()
    rented.turn(23.0)
    assert len(rented.provider.ready) == 2 and rented.slots(wide) == 4
    kept = {int(LARGEST.node_of_gpu[slot]) for slot in rented.plane.jobs.get(wide).wanted}
    assert {NAMES[i] for i in kept} == set(rented.provider.ready)


def test_a_lost_node_is_replaced_and_a_budget_and_a_least_number_hold(tmp_path: Path) -> None:
    rented = Rented(tmp_path, offer={"price_per_hour": 2.0}, budget_per_hour=6.5, least_nodes=1)
    rented.turn()
    assert len(rented.provider.coming) == 1, "the least number, without any job"
    rented.submit("wide")
    assert len(rented.provider.coming) == 3, "what the budget pays"
    rented.provider.arrive()
    rented.turn(20.0)
    lost = rented.provider.ready[0]
    rented.provider.lose(lost)
    rented.turn(21.0)
    assert len(rented.provider.ready) == 2 and len(rented.provider.coming) == 1
    assert [(e.node, e.data.get("reason")) for e in rented.events(EventKind.NODE_LOST)] == [(lost, None)]
    with pytest.raises(InputError, match="at most 6"):
        rented.submit("j0", min_workers=7, max_workers=None)


def test_a_deadline_is_promised_for_nodes_that_can_be_rented_and_their_start_counts(tmp_path: Path) -> None:
    rented = Rented(tmp_path)
    # 800 s of work on at most 8 slots: 100 s, and a node takes 20 s to start
    tight = rented.submit("wide", deadline_s=110.0)
    assert rented.plane.jobs.get(tight).phase is Phase.REFUSED
    kept = rented.submit("wide", deadline_s=150.0)
    assert rented.plane.jobs.get(kept).promise.guaranteed_s == 150.0
    assert len(rented.provider.coming) == 4
    rented.provider.arrive()
    rented.turn(20.0)
    rented.turn(rented.where.engine.next_end_s())
    assert rented.plane.jobs.get(kept).phase is Phase.FINISHED and rented.where.now_s <= 150.0


def test_a_job_that_needs_more_than_a_node_gets_enough_nodes(tmp_path: Path) -> None:
    rented = Rented(tmp_path)
    rented.where.trace.rates["j0"][1:] = 1.0  # no faster on more slots, but it wants five
    rented.submit("j0", min_workers=5, max_workers=None)
    assert len(rented.provider.coming) == 3


def test_an_unknown_job_with_a_deadline_waits_for_a_node_to_be_profiled_on(tmp_path: Path) -> None:
    rented = Rented(tmp_path, offer={"start_s": 100.0})
    rented.plane._conductor.book._recall = lambda request: Knowledge(request.name)
    job = rented.submit("wide", deadline_s=5000.0)
    assert rented.plane.jobs.get(job).promise.pending and rented.provider.supply().nodes == 1
    rented.turn(130.0)
    assert rented.plane.jobs.get(job).phase is Phase.QUEUED, "a start of 100 s and two minutes of its own"
    rented.provider.arrive()
    rented.turn(131.0)
    assert rented.slots(job) == 2


def test_another_control_plane_finds_the_nodes_and_the_job_on_them(tmp_path: Path) -> None:
    rented = Rented(tmp_path)
    job = rented.submit("j0")
    rented.provider.arrive()
    rented.turn(20.0)
    rented.renting = Renting(rented.provider, rented.renting.autoscaler.terms, NAMES)
    rented.where.plane = rented.open()
    rented.where.plane.come_up()
    rented.turn(25.0)
    assert rented.slots(job) == 2 and rented.provider.ready == ["n0"]
    assert len(rented.events(EventKind.NODE_JOINED)) == 1 and not rented.events(EventKind.NODE_LOST)


def test_reservations_and_rented_nodes_exclude_each_other(tmp_path: Path) -> None:
    rented = Rented(tmp_path)
    with pytest.raises(Conflict, match="do not go together"):
        rented.plane.reservations.make(Reservation(name="web", gpus=1), "root")
    rented.where.store.set_setting("reservations", '{"reservations": [{"name": "web", "gpus": 1}]}')
    with pytest.raises(SwellError, match="do not go together"):
        rented.open().come_up()
