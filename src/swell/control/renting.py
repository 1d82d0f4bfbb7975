"""Rented nodes of a live cluster: how many the autoscaler wants, asked of a provider, and which ones go.

The autoscaler is the one of the simulator. What is ours here: it is asked when a job comes or goes, when a
node was lost, and at an interval; nodes without workers are let go first; and a node that has workers is
*drained* before it is let go: its slots are given to no job any more, its jobs shrink or move, and it goes
once the last worker has left. If the nodes are wanted again before that, they stay.

All nodes that may be rented are nodes of the engine's cluster, and those that are not rented are not up.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from swell.cloud import Autoscaler, Provider, Supply, Terms, Wanted
from swell.domain import Cluster, Event, EventKind

if TYPE_CHECKING:
    from swell.policies import Snapshot

SOON_S = 0.5
"""Least time between two looks that only time has made necessary."""


@dataclass(frozen=True, slots=True)
class AutoscalerState:
    """How many nodes there are and should be, for people."""

    least: int
    most: int
    """The most nodes that the bound and the budget allow."""
    wanted: int
    ready: int
    """Nodes that can run jobs, those that are let go soon included."""
    coming: int
    leaving: tuple[str, ...]
    """Nodes that get no jobs any more, and are let go once the last worker has left."""
    reason: str
    """Why so many are wanted."""
    price_per_hour: float
    """Price of one node for one hour."""
    budget_per_hour: float | None


class Renting:
    """Follows the queue with rented nodes. Its caller holds the control plane's lock."""

    def __init__(self, provider: Provider, terms: Terms, names: Iterable[str]) -> None:
        """`names`: the nodes of the cluster that are the provider's, rented or not."""
        self.provider = provider
        self.names = frozenset(names)
        self.autoscaler = Autoscaler(terms, provider.offer)
        self.wanted = Wanted(0, "no node was asked for yet")
        self.why = ""
        """Why the number of nodes was last changed."""
        self.look_s = -math.inf
        """When to ask the autoscaler next, if nothing happens before."""
        self.leaving: frozenset[str] = frozenset()
        """Nodes that get no jobs any more, because they are let go."""
        self._supply = Supply()
        self._kept_out: Collection[str] = ()
        self._jobs: frozenset[str] = frozenset()
        self._looked = False
        """Whether the provider has not been asked yet for what the last look wants."""

    @property
    def start_s(self) -> float:
        """How long a node takes from the request until jobs can run on it."""
        return self.provider.offer.start_s

    @property
    def affordable(self) -> int:
        """The most nodes that may be rented."""
        return self.autoscaler.terms.affordable(self.provider.offer)

    def come_up(self) -> None:
        """Find the nodes that were rented before a restart."""
        self._supply = self.provider.supply()
        self.wanted = Wanted(self._supply.nodes, "as many as before the restart")

    def state(self) -> AutoscalerState:
        """How many nodes there are and should be."""
        terms, supply, offer = self.autoscaler.terms, self._supply, self.provider.offer
        budget = terms.budget_per_hour
        return AutoscalerState(
            least=terms.least_nodes,
            most=self.affordable,
            wanted=self.wanted.nodes,
            ready=len(supply.ready),
            coming=supply.coming,
            leaving=tuple(sorted(self.leaving)),
            reason=self.wanted.reason,
            price_per_hour=offer.price_per_hour,
            budget_per_hour=None if math.isinf(budget) else budget,
        )

    # -- the cluster -------------------------------------------------------------------------------------

    def present(self, cluster: Cluster) -> Cluster:
        """The cluster in which nodes of the provider are up only while they are rented."""
        away = self.names.difference(self._supply.ready)
        return _without(cluster, away)

    def usable(self, cluster: Cluster, drained: Collection[str]) -> Cluster:
        """The same without the nodes that are let go; `drained`: nodes that a person has drained."""
        self._kept_out = drained
        return _without(self.present(cluster), self.leaving)

    def promised(self, cluster: Cluster) -> Cluster:
        """The cluster with all nodes that may be rented, for promises."""
        left = self.affordable - sum(node.up and node.name in self.names for node in cluster.nodes)
        nodes = []
        for node in cluster.nodes:
            rent = left > 0 and not node.up and node.name in self.names and node.name not in self._kept_out
            left -= rent
            nodes.append(replace(node, up=True) if rent else node)
        return replace(cluster, nodes=tuple(nodes))

    # -- following the queue -----------------------------------------------------------------------------

    def due(self, jobs: frozenset[str], now_s: float) -> bool:
        """Whether to ask the autoscaler now: `jobs` are those that run or wait."""
        before, self._supply = self._supply, self.provider.supply()
        lost = set(before.ready) - set(self._supply.ready)
        return now_s >= self.look_s or jobs != self._jobs or bool(lost)

    def look(
        self, snapshot: Snapshot, cluster: Cluster, jobs: frozenset[str], occupied: Collection[int]
    ) -> list[Event]:
        """Ask the autoscaler, and choose the nodes to let go; returns what to write to the log.

        `snapshot`: all jobs that run or wait, on all nodes that may be rented. `occupied`: slots that have
        workers, or that jobs are to have.
        """
        self._jobs, supply, now_s = jobs, self._supply, snapshot.now_s
        before, self.wanted = self.wanted, self.autoscaler.look(snapshot, supply.nodes)
        place = {node.name: i for i, node in enumerate(cluster.nodes)}
        busy = _busy(cluster, occupied)
        spare = sorted(
            supply.ready,
            key=lambda name: (busy.get(name, 0), name not in self.leaving, -place.get(name, 0)),
        )
        self.leaving = frozenset(spare[: max(len(supply.ready) - self.wanted.nodes, 0)])
        terms = self.autoscaler.terms
        wait_s = terms.interval_s if len(snapshot) else min(terms.interval_s, max(terms.idle_s, SOON_S))
        calm = not len(snapshot) and not supply.nodes and not self.wanted.nodes
        self.look_s = math.inf if calm else now_s + wait_s
        self._looked = True
        if self.wanted.nodes == before.nodes:
            return []
        self.why = self.wanted.reason
        data = {"nodes": self.wanted.nodes, "before": supply.nodes, "reason": self.wanted.reason}
        return [Event(now_s, EventKind.SCALED, data=data)]

    def request(self, cluster: Cluster, occupied: Collection[int]) -> None:
        """Ask the provider for the wanted nodes, and let go of those that are to go and have no workers."""
        self.leaving &= frozenset(self._supply.ready)
        busy = _busy(cluster, occupied)
        empty = [name for name in sorted(self.leaving) if not busy.get(name)]
        if self._looked or empty:
            self.provider.request(self.wanted.nodes + len(self.leaving) - len(empty), empty)
            self._looked, self._supply = False, self.provider.supply()


def _without(cluster: Cluster, names: Collection[str]) -> Cluster:
    nodes = tuple(replace(node, up=node.up and node.name not in names) for node in cluster.nodes)
    return replace(cluster, nodes=nodes)


def _busy(cluster: Cluster, occupied: Collection[int]) -> dict[str, int]:
    """By node: how many of its slots are occupied."""
    busy: dict[str, int] = {}
    for slot in occupied:
        name = cluster.nodes[int(cluster.node_of_gpu[slot])].name
        busy[name] = busy.get(name, 0) + 1
    return busy
