"""Nodes on which workers stay slow: found from what jobs report, and kept out of use for a while. Pure.

A job replaces a worker that is slower than its others, and says so (docs/runtime.md). If a worker that came
in its place on the same node is slow again, the node is the reason and not the process. The node is then
*slow*: it gets no jobs for `AVOID_S`, as long as the other nodes have room for what the jobs need at least,
and is tried again afterwards. If it is still slow, it is avoided for twice as long.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from swell.domain import Cluster

AGAIN_S = 600.0
"""Two slow workers on a node within this time make it a slow node."""
AVOID_S = 1800.0
"""How long a slow node is avoided the first time."""
MOST_AVOID_S = 8 * 3600.0
"""How long a node is avoided at most."""
MOST_SHARE = 0.25
"""The part of all nodes that is avoided at most; one node always may be. Jobs report slow workers, and no job
may take the whole cluster out of use."""


@dataclass(slots=True, kw_only=True)
class SlowNode:
    """What jobs have reported of one node."""

    heard_s: float
    """When a slow worker was last reported."""
    times: float
    """How many times slower than the others it was."""
    spells: int = 0
    """How often the node has been found slow."""
    until_s: float = 0.0
    """Until when the node counts as slow."""
    needed: bool = False
    """Whether the node is used although it is slow, because the other nodes have too little room."""


class SlowNodes:
    """The nodes that slow workers were reported of."""

    def __init__(self, known: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """`known`: what `to_json` wrote; raises TypeError if it makes no sense."""
        self._nodes = {str(name): SlowNode(**fields) for name, fields in (known or {}).items()}

    def to_json(self) -> dict[str, dict[str, Any]]:
        """All that is known, as plain values."""
        return {name: asdict(node) for name, node in self._nodes.items()}

    def heard(self, name: str, times: float, now_s: float) -> SlowNode | None:
        """A worker on this node was slow and is replaced; returns the node if that makes it a slow one."""
        node = self._nodes.get(name)
        if node is None:
            self._nodes[name] = SlowNode(heard_s=now_s, times=times)
            return None
        if now_s < node.until_s:  # its last workers, or it is used because it is needed
            return None
        again = now_s - max(node.heard_s, node.until_s) <= AGAIN_S
        node.heard_s, node.times = now_s, times
        if not again:
            node.spells = 0
            return None
        node.until_s = now_s + min(AVOID_S * 2**node.spells, MOST_AVOID_S)
        node.spells, node.needed = node.spells + 1, False
        return node

    def forget(self, name: str) -> None:
        """Use a node again, and count from the beginning: a person says that it is well."""
        self._nodes.pop(name, None)

    def slow(self, now_s: float) -> dict[str, SlowNode]:
        """The nodes that count as slow now."""
        return {name: node for name, node in self._nodes.items() if now_s < node.until_s}

    def avoided(self, cluster: Cluster, needed: int, now_s: float) -> frozenset[str]:
        """The slow nodes to keep out of use now; `needed`: slots that the jobs need at least.

        A node that had to be used again stays in use until it is next found slow, so that jobs do not move to
        and fro.
        """
        left = {n.name: int(slots) for n, slots in zip(cluster.nodes, cluster.node_gpus, strict=True)}
        most = max(int(MOST_SHARE * len(left)), 1)
        found: list[str] = []
        for name, node in sorted(self.slow(now_s).items(), key=lambda item: -item[1].times):
            if node.needed or name not in left:
                continue
            rest = sum(left.values()) - left[name]
            if len(found) == most or rest < max(needed, 1):
                node.needed = True
                continue
            left[name] = 0
            found.append(name)
        return frozenset(found)

    def use_anyway(self, names: Collection[str]) -> None:
        """Keep these nodes in use although they are slow, because promises depend on them."""
        for name in names:
            self._nodes[name].needed = True
