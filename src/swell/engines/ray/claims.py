"""Who holds what of a Ray cluster's nodes, by the owners that Ray's own state names.

Ray counts what is used on a node, and it names actors, placement groups and tasks with their owners. What
another user holds is what Ray names as another's. What is used and has no owner there is nobody's: it is a
worker of ours that ends or begins just now, or an old figure of a node that the head cannot reach.

A holder of ours is named after its platform, node and slot, so that it is known before it runs and whether
or not its job reports anything.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swell.engines.ray.connection import NAMESPACE

FILE = "ray-platform"
"""The file in the home with the platform's name in Ray's state."""
TASK_S = 10.0
"""A task that ended less than this long ago still counts: short tasks follow each other on a worker."""
LEAST_PAUSE = 10.0
"""Between two readings of a table there is at least this many times as long as the reading took."""
LAG_S = 120.0
"""How long the figures of a node may be old: Ray gives up a node that it cannot reach after two minutes."""
_LEFT = 1e-6
"""Ray's sums are not exact: less than this is nothing."""
_RUNNING, _FINISHED, _FAILED = 8, 11, 12
"""States of a task in Ray's `TaskStatus`."""
_ACTOR_CLASS = "Holder"

Amounts = dict[str, float]


def platform(home: Path) -> str:
    """The name of this home's platform in Ray's state, made once: another home's platform is another user."""
    path = home / FILE
    if not path.exists():
        home.mkdir(parents=True, exist_ok=True)
        made = home / f"{FILE}.{secrets.token_hex(4)}"
        made.write_text(secrets.token_hex(8))
        with contextlib.suppress(FileExistsError):  # a standby made one at the same time
            os.link(made, path)
        made.unlink()
    return path.read_text().strip()


@dataclass(frozen=True, slots=True)
class HolderName:
    """What the name of a holder's actor says."""

    platform: str
    node_id: str
    slot: int
    job_id: str
    worker: str

    def text(self) -> str:
        """A name that no other actor has."""
        tail = secrets.token_hex(4)
        return f"swell/{self.platform}/{self.node_id}/{self.slot}/{self.job_id}/{self.worker}/{tail}"

    @classmethod
    def read(cls, text: str) -> HolderName | None:
        """What a name says; None if it is no holder's."""
        parts = text.split("/")
        if len(parts) != 7 or parts[0] != "swell" or not parts[3].isdigit():
            return None
        return cls(parts[1], parts[2], int(parts[3]), parts[4], parts[5])


@dataclass(frozen=True, slots=True)
class Claim:
    """An actor, a placement group's part or a task, with what Ray says that it holds on a node."""

    key: str
    """Ray's id of it."""
    node_id: str
    amounts: Amounts
    name: str = ""
    namespace: str = ""
    kind: str = ""
    """The name of an actor's class."""


class Ledger:
    """Divides what is used on nodes between this platform's holders and others. Pure: no Ray, no clock."""

    def __init__(self, platform: str) -> None:
        self._platform = platform
        self._ending: dict[str, tuple[float, Claim]] = {}
        """Holders that Ray lists no longer, and until when the figures of their nodes may not show that."""
        self._present: dict[str, Claim] = {}

    def is_ours(self, claim: Claim) -> bool:
        """Whether an actor is a holder of this platform, or one that an earlier version started."""
        if claim.namespace != NAMESPACE:
            return False
        name = HolderName.read(claim.name)
        if name is None:
            return claim.kind == _ACTOR_CLASS and not claim.name
        return name.platform == self._platform

    def node_of(self, claim: Claim) -> str:
        name = HolderName.read(claim.name)
        return claim.node_id if name is None else name.node_id

    def note_holders(self, holders: Iterable[Claim], now_s: float) -> None:
        """Take in the holders of this platform that Ray lists now."""
        before, self._present = self._present, {claim.key: claim for claim in holders}
        ended = {key: (now_s + LAG_S, c) for key, c in before.items() if key not in self._present}
        known = {**self._ending, **ended}
        self._ending = {key: (until_s, c) for key, (until_s, c) in known.items() if now_s < until_s}

    def slots(self, node_id: str) -> list[int]:
        """The slots of this platform's holders on a node."""
        names = (HolderName.read(c.name) for c in self._present.values() if self.node_of(c) == node_id)
        return sorted({name.slot for name in names if name is not None})

    def ownerless(self, node_id: str, used: Mapping[str, float], others: Mapping[str, float]) -> Amounts:
        """What is used on a node beyond what holders of this platform and the named others account for."""
        left = {name: amount - others.get(name, 0.0) for name, amount in used.items()}
        ending = {key: c for key, (_, c) in self._ending.items() if self.node_of(c) == node_id}
        for claim in self._present.values():
            if self.node_of(claim) == node_id:
                left = _less(left, claim.amounts)
        if all(amount < _LEFT for amount in left.values()):
            for key in ending:  # the figures show their end
                del self._ending[key]
        for claim in ending.values():
            left = _less(left, claim.amounts)
        return {name: amount for name, amount in left.items() if amount >= _LEFT}


def _less(left: Mapping[str, float], amounts: Mapping[str, float]) -> Amounts:
    return {name: amount - amounts.get(name, 0.0) for name, amount in left.items()}


