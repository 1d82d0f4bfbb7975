"""Changes of the GPUs that jobs can have which no policy makes: lost nodes, rented nodes, reservations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from swell.board import Board, Move, held_events
from swell.cloud import Autoscaler, NodeOffer, Supply, Terms, read_options
from swell.domain import NORMAL, Calendar, Cluster, Event, EventKind, InputError, JobSpec
from swell.policies import Snapshot

# The events that a simulation writes about its jobs, with the fields that a live cluster writes too.


EventSink = Callable[[Event], None]


class JobEvents:
    """Writes what happens to the jobs of a run, if it has a reader."""

    def __init__(self, jobs: Sequence[JobSpec], sink: EventSink | None) -> None:
        self._jobs, self._sink = jobs, sink

    @property
    def wanted(self) -> bool:
        """Whether the events have a reader; if not, their data need not be computed."""
        return self._sink is not None

    def write(self, now_s: float, kind: EventKind, row: int, **data: Any) -> None:
        if self._sink is not None:
            values = {k: (float(v) if isinstance(v, np.floating) else v) for k, v in data.items()}
            self._sink(Event(now_s, kind, job_id=self._jobs[row].job_id, data=values))

    def submitted(self, now_s: float, row: int) -> None:
        """Write that a job was submitted."""
        if self._sink is not None:
            self.write(now_s, EventKind.SUBMITTED, row, **_submitted_figures(self._jobs[row]))

    def moved(self, now_s: float, move: Move, cluster: Cluster) -> None:
        """Write that a job got, lost or changed its GPUs."""
        if self._sink is not None:
            kind, figures = _move_figures(move, cluster)
            self.write(now_s, kind, move.row, **figures)


def _submitted_figures(spec: JobSpec) -> dict[str, Any]:
    """Data of a submission's event, without what is as for most jobs."""
    figures: dict[str, Any] = {
        "model": spec.model,
        "batch_size": spec.batch_size,
        "gpus": spec.gpus,
        "work": spec.work,
        "deadline_s": spec.deadline_s,
    }
    if spec.user:
        figures["owner"] = spec.user
    if spec.team:
        figures["team"] = spec.team
    if spec.priority != NORMAL:
        figures["priority"] = spec.priority
    if spec.fill != 1.0:
        figures["fill"] = spec.fill
    return figures


def _move_figures(move: Move, cluster: Cluster) -> tuple[EventKind, dict[str, Any]]:
    """Data of the event when a job's GPUs change."""
    data: dict[str, Any] = {"gpus": move.after, "before": move.before, "pause_s": move.pause_s}
    data |= cluster.type_figure(move.after)
    if not move.before:
        kind = EventKind.ALLOCATED
        del data["before"]
    elif move.after:
        kind = EventKind.RESIZED
    else:
        kind, data = EventKind.PREEMPTED, {"before": move.before}
    return kind, data | ({"reason": move.reason} if move.reason else {})


# A simulated provider of nodes, with prices, start-up delay and spot loss, and the autoscaler's clock.
#
# The nodes of the simulated cluster are those that can be rented. One that is not rented is not up. All
# random choices come from the seed: the nth node that is started lives equally long in every run.


class NodeChange(NamedTuple):
    """A node that came up or went down."""

    node: int
    up: bool
    reason: str = ""


@dataclass(slots=True)
class _Rented:
    since_s: float
    ready_s: float
    lost_s: float
    up: bool = False


