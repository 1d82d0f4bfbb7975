"""A job's membership as JSON, so that a restarted coordinator goes on with it."""

from __future__ import annotations

from typing import Any

from swell.train.agent.generations import Status, Worker
from swell.train.agent.membership import Membership
from swell.train.agent.replicas.membership import Replicas
from swell.train.agent.replicas.names import check_multiple
from swell.train.agent.replicas.roll import Roll
from swell.train.agent.restarts import Restarts
from swell.train.agent.slots import place

_PLAIN = (
    "minimum", "maximum", "target", "spares", "silent_after_s", "kill_silent", "gather_s", "slots",
    "generation", "members", "counter", "epoch", "live", "born", "step", "leader", "stopping", "finished",
    "host", "away_s", "missing", "confined", "prefix",
)  # fmt: skip
"""Fields that are written as they are."""


def to_json(membership: Membership | Replicas) -> dict[str, Any]:
    """Everything needed to go on after a restart of the coordinator."""
    if isinstance(membership, Replicas):
        return {
            "replica": membership.size,
            "inner": to_json(membership.inner),
            "groups": sorted([number, *slots] for number, slots in membership.groups.items()),
            "ended": sorted(membership.roll.ended),
            "through": sorted(membership.roll.through),
        }
    candidate = membership.candidate
    return {name: getattr(membership, name) for name in _PLAIN} | {
        "workers": {w.name: [w.status.value, w.slot] for w in membership.workers.values()},
        "fenced": sorted(membership.fenced),
        "recovering": candidate.number if candidate and candidate.recovery else 0,
    }


def from_json(data: dict[str, Any], now_s: float) -> Membership | Replicas:
    """The membership as it was; workers have `silent_after_s` to report again."""
    data = dict(data)
    if "replica" in data:
        inner = from_json(data["inner"], now_s)
        assert isinstance(inner, Membership)
        groups = {number: tuple(slots) for number, *slots in data["groups"]}
        roll = Roll(ended=set(data["ended"]), through=set(data["through"]))
        return Replicas(data["replica"], inner, roll, groups)
    workers = {
        name: Worker(name, Status(status), now_s, slot=slot)
        for name, (status, slot) in data.pop("workers").items()
    }
    slots = data.pop("slots")
    recovering = data.pop("recovering")
    fenced = set(data.pop("fenced"))
    membership = Membership(
        **data, slots=None if slots is None else tuple(slots), workers=workers, fenced=fenced
    )
    # Members without a process: the job was over, which is not written down, when the coordinator was killed.
    kept = [name for name in membership.members if name in workers]
    if kept != membership.members:
        membership.members, membership.live = kept, bool(kept)
    if recovering and membership.members:
        membership.announce(list(membership.members), recovery=True)
    return membership


def of_job(
    config: dict[str, Any], saved: dict[str, Any] | None, now_s: float
) -> Membership | Replicas | Restarts:
    """The membership of a job: as it was saved, or of one that begins."""
    slots = place(config["target"], config.get("slots"))
    if config.get("command"):
        if saved is not None:
            return Restarts.from_json(saved, now_s)
        return Restarts(config["minimum"], config["maximum"], config["target"], slots)
    if saved is not None:
        return from_json(saved, now_s)
    size = int(config.get("workers_per_replica", 1))
    membership = Membership(
        minimum=check_multiple(config["minimum"], size),
        maximum=check_multiple(config["maximum"], size),
        target=check_multiple(config["target"], size),
        spares=check_multiple(config.get("spares", 0), size, "spares"),
        silent_after_s=config.get("silent_after_s", 5.0),
        kill_silent=config.get("kill_silent", True),
        gather_s=config.get("gather_s", 1.0),
        slots=slots,
        host=config.get("host", ""),
        away_s=config.get("away_s", 60.0),
    )
    if size == 1:
        return membership
    replicas = Replicas(size, membership)
    membership.prefix, membership.slots = "r", None
    membership.slots = None if slots is None else tuple(replicas.group(slots))
    return replicas
