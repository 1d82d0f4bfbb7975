"""Which GPUs a reservation holds: those it has, then idle ones, then some that jobs must give back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from swell.domain import Cluster, Event, EventKind, Placement, Reservation

Held = dict[str, frozenset[int]]
"""By name of a reservation: the numbers of the GPUs that it holds."""


def hold(
    cluster: Cluster,
    wanting: Sequence[Reservation],
    before: Mapping[str, frozenset[int]],
    placements: Iterable[Placement],
    promised: Iterable[tuple[Placement, int]] = (),
) -> Held:
    """The GPUs of each reservation in `wanting`, which names reservations of whole nodes first.

    They take their GPUs out of `cluster`; `before` is what they held so far and `placements` is what jobs
    hold. `promised` is what jobs with a deadline hold, and how many GPUs of it are lent, in the order in
    which these jobs are to lose GPUs. A job that loses a GPU pays a pause, even if it gets another one at
    once. So a reservation keeps what it has, and then takes idle GPUs, those of the largest jobs, those that
    are lent to jobs with a deadline, the last one of each job, and only then all of jobs with a deadline.
    """
    if not wanting:
        return {}
    usable = cluster.in_service.copy()
    held: Held = {}
    for one in wanting:
        if one.nodes:
            mine = [gpu for gpu in _of_nodes(cluster, one.nodes) if usable[gpu]]
            usable[mine] = False
            held[one.name] = frozenset(mine)
    counted = [one for one in wanting if not one.nodes]
    for one in counted:  # all keep what they have before one of them takes more
        kept = _packed(cluster, [gpu for gpu in before.get(one.name, ()) if usable[gpu]])[: one.gpus]
        usable[kept] = False
        held[one.name] = frozenset(kept)
    if all(len(held[one.name]) == one.gpus for one in counted):
        return held
    rank = np.zeros(len(usable), dtype=np.int64)
    """The order in which GPUs are taken, the smallest first: 0 for an idle GPU."""
    most = len(usable)
    for gpus in placements:
        rank[list(gpus)] = most - len(gpus) + 1
        rank[list(gpus[:1])] = 2 * most + 1
    for i, (gpus, lent) in enumerate(promised):
        rank[list(gpus)] = 2 * most + 2 + i
        rank[list(gpus[len(gpus) - lent :])] = most + 1 + i
    idle = np.bincount(cluster.node_of_gpu[usable & (rank == 0)], minlength=len(cluster.nodes))
    for one in counted:
        missing = one.gpus - len(held[one.name])
        if missing <= 0:
            continue
        own = np.bincount(cluster.node_of_gpu[list(held[one.name])], minlength=len(cluster.nodes))
        free = np.flatnonzero(usable)
        node = cluster.node_of_gpu[free]
        order = np.lexsort((-free, -idle[node], -own[node], rank[free]))
        taken = free[order[:missing]]
        usable[taken] = False
        held[one.name] |= frozenset(taken.tolist())
    return held


def held_events(before: Held, now: Held, now_s: float) -> list[Event]:
    """Events for the reservations that hold other GPUs than before."""
    return [
        Event(
            now_s,
            EventKind.HELD,
            data={
                "reservation": name,
                "gpus": sorted(now.get(name, ())),
                "before": sorted(before.get(name, ())),
            },
        )
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]


def _of_nodes(cluster: Cluster, names: Iterable[str]) -> list[int]:
    """All GPUs of the nodes with these names."""
    wanted = set(names)
    chosen = np.array([node.name in wanted for node in cluster.nodes])
    return [int(gpu) for gpu in np.flatnonzero(chosen[cluster.node_of_gpu])]


def _packed(cluster: Cluster, gpus: list[int]) -> list[int]:
    """GPUs in the order in which to keep them: those on nodes with many of them first."""
    if not gpus:
        return []
    on_node = np.bincount(cluster.node_of_gpu[gpus], minlength=len(cluster.nodes))
    return sorted(gpus, key=lambda gpu: (-on_node[cluster.node_of_gpu[gpu]], -gpu))
