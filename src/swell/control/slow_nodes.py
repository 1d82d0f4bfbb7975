"""Nodes on which workers stay slow or cannot be started: reported by jobs, and avoided for a while. Pure.

A job replaces a worker that is slower than its others, and says so (docs/how/runtime.md). If a worker that
came in its place on the same node is slow again, the node is the reason and not the process. The node is then
*slow*: it gets no jobs for `AVOID_S`, as long as the other nodes have room for what the jobs need at least,
and is tried again afterwards. If it is still slow, it is avoided for twice as long.

A node on which a worker cannot be started (swell's home is not there, say) is of no use to anybody, so it is
avoided at once and however much room the jobs need, until it has left and come back, or a person says that it
is well, or it is time to try again. A node that only did not reach a job has to do so twice, as a slow one,
and one that does not answer is used where the others have too little room.
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
AVOID_UNSTARTABLE_S = 600.0
"""The same for a node on which no worker could be started."""
AVOID_SILENT_S = 150.0
"""The same for a node that does not answer. Ray gives a silent node up after two minutes."""
TROUBLES = {
    "home": "it does not see swell's home",
    "software": "swell or what the job needs cannot be loaded there",
    "silent": "it does not answer",
    "link": "it does not reach the jobs' supervisors",
    "process": "processes of workers end before they run the script",
}
"""Why workers cannot be started on a node, by the cause that jobs report. All users see it, so it names no
job."""
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
    trouble: str = ""
    """Why workers cannot be started there, a key of `TROUBLES`; empty if they are slow."""
    by: str = ""
    """The job that reported the trouble."""
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
        if node is not None and now_s < node.until_s:  # its last workers, or it is used because it is needed
            return None
        if node is None or node.trouble:  # workers start there again
            self._nodes[name] = SlowNode(heard_s=now_s, times=times)
            return None
        again = now_s - max(node.heard_s, node.until_s) <= AGAIN_S
        node.heard_s, node.times = now_s, times
        if not again:
            node.spells = 0
            return None
        node.until_s = now_s + min(AVOID_S * 2**node.spells, MOST_AVOID_S)
        node.spells, node.needed = node.spells + 1, False
        return node

    def unstartable(self, name: str, cause: str, job_id: str, now_s: float) -> SlowNode | None:
        """A worker of this job could not be started on a node; returns the node if it is avoided for that."""
        before = self._nodes.get(name)
        if before is not None and not before.trouble:
            before = None
        if before is not None and now_s < before.until_s and not (before.needed and before.by != job_id):
            return None
        again = before is not None and now_s - max(before.heard_s, before.until_s) <= AGAIN_S
        spells = before.spells if before is not None and again else 0
        node = self._nodes[name] = SlowNode(heard_s=now_s, times=1.0, trouble=cause, by=job_id)
        if cause == "link" and not again:
            return None
        first_s = AVOID_SILENT_S if cause == "silent" else AVOID_UNSTARTABLE_S
        node.until_s = now_s + min(first_s * 2**spells, MOST_AVOID_S)
        node.spells = spells + 1
        return node

    def trouble(self, name: str) -> str:
        """Why workers cannot be started on a node, for people; empty if they can."""
        node = self._nodes.get(name)
        return TROUBLES.get(node.trouble, "") if node is not None else ""

    def gone(self, up: Collection[str]) -> list[str]:
        """Forget the trouble of nodes that are not up: they may come back without it. Returns their names."""
        names = [name for name, node in self._nodes.items() if node.trouble and name not in up]
        for name in names:
            del self._nodes[name]
        return names

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
        # Those without use first, then the slowest.
        for name, node in sorted(
            self.slow(now_s).items(), key=lambda item: (not item[1].trouble, -item[1].times)
        ):
            if node.needed or name not in left:
                continue
            alike = [one for one in found if self._nodes[one].by == node.by]
            # Where nothing runs it does not matter how much room the jobs need. A silent node may run them.
            useless = node.trouble not in ("", "silent")
            if len(alike) == most or not (useless or sum(left.values()) - left[name] >= max(needed, 1)):
                node.needed = True
                continue
            left[name] = 0
            found.append(name)
        return frozenset(found)

    def use_anyway(self, names: Collection[str]) -> None:
        """Keep these nodes in use although they are slow, because promises depend on them."""
        for name in names:
            self._nodes[name].needed = True

    def usable(self, names: Collection[str]) -> set[str]:
        """Those of the nodes on which workers can be started."""
        return {name for name in names if not self._nodes[name].trouble}
