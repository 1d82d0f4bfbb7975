"""A job's membership as JSON, so that a restarted coordinator goes on with it."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from swell.train.agent.membership import (
    Ending,
    Generation,
    GivenUp,
    KnownWorker,
    Membership,
    Names,
    Rules,
    Scale,
    place,
)
from swell.train.agent.protocol import JobFile, Status
from swell.train.agent.replicas import Replicas, Roll, check_multiple
from swell.train.agent.restarts import FINISH_S, SAVE_S, ProgramGeneration, Restarts

AnyMembership = Membership | Replicas | Restarts


def to_json(membership: AnyMembership) -> dict[str, Any]:
    """Everything needed to go on after a restart of the coordinator."""
    match membership:
        case Membership():
            return _of_membership(membership)
        case Restarts():
            return _of_restarts(membership)
        case Replicas():
            return {
                "kind": "replicas",
                "size": membership.size,
                "inner": _of_membership(membership.inner),
                "groups": sorted([number, *slots] for number, slots in membership.groups.items()),
                "ended": sorted(membership.roll.ended),
                "through": sorted(membership.roll.through),
            }


def from_json(data: dict[str, Any], now_s: float) -> AnyMembership:
    """The membership as it was; what was under way gets its full time again."""
    if data["kind"] == "membership":
        return _membership(data, now_s)
    if data["kind"] == "restarts":
        return _restarts(data, now_s)
    groups = {number: tuple(slots) for number, *slots in data["groups"]}
    roll = Roll(ended=set(data["ended"]), through=set(data["through"]))
    return Replicas(data["size"], _membership(data["inner"], now_s), roll, groups)


def _of_membership(m: Membership) -> dict[str, Any]:
    return {
        "kind": "membership",
        "scale": m.scale.to_json(),
        "rules": asdict(m.rules),
        "workers": _of_workers(m.workers),
        "names": asdict(m.names),
        "fenced": sorted(m.given_up.fenced),
        "missing": m.given_up.missing,
        "generation": asdict(m.generation),
        "recovering": m.recovering,
        "step": m.step,
        "stopping": m.ending.stopping,
        "finished": m.ending.finished,
    }


def _membership(data: dict[str, Any], now_s: float) -> Membership:
    """As it was; workers have `silent_after_s` to report again."""
    made = Membership(
        scale=_scale(data["scale"]),
        rules=Rules(**data["rules"]),
        workers=_workers(data["workers"], now_s),
        names=Names(**data["names"]),
        given_up=GivenUp(fenced=set(data["fenced"]), missing=dict(data["missing"])),
        generation=Generation(**data["generation"]),
        step=data["step"],
        ending=Ending(stopping=data["stopping"], finished=data["finished"]),
    )
    # Members without a process: the job was over, which is not written down, when the coordinator was killed.
    present = made.generation
    kept = [name for name in present.members if name in made.workers]
    if kept != present.members:
        present.members, present.live = kept, bool(kept)
    if data["recovering"] and kept:
        made.announce(kept, recovery=True)
    return made


def _of_restarts(m: Restarts) -> dict[str, Any]:
    return {
        "kind": "restarts",
        "scale": m.scale.to_json(),
        "workers": _of_workers(m.workers),
        "names": asdict(m.names),
        "generation": asdict(m.generation),
        "done": m.done,
        "fruitless": m.ending.fruitless,
        "stopping": m.ending.stopping,
        "finished": m.ending.finished,
        "saving": m.saving,
    }


def _restarts(data: dict[str, Any], now_s: float) -> Restarts:
    ending = Ending(data["stopping"], data["finished"], data["fruitless"])
    generation = ProgramGeneration(**data["generation"] | {"began_s": now_s})
    made = Restarts(
        scale=_scale(data["scale"]),
        generation=generation,
        workers=_workers(data["workers"], now_s),
        names=Names(**data["names"]),
        done=data["done"],
        ending=ending,
    )
    made.end_by_s = now_s + SAVE_S if data["saving"] else now_s + FINISH_S if ending.finished else None
    return made


def _of_workers(workers: dict[str, KnownWorker]) -> dict[str, Any]:
    return {w.name: [w.status.value, w.slot] for w in workers.values()}


def _workers(data: dict[str, Any], now_s: float) -> dict[str, KnownWorker]:
    return {
        name: KnownWorker(name, Status(status), now_s, slot=slot) for name, (status, slot) in data.items()
    }


def _scale(data: dict[str, Any]) -> Scale:
    return Scale(**data | {"slots": None if data["slots"] is None else tuple(data["slots"])})


def of_job(config: JobFile, saved: dict[str, Any] | None, now_s: float) -> AnyMembership:
    """The membership of a job: as it was saved, or of one that begins."""
    if saved is not None:
        return from_json(saved, now_s)
    slots, size = place(config.target, config.slots), config.workers_per_replica
    if config.command:
        return Restarts(Scale(config.minimum, config.maximum, config.target, slots))
    scale = Scale(
        minimum=check_multiple(config.minimum, size),
        maximum=check_multiple(config.maximum, size),
        target=check_multiple(config.target, size),
        slots=slots if size == 1 else None,
    )
    told = {rule.name: getattr(config, rule.name) for rule in fields(Rules)}
    rules = Rules(**told | {"spares": check_multiple(config.spares, size, "spares")})
    if size == 1:
        return Membership(scale, rules)
    replicas = Replicas(size, Membership(scale, rules, names=Names("r")))
    if slots is not None:
        numbers, replicas.groups = replicas.grouped(slots)
        scale.slots = tuple(numbers)
    return replicas
