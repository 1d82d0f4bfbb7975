"""GPU types on the live platform: which type a job is on, and its believed curves on each type."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from swell.control.knowledge import Knowledge
from swell.control.model import JobRecord
from swell.control.speed import Speed
from swell.domain import Cluster, FloatArray, Placement
from swell.perf.belief import JobBelief
from swell.perf.curves import Curves, in_steps


def gpu_type_of(cluster: Cluster, placement: Placement) -> str:
    """The GPU type that most of these slots have; empty for no slots."""
    if not placement:
        return ""
    if len(cluster.gpu_types) == 1:
        return cluster.gpu_types[0]
    node_of, nodes = cluster.node_of_gpu, cluster.nodes
    return Counter(nodes[int(node_of[slot])].gpu_type for slot in placement).most_common(1)[0][0]


def main_type(cluster: Cluster) -> str:
    """The GPU type with the most slots."""
    slots: dict[str, int] = {}
    for node in cluster.nodes:
        slots[node.gpu_type] = slots.get(node.gpu_type, 0) + node.gpus
    return max(slots, key=lambda kind: slots[kind])


def widest_nodes(cluster: Cluster) -> dict[str, int]:
    """For each GPU type the slots of its largest node."""
    widest: dict[str, int] = {}
    for node in cluster.nodes:
        widest[node.gpu_type] = max(widest.get(node.gpu_type, 1), node.gpus)
    return widest


def believed_curves(
    jobs: Sequence[tuple[JobRecord, Knowledge]],
    held: Sequence[Placement],
    cluster: Cluster,
    widest: int,
    *,
    each_type: bool,
    cautious: bool = False,
) -> Curves:
    """A curve for each job on the type that it is on, and with `each_type` on every type.

    A waiting job counts as on the main type. `held`: the slots that each job has; `widest`: the most slots
    that a curve has to answer for. `cautious`: as promises count.
    """
    first, width = main_type(cluster), widest_nodes(cluster)
    if not each_type:
        width = dict.fromkeys(width, cluster.gpus_per_node)
    kinds = cluster.gpu_types if each_type else ()
    rates = np.zeros((max(len(jobs), 1), widest + 1))

    def curve(speed: Speed, kind: str) -> FloatArray:
        found = speed.curve_on(kind, widest, width[kind], cautious=cautious)
        return found if cautious or kind != (speed.gpu_type or kind) else speed.trials.hopeful(found)

    by_type: dict[str, FloatArray] = {kind: np.zeros(rates.shape) for kind in kinds}
    for i, (record, knowledge) in enumerate(jobs):
        replica, speed = record.request.workers_per_replica, knowledge.speed
        for kind, own in by_type.items():
            own[i] = in_steps(curve(speed, kind), replica)
        on = gpu_type_of(cluster, held[i]) or first
        if each_type:
            rates[i] = by_type[on][i]
        else:
            rates[i] = in_steps(curve(speed, on), replica)
    return Curves(rates, {kind: Curves(own) for kind, own in by_type.items()})


def believed_on(speed: Speed, kinds: Sequence[str]) -> Mapping[str, JobBelief]:
    """The belief about a job on each of these types, as far as there is one."""
    found = {kind: speed.on(kind) for kind in kinds}
    return {kind: belief for kind, belief in found.items() if belief is not None}