class SimulatedProvider:
    """Rents the nodes of a cluster in virtual time."""

    def __init__(self, cluster: Cluster, offer: NodeOffer, seed: int = 0) -> None:
        self._names = [node.name for node in cluster.nodes]
        self._offer = offer
        self._rng = np.random.default_rng([seed, 11])
        self._rented: dict[int, _Rented] = {}
        self._gone: list[NodeChange] = []
        self._paid_s = 0.0
        self.now_s = 0.0
        self.lost = 0
        """How many nodes the provider took back."""

    @property
    def offer(self) -> NodeOffer:
        return self._offer

    def supply(self) -> Supply:
        """The nodes that are up, and how many are coming."""
        up = tuple(self._names[i] for i, node in self._rented.items() if node.up)
        return Supply(up, len(self._rented) - len(up))

    def request(self, nodes: int, spare: Sequence[str] = ()) -> None:
        """Request this number of nodes; the next `changes` has what changes at once."""
        for i in range(len(self._names)):
            if len(self._rented) >= nodes:
                break
            if i not in self._rented:
                life_s = float(self._rng.exponential()) * self._offer.spot_life_s
                ready_s = self.now_s + self._offer.start_s
                self._rented[i] = _Rented(self.now_s, ready_s, ready_s + life_s)
        coming = [i for i, node in self._rented.items() if not node.up]
        named = [self._names.index(name) for name in spare]
        for i in [*reversed(coming), *named]:
            if len(self._rented) <= nodes:
                break
            if i in self._rented:
                self._let_go(i, "was let go")

    @property
    def due_s(self) -> float:
        """When the next node is ready or lost."""
        if self._gone:
            return self.now_s
        return min((n.lost_s if n.up else n.ready_s for n in self._rented.values()), default=math.inf)

    def changes(self, now_s: float) -> list[NodeChange]:
        """Changes since the last call."""
        self.now_s = now_s
        for i, node in list(self._rented.items()):
            if node.up and node.lost_s <= now_s:
                self.lost += 1
                self._let_go(i, "was taken back by its provider")
        changed, self._gone = self._gone, []
        for i, node in self._rented.items():
            if not node.up and node.ready_s <= now_s:
                node.up = True
                changed.append(NodeChange(i, True))
        return changed

    def node_hours(self, now_s: float) -> float:
        """Hours of nodes paid for until now."""
        return (self._paid_s + sum(now_s - node.since_s for node in self._rented.values())) / 3600

    def _let_go(self, index: int, reason: str) -> None:
        node = self._rented.pop(index)
        self._paid_s += self.now_s - node.since_s
        if node.up:
            self._gone.append(NodeChange(index, False, reason))


class Cloud:
    """The provider and the autoscaler of one simulation."""

    def __init__(self, cluster: Cluster, offer: NodeOffer, terms: Terms, seed: int = 0) -> None:
        if len({(node.gpus, node.gpu_type) for node in cluster.nodes}) > 1:
            raise InputError(
                f"an autoscaler needs equal nodes, got the cluster '{cluster}'; give one such as 16x4",
                field="cluster",
            )
        self.largest = cluster
        self.provider = SimulatedProvider(cluster, offer, seed)
        self.autoscaler = Autoscaler(terms, offer)
        self.look_s = math.inf
        """When to look next at how many nodes are worth having."""

    @property
    def empty(self) -> Cluster:
        """The cluster before anything is rented."""
        return replace(self.largest, nodes=tuple(replace(node, up=False) for node in self.largest.nodes))

    @property
    def within_budget(self) -> Cluster:
        """The cluster with all nodes that may be rented, for promises."""
        most = self.autoscaler.terms.affordable(self.provider.offer)
        nodes = tuple(replace(node, up=i < most) for i, node in enumerate(self.largest.nodes))
        return replace(self.largest, nodes=nodes)

    @property
    def due_s(self) -> float:
        """When something happens next."""
        return min(self.look_s, self.provider.due_s)

    def look(self, snapshot: Snapshot, busy: Sequence[int]) -> None:
        """Ask the autoscaler, and the provider for what it wants; `busy`: GPUs in use on each node."""
        supply = self.provider.supply()
        wanted = self.autoscaler.look(snapshot, supply.nodes)
        names = {node.name: i for i, node in enumerate(self.largest.nodes)}
        spare = sorted(supply.ready, key=lambda name: (busy[names[name]], -names[name]))
        self.provider.request(wanted.nodes, spare)
        calm = not len(snapshot) and not self.provider.supply().nodes
        self.look_s = math.inf if calm else snapshot.now_s + self.autoscaler.terms.interval_s

    def cost(self, now_s: float) -> float:
        """The price of everything rented until now."""
        return self.provider.node_hours(now_s) * self.provider.offer.price_per_hour


def parse_cloud(text: str, cluster: Cluster, seed: int = 0) -> Cloud:
    """A cloud from text such as 'price=3,start=120,spot=6'; `spot` is in hours, other times in seconds."""
    offer = {"gpus_per_node": cluster.gpus_per_node}
    return Cloud(cluster, *read_options(text, offer, {"most_nodes": len(cluster.nodes)}), seed)


@dataclass(frozen=True, slots=True)
class NodeFailure:
    """A node that is lost at `at_s` and comes back `repair_s` later (never, if that is infinite)."""

    node: int
    at_s: float
    repair_s: float = math.inf


@dataclass(frozen=True, slots=True)
class DemandChange:
    """From `at_s` on, the service that the reservation `name` follows wants this number of GPUs."""

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
        """Whether reserved hours may still end after no job has run for this long."""
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
        self._record_held(before, now_s)

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
        self._record_held(before, now_s)
        return changed

    def _record_held(self, before: dict[str, frozenset[int]], now_s: float) -> None:
        if self._on_event is not None:
            for event in held_events(before, self._board.reserved, now_s):
                self._on_event(event)
