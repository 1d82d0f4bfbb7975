"""A simulated provider of nodes, with prices, start-up delay and spot loss, and the autoscaler's clock.

The nodes of the simulated cluster are those that can be rented. One that is not rented is not up. All random
choices come from the seed: the nth node that is started lives equally long in every run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from swell.cloud import Autoscaler, Offer, Supply, Terms, read_options
from swell.domain import Cluster, InputError
from swell.policies import Snapshot


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

    def __init__(self, cluster: Cluster, offer: Offer, seed: int = 0) -> None:
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
    def offer(self) -> Offer:
        return self._offer

    def supply(self) -> Supply:
        """The nodes that are up, and how many are coming."""
        up = tuple(self._names[i] for i, node in self._rented.items() if node.up)
        return Supply(up, len(self._rented) - len(up))

    def request(self, nodes: int, spare: Sequence[str] = ()) -> None:
        """Have that many nodes from now on; what changes at once is in the next `changes`."""
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
        """What has changed since the last call."""
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

    def __init__(self, cluster: Cluster, offer: Offer, terms: Terms, seed: int = 0) -> None:
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