class Claims:
    """Reads Ray's state, and notes in the nodes of the scout's line who holds what there."""

    def __init__(self, platform: str, resources: Collection[str]) -> None:
        self._ledger = Ledger(platform)
        self._resources = frozenset(resources)
        self._tables: dict[str, tuple[float, list[Claim]]] = {}
        """By table: when it is read again at the earliest, and its content."""

    def note(self, nodes: list[dict[str, Any]]) -> None:
        """Give each node its `holders`, the slots of this platform's holders, and what `others` hold."""
        used = {node["id"]: _used(node, self._resources) for node in nodes}
        anybody = any(amount >= _LEFT for amounts in used.values() for amount in amounts.values())
        present = self._read("actors") if anybody else []
        self._ledger.note_holders((c for c in present if self._ledger.is_ours(c)), time.monotonic())
        named = defaultdict[str, Amounts](Amounts)
        for claim in present:
            if claim.node_id and not self._ledger.is_ours(claim):
                self._add(named[claim.node_id], claim.amounts)
        left = self._ownerless(used, named)
        if left:
            for claim in self._read("groups"):
                self._add(named[claim.node_id], claim.amounts)
            left = self._ownerless(used, named)
        if left:
            with_tasks = {claim.node_id for claim in self._read("tasks")}
            for node_id in with_tasks & left.keys():
                self._add(named[node_id], left[node_id])
        for node in nodes:
            node["holders"] = self._ledger.slots(node["id"])
            node["others"] = dict(named.get(node["id"], {}))

    def _ownerless(
        self, used: Mapping[str, Amounts], named: Mapping[str, Mapping[str, float]]
    ) -> dict[str, Amounts]:
        """By node, where there is any: what is used and has no owner yet."""
        found = {
            node_id: self._ledger.ownerless(node_id, amounts, named.get(node_id, {}))
            for node_id, amounts in used.items()
        }
        return {node_id: amounts for node_id, amounts in found.items() if amounts}

    def _add(self, to: Amounts, amounts: Mapping[str, float]) -> None:
        for name in self._resources & amounts.keys():
            to[name] = to.get(name, 0.0) + amounts[name]

    def _read(self, table: str) -> list[Claim]:
        """A table of Ray's state; the one read before if that was a moment ago and took long."""
        began_s = time.monotonic()
        not_before_s, claims = self._tables.get(table, (began_s, []))
        if began_s >= not_before_s:
            claims = {"actors": _actors, "groups": _groups, "tasks": _tasks}[table](_accessor())
            took_s = time.monotonic() - began_s
            self._tables[table] = (began_s + LEAST_PAUSE * took_s, claims)
        return claims


def _used(node: Mapping[str, Any], resources: Collection[str]) -> Amounts:
    total, free = node["total"], node["available"]
    return {name: total[name] - free.get(name, 0) for name in resources if total.get(name)}


# -- Ray's tables ------------------------------------------------------------------------------------------


def _accessor() -> Any:
    """Ray's own reader of its state, which works without Ray's dashboard."""
    state: Any = importlib.import_module("ray._private.state").state
    if hasattr(state, "_connect_and_get_accessor"):
        return state._connect_and_get_accessor()
    state._check_connected()  # Ray before 2.50
    return state.global_state_accessor


def _actors(accessor: Any) -> list[Claim]:
    """The actors that are there or about to be. One that is not there yet holds nothing by itself."""
    gcs: Any = importlib.import_module("ray.core.generated.gcs_pb2")
    claims = []
    for state in ("ALIVE", "PENDING_CREATION"):
        for raw in accessor.get_actor_table(None, state):
            actor = gcs.ActorTableData.FromString(raw)
            claims.append(
                Claim(
                    key=actor.actor_id.hex(),
                    node_id=actor.address.node_id.hex() if state == "ALIVE" else "",
                    amounts=dict(actor.required_resources),
                    name=actor.name,
                    namespace=actor.ray_namespace,
                    kind=actor.class_name.rpartition(".")[2],
                )
            )
    return claims


def _groups(accessor: Any) -> list[Claim]:
    """The parts of placement groups: swell makes none. What runs inside of them takes nothing besides."""
    gcs: Any = importlib.import_module("ray.core.generated.gcs_pb2")
    claims = []
    for raw in accessor.get_placement_group_table():
        group = gcs.PlacementGroupTableData.FromString(raw)
        if group.state != gcs.PlacementGroupTableData.REMOVED:
            key = group.placement_group_id.hex()
            claims += [Claim(key, p.node_id.hex(), dict(p.unit_resources)) for p in group.bundles]
    return [claim for claim in claims if claim.node_id]


def _tasks(accessor: Any) -> list[Claim]:
    """The tasks that run, or ran a moment ago: swell has none."""
    gcs: Any = importlib.import_module("ray.core.generated.gcs_pb2")
    normal = importlib.import_module("ray.core.generated.common_pb2").NORMAL_TASK
    since_ns, claims = (time.time() - TASK_S) * 1e9, []
    for raw in accessor.get_task_events():
        task = gcs.TaskEvents.FromString(raw)
        times = task.state_updates.state_ts_ns
        ended_ns = max(times.get(_FINISHED, 0), times.get(_FAILED, 0))
        if task.task_info.type == normal and _RUNNING in times and (not ended_ns or ended_ns > since_ns):
            node_id, amounts = task.state_updates.node_id.hex(), dict(task.task_info.required_resources)
            claims.append(Claim(task.task_id.hex(), node_id, amounts))
    return claims
