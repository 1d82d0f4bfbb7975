"""Ray's nodes as a cluster whose slot numbers never change their meaning. Pure.

A node gets a place when it is first seen, and keeps it. While the node is lost, its place is not up. A node
that comes back with the same name and size takes its old place, although Ray gives it another id.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from swell.domain import ANY_GPU, Cluster, InputError, Node, clean_type

MOST_PER_GPU = 64
"""Most slots of one GPU. Ray counts in ten-thousandths of a GPU; for so many slots these are fine enough."""
PLACES = "ray-places.json"
"""The file in the home that keeps the numbers of slots."""
_UNITS = 10_000
"""The parts of a GPU that Ray's books count in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNode:
    """A living node as the scout saw it."""

    node_id: str
    name: str
    """The name of its host, or the name that Ray was given for it."""
    address: str
    slots: int
    gpu_type: str
    others: int = 0
    """Slots that Ray says other users hold."""
    holders: tuple[int, ...] = ()
    """The numbers of the slots that Ray says workers of this platform hold."""
    per_gpu: int = 1
    """How many of its slots are one GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A node's place in the cluster; its slot numbers follow those of the places before it."""

    name: str
    """The name that people see; unique among the places."""
    host: str
    """The name of the node that may have this place; empty if any node of its size may."""
    slots: int
    gpu_type: str
    node_id: str = ""
    """Ray's id of the node; the last one while the node is lost."""
    address: str = ""
    up: bool = False
    per_gpu: int = 1
    """How many of its slots are one GPU."""

    def fits(self, node: RayNode) -> bool:
        """Whether this may be the place that a returning node had."""
        if (self.slots, self.per_gpu) != (node.slots, node.per_gpu):
            return False
        return not self.host or (self.host, self.gpu_type) == (node.name, node.gpu_type)


@dataclass(frozen=True, slots=True, kw_only=True)
class RentedNodes:
    """The nodes that may be rented: each has a place before it is there."""

    nodes: int
    slots: int
    gpu_type: str
    any_host: bool = False
    """Whether the provider chooses the names of its nodes, as a cloud does."""


def check_per_gpu(per_gpu: int, resource: str | None, *, rents: bool) -> None:
    """Refuse a number of slots of each GPU that cannot be; `resource` is what the user said a slot is."""
    allowed = f"1 to {MOST_PER_GPU}"
    if per_gpu > 1 and resource not in (None, "GPU"):
        allowed = f"1, because a slot is one {resource}; only GPUs can be several slots"
    elif per_gpu > 1 and rents:
        allowed = "1 where nodes are rented (--autoscale), because rented GPUs are one slot each"
    elif 1 <= per_gpu <= MOST_PER_GPU:
        return
    raise InputError(f"per_gpu: got {per_gpu}, must be {allowed}", field="per_gpu")


def share(per_gpu: int) -> float:
    """The part of a GPU that a worker takes in Ray's books. It is rounded down to what Ray can count, so that
    as many workers as there are slots fit a GPU, and never one more."""
    return _UNITS // per_gpu / _UNITS


def nodes_with_gpus(found: Iterable[Mapping[str, Any]]) -> list[str]:
    """The names of the nodes of a scout's line that have GPUs."""
    return [str(node["name"]) for node in found if node["total"].get("GPU", 0) >= 1]


def slot_resource(before: str | None, with_gpus: Collection[str], *, busy: bool) -> str:
    """What a slot is if nobody said: a GPU if any node has had one, else a CPU.

    `before`: what it was so far; None if no node was seen yet. `busy`: jobs run. They were started for a CPU
    or a GPU for each worker and could not go on with the other, so it does not change under them. And it
    never changes back to CPUs, because nodes with GPUs that are lost may return.
    """
    if before == "GPU" or (before == "CPU" and busy):
        return before
    return "GPU" if with_gpus else "CPU"


def read_nodes(found: Iterable[Mapping[str, Any]], resource: str, per_gpu: int = 1) -> list[RayNode]:
    """The nodes of a scout's line that have slots. Each unit of the resource is `per_gpu` slots."""
    nodes = []
    for node in found:
        slots = int(node["total"].get(resource, 0)) * per_gpu
        if slots >= 1:
            others = float(node.get("others", {}).get(resource, 0.0))
            nodes.append(
                RayNode(
                    node_id=str(node["id"]),
                    name=str(node["name"]),
                    address=str(node["address"]),
                    slots=slots,
                    gpu_type=_type(node, resource),
                    # Rounded up: a slot that is partly used cannot be given. (Ray's sums are not exact.)
                    others=min(math.ceil(round(others * per_gpu, 6)), slots),
                    holders=tuple(int(slot) for slot in node.get("holders", ())),
                    per_gpu=per_gpu,
                )
            )
    return nodes


def _type(node: Mapping[str, Any], resource: str) -> str:
    """The type that a person gave the node, else the one of its GPUs if they are the slots."""
    given = _listed(node, "swell_type:")
    if given:
        return clean_type(given.lower())
    if resource == "CPU":
        return "cpu"
    label = str(node.get("labels", {}).get("ray.io/accelerator-type", ""))
    return clean_type((label or _listed(node, "accelerator_type:") or ANY_GPU).lower())


