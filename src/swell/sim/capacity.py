"""What changes the GPUs that jobs can have, other than the policy: lost nodes, rented nodes, reservations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from swell.board import Board, held_events
from swell.domain import Calendar, Event, EventKind, InputError
from swell.policies import Snapshot
from swell.sim.cloud import Cloud
from swell.sim.events import EventSink


@dataclass(frozen=True, slots=True)
class NodeFailure:
    """A node that is lost at `at_s` and comes back `repair_s` later (never, if that is infinite)."""

    node: int
    at_s: float
    repair_s: float = math.inf


@dataclass(frozen=True, slots=True)
class DemandChange:
    """From `at_s` on, the service that the reservation `name` follows wants so many GPUs."""

    name: str
    at_s: float
    gpus: int


class Capacity:
    """Applies what happens to the cluster of a board, in virtual time."""

    def __init__(
        self,
        board: Board,
        failures: Sequence[NodeFailure],
        calendar: Calendar,
        demand: Sequence[DemandChange],
        cloud: Cloud | None,
        settle: Callable[[int, float], None],
        on_event: EventSink | None,
    ) -> None:
        """`settle` brings a job's row up to now. It is called before the board takes GPUs from the job."""
        if calendar and cloud is not None:
            raise InputError(
                "reservations and rented nodes cannot be simulated together: an autoscaler counts no GPUs of "
                "services; leave out 'calendar' or 'cloud'",
                field="calendar",
            )
        self._board, self._settle, self._on_event = board, settle, on_event
        self._failures = sorted(
            [(f.at_s, False, f.node) for f in failures]
            + [(f.at_s + f.repair_s, True, f.node) for f in failures if math.isfinite(f.repair_s)]
        )
        self._calendar = board.calendar = calendar
        self._demand = sorted(demand, key=lambda change: change.at_s)
        self._calendar_s = -math.inf if calendar else math.inf
        """When the calendar has to be looked at next."""
        periods_s = [one.every_s for one in calendar.reservations if one.every_s is not None]
        self._patience_s = 10 * max(periods_s) if periods_s else math.inf
        """How long to wait for reserved hours to end before a waiting job counts as one that never starts."""
        self.cloud = cloud

    def next_s(self, now_s: float, *, jobs_left: bool) -> float:
        """When something happens next; failures and reservations matter only while there are jobs."""
        at_s = math.inf
        if jobs_left:
            at_s = max(self._calendar_s, now_s)
            if self._failures:
                at_s = min(at_s, self._failures[0][0])
        return at_s if self.cloud is None else min(at_s, self.cloud.due_s)

    @property
    def pending(self) -> bool:
        """Whether failures, changes of demand or requested nodes are still to come."""
        coming = self.cloud is not None and self.cloud.provider.supply().coming
        return bool(self._failures or self._demand or coming)

    def jobs_changed(self, now_s: float) -> None:
        """A job came or went, so another number of nodes may be worth having."""
        if self.cloud is not None:
            self.cloud.look_s = now_s

    def worth_waiting(self, idle_s: float) -> bool:
        """Whether reserved hours may still end after no job has run for so long."""
        return self._calendar_s < math.inf and idle_s <= self._patience_s

    def stop(self) -> None:
        """Wait for nothing any more, because no job will ever start."""
        self._calendar_s = math.inf
        if self.cloud is not None:
            self.cloud.look_s = math.inf

    def apply(self, now_s: float, worth_nodes: Callable[[float], Snapshot]) -> bool:
        """Do what is due; returns whether the cluster changed. `worth_nodes`: the autoscaler's view."""
        failed = self._fail(now_s)
        reserved = self._calendar_s <= now_s and self._reserve(now_s)
        rented = self.cloud is not None and self.cloud.due_s <= now_s and self._rent(now_s, worth_nodes)
        return failed or reserved or rented

    def _fail(self, now_s: float) -> bool:
        """Follow the failures and repairs that are due."""
        changed = False
        while self._failures and self._failures[0][0] <= now_s:
            _, up, index = self._failures.pop(0)
            if self._board.base.nodes[index].up != up:
                self._set_node(now_s, index, up, "was lost")
                changed = True
        return changed

    def _rent(self, now_s: float, worth_nodes: Callable[[float], Snapshot]) -> bool:
        """Let the autoscaler decide if that is due, and follow what became of the rented nodes."""
        cloud, board = self.cloud, self._board
        assert cloud is not None
        changes = cloud.provider.changes(now_s)
        if cloud.look_s <= now_s or any(not change.up for change in changes):
            busy = [0] * len(cloud.largest.nodes)
            for row in board.active.tolist():
                for gpu in board.table.placement[row]:
                    busy[int(cloud.largest.node_of_gpu[gpu])] += 1
            cloud.look(worth_nodes(now_s), busy)
            changes += cloud.provider.changes(now_s)
        for change in changes:
            self._set_node(now_s, *change)
        return bool(changes)

    def _set_node(self, now_s: float, index: int, up: bool, why: str) -> None:
        """A node comes into service or goes out of it."""
        board, cluster = self._board, self._board.base
        node = cluster.nodes[index]
        if self._on_event is not None:
            kind = EventKind.NODE_JOINED if up else EventKind.NODE_LOST
            self._on_event(Event(now_s, kind, node=node.name, data=node.figures))
        for row in board.active.tolist():
            # A reservation that lost GPUs takes others in their place, from jobs on any node.
            if board.reserved or index in cluster.nodes_of(board.table.placement[row]):
                self._settle(row, now_s)
        before = board.reserved
        board.set_cluster(cluster.with_node(index, up=up), now_s, f"node {node.name} {why}")
        self._tell_held(before, now_s)

    def _reserve(self, now_s: float) -> bool:
        """Give reservations the GPUs that they want at this moment."""
        while self._demand and self._demand[0].at_s <= now_s:
            change = self._demand.pop(0)
            followed = self._calendar.get(change.name)
            if followed is None or followed.most is None:
                known = ", ".join(one.name for one in self._calendar.reservations if one.most is not None)
                raise InputError(
                    f"demand: got '{change.name}', must be a reservation with `most`: {known or 'none'}",
                    field="demand",
                )
            self._calendar = self._calendar.having(replace(followed, gpus=change.gpus))
        next_s = self._demand[0].at_s if self._demand else math.inf
        self._calendar_s = min(self._calendar.next_change_s(now_s), next_s)
        for row in self._board.active.tolist():
            self._settle(row, now_s)
        before = self._board.reserved
        changed = self._board.reserve(self._calendar, now_s)
        self._tell_held(before, now_s)
        return changed

    def _tell_held(self, before: dict[str, frozenset[int]], now_s: float) -> None:
        if self._on_event is not None:
            for event in held_events(before, self._board.reserved, now_s):
                self._on_event(event)
