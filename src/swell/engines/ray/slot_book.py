"""The book of a Ray cluster's slots: which node each is on, whether that is up, and which others hold.

It is kept in the home (ray-places.json), so that slot numbers keep their meaning when the control plane is
started again, and because the supervisors of jobs look there for the nodes of their slots.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from swell.domain import Cluster, Placement
from swell.engines.files import write_json
from swell.engines.ray import places
from swell.engines.ray.places import Foreign, Place, RayNode, RentedNodes
from swell.engines.supervised_job import SupervisedJob

log = logging.getLogger(__name__)

T = TypeVar("T")

FILE = "ray-places.json"
BLIND_S = 15.0
"""Without news of the cluster for this long, all of its nodes count as down."""
SETTLE_S = 2.0
"""Slots count as held by other users only after this long, because tasks come and go."""


class SlotKind:
    """What a slot is: the resource of Ray that a worker takes one of."""

    def __init__(self, wanted: str | None, before: str | None) -> None:
        """`wanted`: the resource that was asked for; None for GPUs if there are any, else CPUs. `before`: the
        one that an earlier engine counted."""
        self.wanted = wanted
        self._resource = wanted or before
        self._gpus_wait = False
        """Whether there are GPUs, and slots are CPUs until no job runs."""

    @property
    def resource(self) -> str:
        """The resource."""
        return self._resource or "CPU"

    def see(self, found: Sequence[Mapping[str, Any]], *, busy: bool) -> None:
        """Decide anew for the nodes of a scout's line, and say in the log if it changes."""
        if self.wanted is not None:
            return
        before, gpus = self._resource, places.nodes_with_gpus(found)
        self._resource = places.slot_resource(before, gpus, busy=busy)
        wait = bool(gpus) and self._resource == "CPU"
        if wait and not self._gpus_wait:
            log.warning(
                "%s: there are GPUs now; slots stay CPUs while jobs run, and will be GPUs once none does "
                "(sooner by 'swell down' and 'swell up': jobs save their state, and go on with GPUs)",
                ", ".join(gpus),
            )
        if before == "CPU" and self._resource == "GPU":
            log.warning("slots are GPUs from now on (%s), and CPUs no longer", ", ".join(gpus))
        self._gpus_wait = wait


class SlotBook:
    """All slots that there are or were. `cluster` may be called from any thread."""

    def __init__(self, file: Path, wanted: str | None, per_gpu: int, rented: RentedNodes | None) -> None:
        """`wanted`: what a slot is, None for GPUs if there are any, else CPUs."""
        before, resource = _remembered(file)
        self.file = file
        self.kind, self._per_gpu = SlotKind(wanted, resource), per_gpu
        self._places, self.rented_names = places.with_rented(before, rented)
        self._nodes: list[RayNode] = []
        self._seen_s = float("-inf")
        self._foreign = Foreign(SETTLE_S)
        self._held: frozenset[int] = frozenset()
        self._lock = threading.Lock()
        """Held for every change of `_places` and `_held`, so that they fit each other."""
        self.retired: frozenset[int] = frozenset()
        """Slots of places whose nodes are alive with other slots."""

    def cluster(self) -> Cluster:
        """The nodes that Ray has or has had, with the slots that other users hold."""
        with self._lock:
            return places.to_cluster(self._places, self._held)

    def usable(self, slots: Placement) -> Placement:
        """Those of the slots whose nodes are up."""
        where = places.slot_map(self._places)
        return tuple(slot for slot in slots if slot in where and where[slot].up)

    @property
    def empty(self) -> bool:
        """Whether no node, there or lost, has slots of the size that was asked for."""
        sizes = {place.per_gpu for place in self._places}
        return self._per_gpu not in sizes if self._per_gpu > 1 else not sizes

    @property
    def addresses(self) -> list[str]:
        """The addresses of the nodes that are up."""
        return [place.address for place in self._places if place.up]

    def in_sight(self, now_s: float) -> bool:
        """Whether the cluster was seen a moment ago."""
        return now_s - self._seen_s <= BLIND_S

    def by_name(self, of_nodes: Mapping[str, T]) -> dict[str, T]:
        """What is given by Ray's ids of living nodes, by the names of their places."""
        names = {place.node_id: place.name for place in self._places if place.up}
        return {names[node_id]: one for node_id, one in of_nodes.items() if node_id in names}

    def see(self, found: Sequence[Mapping[str, Any]], now_s: float, *, busy: bool) -> None:
        """Take in the nodes of a scout's line. `busy`: jobs run, as far as is known."""
        self._seen_s = now_s
        self.kind.see(found, busy=busy)
        self._nodes = places.read_nodes(found, self.kind.resource, self._per_gpu)

    def follow(self, jobs: Iterable[SupervisedJob], now_s: float) -> bool:
        """Bring the book up to date; True if the nodes have changed, or which slots other users hold."""
        nodes = self._nodes if self.in_sight(now_s) else []
        after = places.follow(self._places, nodes)
        foreign = self._foreign.update(nodes, now_s)
        told = set[int]().union(*(job.state.slots(now_s) for job in jobs))
        sure = {slot for node in nodes for slot in node.holders}
        held = frozenset(places.held_slots(after, foreign, told, sure))
        moved = after != self._places
        changed = moved or held != self._held
        with self._lock:
            self._places, self._held = after, held
        if moved:
            self.retired = frozenset(places.retired_slots(after))
            write_json(self.file, {"places": places.dump(after), "resource": self.kind.resource})
        return changed


def _remembered(file: Path) -> tuple[list[Place], str | None]:
    """The places of an earlier engine, none of them up, and whether a slot was a GPU or a CPU then."""
    try:
        content = json.loads(file.read_text())
        before = places.load(content["places"])
    except (OSError, ValueError, KeyError, TypeError):
        return [], None
    resource = content.get("resource")
    return before, resource if resource in ("CPU", "GPU") else None