def _listed(node: Mapping[str, Any], prefix: str) -> str:
    """What follows a prefix in the name of one of the node's resources; empty if there is none."""
    names = sorted(str(name) for name in node["total"])
    return next((name.removeprefix(prefix) for name in names if name.startswith(prefix)), "")


def follow(places: list[Place], nodes: Iterable[RayNode]) -> list[Place]:
    """The places after an update: these nodes, and no others, are alive."""
    unplaced = {node.node_id: node for node in nodes}
    after = []
    for place in places:
        node = unplaced.get(place.node_id)
        up = node is not None and place.fits(node)
        if up:
            del unplaced[place.node_id]  # else the node has other slots than before, and gets another place
        after.append(replace(place, up=up))
    for node in unplaced.values():
        free = [i for i, place in enumerate(after) if not place.up and place.fits(node)]
        if free:
            index = next((i for i in free if after[i].host), free[0])
            after[index] = replace(
                after[index], node_id=node.node_id, address=node.address, gpu_type=node.gpu_type, up=True
            )
            continue
        after.append(
            Place(
                name=_free_name(node.name, {place.name for place in after}),
                host=node.name,
                slots=node.slots,
                gpu_type=node.gpu_type,
                node_id=node.node_id,
                address=node.address,
                up=True,
                per_gpu=node.per_gpu,
            )
        )
    return after


def with_rented(places: list[Place], rented: RentedNodes | None) -> tuple[list[Place], tuple[str, ...]]:
    """The places with one for each node that may be rented, and the names of those."""
    after, names = list(places), list[str]()
    for number in range(1, (rented.nodes if rented is not None else 0) + 1):
        assert rented is not None
        name = f"rented-{number}"
        index = next((i for i, p in enumerate(after) if p.name == name and p.slots == rented.slots), None)
        if index is None:
            name = _free_name(name, {place.name for place in after})
            index = len(after)
            after.append(Place(name=name, host=name, slots=rented.slots, gpu_type=rented.gpu_type))
        after[index] = replace(after[index], host="" if rented.any_host else name)
        names.append(name)
    return after, tuple(names)


def _free_name(name: str, taken: set[str]) -> str:
    number, candidate = 1, name
    while candidate in taken:
        number += 1
        candidate = f"{name}-{number}"
    return candidate


def first_slots(places: Iterable[Place]) -> list[int]:
    """The number of each place's first slot."""
    firsts, total = [], 0
    for place in places:
        firsts.append(total)
        total += place.slots
    return firsts


def slot_map(places: list[Place]) -> dict[int, Place]:
    return {first + i: place for first, place in zip(first_slots(places), places) for i in range(place.slots)}


def retired_slots(places: list[Place]) -> set[int]:
    """The slots of places whose nodes are alive in other places: the size of their slots was changed.

    Workers that still are there use what the node's new slots are made of.
    """
    alive = {place.node_id for place in places if place.up}
    return {slot for slot, place in slot_map(places).items() if not place.up and place.node_id in alive}


def to_cluster(places: Iterable[Place], held: Iterable[int] = ()) -> Cluster:
    """The places as the cluster that the scheduler sees."""
    nodes = tuple(
        Node(place.name, place.slots, place.gpu_type, up=place.up, per_gpu=place.per_gpu) for place in places
    )
    return Cluster(nodes, frozenset(held))


def dump(places: Iterable[Place]) -> list[dict[str, Any]]:
    """The places as plain values, for a file."""
    entries = [asdict(place) for place in places]
    for entry in entries:
        if entry["per_gpu"] == 1:
            del entry["per_gpu"]  # supervisors of an earlier version, which still run, do not know it
    return entries


def load(content: Iterable[Mapping[str, Any]]) -> list[Place]:
    """The places from a file; none is up until its node is seen."""
    return [replace(Place(**entry), up=False) for entry in content]


class Foreign:
    """How many slots of each node other users hold, as Ray says; an increase counts only once it has lasted,
    because tasks come and go."""

    def __init__(self, lasting_s: float) -> None:
        self._lasting_s = lasting_s
        self._counts: dict[str, int] = {}
        self._since: dict[str, float] = {}

    def update(self, nodes: Iterable[RayNode], now_s: float) -> dict[str, int]:
        """Slots held by other users, by node id."""
        counts = {}
        for node in nodes:
            seen, before = node.others, self._counts.get(node.node_id, 0)
            if seen <= before:
                self._since.pop(node.node_id, None)
            elif now_s - self._since.setdefault(node.node_id, now_s) < self._lasting_s:
                seen = before
            else:
                del self._since[node.node_id]
            counts[node.node_id] = seen
        self._counts = counts
        return counts


def held_slots(
    places: list[Place], foreign: Mapping[str, int], ours: Collection[int], sure: Collection[int] = ()
) -> set[int]:
    """Which slot numbers count as held by other users: preferably slots that no job of swell was told to use,
    and never one that Ray says a worker of swell holds (`sure`)."""
    held = set[int]()
    for first, place in zip(first_slots(places), places):
        count = foreign.get(place.node_id, 0) if place.up else 0
        numbers = [slot for slot in range(first, first + place.slots) if slot not in sure]
        held.update(sorted(numbers, key=lambda slot: (slot in ours, -slot))[:count])
    return held
