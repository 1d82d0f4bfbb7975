"""The border between a job and the platform: everything a job says is checked here, once.

A job's processes run its owner's code, so whatever comes from them may be anything: a report that is a list,
a step that took minus one second, a loss of NaN. Here it becomes values of known types within known bounds,
or `BadMessage`, which costs the job that message and nobody else anything.

A loss, a learning rate or a metric that is no finite number is left out and the rest of the report is kept,
because honest jobs diverge. Everything else that is wrong refuses the whole message.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from swell.train.agent.errors import TrainError
from swell.train.agent.protocol import CAUSES

MOST_STEPS = 1e15
"""Most steps that a job may report to have done or to consist of."""
MOST_S = 1e7
"""Longest step or pause that a job may report, in seconds."""
LEAST_S = 1e-9
MOST_SAMPLES = 10**12
MOST_MEMBERS = 100_000
MOST_METRICS = 100
MOST_EVENTS = 2**53
MOST_TIMES = 1e9
MOST_LINE = 500
"""Longest line of text that is shown to people, in characters; the rest of it is cut off."""
MOST_NAME = 100
"""Longest name of a worker or a metric, in characters."""
_GRADIENTS = 1e30
_LIMITS = ("init_batch", "max_batch", "min_local", "max_local")


class BadMessage(TrainError):
    """A job sent something that is not a report, an event or a status; the message says what."""


@dataclass(frozen=True, slots=True)
class Beat:
    """What a worker reported with a heartbeat."""

    rank: int
    progress: dict[str, Any]
    timing: dict[str, Any] | None
    """Step times and how the batch is split, if the report has them."""
    noise: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Confined:
    """How many workers a job can use at most, and why no more."""

    workers: int
    reason: str

    @property
    def said(self) -> tuple[str, dict[str, Any]]:
        """The kind and the data of the report about it."""
        return "confined", {"workers": self.workers, "reason": self.reason}


@dataclass(frozen=True, slots=True)
class JobEvent:
    """An event of a job's own log. Only the fields of its kind are set."""

    kind: str
    worker: str = ""
    slot: int | None = None
    code: int = 0
    members: tuple[str, ...] = ()
    pause_s: float | None = None
    step: int = 0
    others: tuple[str, ...] = ()
    """Who cannot reach the worker; who is waited for; in whose place it came."""
    silent_s: float | None = None
    """How long nothing was heard of the worker."""
    times: float = 1.0
    """How many times slower than the others the worker was."""
    link: bool = False
    """Whether it is the worker's links to the others that are slow."""
    leads: bool = False
    """Whether the slow worker led the job, and so may have had more to do than the others."""
    confined: Confined | None = None
    node: str = ""
    """The node on which the worker could not be started."""
    cause: str = ""
    """Why it could not: one of `CAUSES`."""
    reason: str = ""
    """The same in a line for the job's owner."""

    @property
    def text(self) -> str:
        """What people are told about slow workers and links between workers; empty for other events."""
        others = " and ".join(filter(None, [", ".join(self.others[:-1]), *self.others[-1:]]))
        match self.kind:
            case "left_out" if self.silent_s is not None:
                return f"{self.worker} was left out: nothing was heard of it for {self.silent_s:.0f} s"
            case "left_out":
                return f"{self.worker} was left out: {others} cannot reach it"
            case "unreachable":
                return f"newcomer {self.worker} cannot be reached by {others}; it is tried again"
            case "standstill":
                return f"step {self.step + 1} stands still and waits for {others}"
            case "out_of_step":
                return (
                    f"{self.worker} found the workers out of step; step {self.step + 1} is made again, "
                    "see the job's log"
                )
            case "straggler" if self.link:
                slower = f"{self.times:.1f} times slower than the others'"
                return f"the links to {self.worker} were {slower} and it is replaced"
            case "straggler":
                return f"{self.worker} was {self.times:.1f} times slower than the others and is replaced"
            case "unstartable":
                return (
                    f"{self.worker} cannot be started on node {self.node}, and the job goes on without that "
                    f"slot: {self.reason}"
                )
            case "parted" if self.worker:
                return f"{self.worker} asked to be started again, with its replica ({others}); see its log"
            case "parted":
                return f"{others}, of one replica, cannot reach each other; the replica is started again"
            case "back":
                return f"{self.worker} is back in the place of {others}"
        return ""


@dataclass(frozen=True, slots=True)
class JobStatus:
    """What a coordinator answers when the engine connects."""

    workers: dict[str, str]
    """Status by name."""
    slots: dict[str, int | None]
    """The workers that were started and have not ended, with their slots."""
    event: int
    """The number of the last event before this answer."""
    members: frozenset[str]
    target: int
    confined: Confined | None
    """Set if the job found out that it cannot use as many workers as it may have."""


def read_beat(raw: object) -> Beat:
    """The report of a heartbeat; raises BadMessage."""
    report = _mapping(raw, "report")
    progress: dict[str, Any] = {
        "done": _number(report.get("done", report.get("step", 0)), "done", 0.0, MOST_STEPS),
        "of": _maybe(report, "of", 0.0, MOST_STEPS),
        "at_most": _maybe(report, "at_most", 0.0, MOST_STEPS),
        "batch_size": _maybe_whole(report, "batch_size", 1, MOST_SAMPLES),
        "epoch": _maybe_whole(report, "epoch", 0, MOST_SAMPLES),
        "target_loss": _finite(report.get("target_loss")),
        "loss": _finite(report.get("loss")),
        "lr": _finite(report.get("lr")),
        "metrics": _metrics(report.get("metrics")),
    }
    noise = None
    if report.get("sqr") is not None and report.get("var") is not None:
        noise = {
            "sqr": _number(report["sqr"], "sqr", -_GRADIENTS, _GRADIENTS),
            "var": _number(report["var"], "var", 0.0, _GRADIENTS),
            "updates": _maybe_whole(report, "noise_updates", 0, MOST_SAMPLES),
        }
    return Beat(_whole(report.get("rank", 0), "rank", 0, MOST_MEMBERS), progress, _timing(report), noise)


def _timing(report: dict[str, Any]) -> dict[str, Any] | None:
    if not report.get("local_batch") or not report.get("step_s"):
        return None
    step_s = _number(report["step_s"], "step_s", LEAST_S, MOST_S)
    timing: dict[str, Any] = {
        "local_batch": _whole(report["local_batch"], "local_batch", 1, MOST_SAMPLES),
        "step_s": step_s,
        # The two are means over different steps, so the exchange may seem to be longer than the step.
        "sync_s": min(_number(report.get("sync_s", 0), "sync_s", 0.0, MOST_S), step_s),
        "accumulation": _whole(report.get("accumulation", 0), "accumulation", 0, MOST_SAMPLES),
        "workers": _whole(report.get("workers") or report.get("world") or 1, "workers", 1, MOST_MEMBERS),
    }
    if report.get("steps") is not None:
        timing["steps"] = _whole(report["steps"], "steps", 0, int(MOST_STEPS))
    if report.get("mode"):
        timing["mode"] = _name(report["mode"], "mode")
    if report.get("limits"):
        limits = _mapping(report["limits"], "limits")
        timing["limits"] = {name: _whole(limits.get(name), name, 1, MOST_SAMPLES) for name in _LIMITS}
    return timing


def read_event(raw: object, slots: int) -> JobEvent:
    """An event of the job's log; raises BadMessage. A slot must be one of the cluster's `slots`."""
    event = _mapping(raw, "event")
    kind = _name(event.get("event"), "event")
    if kind == "generation":
        return JobEvent(kind, members=_names(event.get("members"), "members"))
    if kind in ("switch", "recovery"):
        return JobEvent(kind, pause_s=_maybe(event, "pause_s", 0.0, MOST_S))
    if kind == "checkpoint":
        return JobEvent(kind, step=_whole(event.get("step"), "step", 0, int(MOST_STEPS)))
    if kind in ("left_out", "unreachable"):
        others = _names(event.get("by", []), "by")
        silent_s = _maybe(event, "silent_s", 0.0, MOST_S)
        return JobEvent(kind, _name(event.get("worker"), "worker"), others=others, silent_s=silent_s)
    if kind == "confined":
        return JobEvent(kind, confined=_confined(event.get("workers"), event.get("reason")))
    if kind == "standstill":
        step = _whole(event.get("step"), "step", 0, int(MOST_STEPS))
        return JobEvent(kind, step=step, others=_names(event.get("workers"), "workers"))
    if kind == "out_of_step":
        step = _whole(event.get("step"), "step", 0, int(MOST_STEPS))
        return JobEvent(kind, _name(event.get("worker"), "worker"), step=step)
    if kind == "straggler":
        times = _number(event.get("times"), "times", 1.0, MOST_TIMES)
        leads = event.get("leader") is True
        link = event.get("link") is True
        return JobEvent(kind, _name(event.get("worker"), "worker"), times=times, link=link, leads=leads)
    if kind == "unstartable":
        cause = _name(event.get("cause"), "cause")
        if cause not in CAUSES:
            raise _refused("cause", cause, "one of " + ", ".join(CAUSES))
        node, reason = _name(event.get("node"), "node"), _line(event.get("reason"), "reason")
        return JobEvent(kind, _name(event.get("worker"), "worker"), node=node, cause=cause, reason=reason)
    if kind == "parted":
        one = _name(event["worker"], "worker") if "worker" in event else ""
        return JobEvent(kind, one, others=_names(event.get("workers"), "workers"))
    if kind == "back":
        before = (_name(event.get("instead_of"), "instead_of"),)
        return JobEvent(kind, _name(event.get("worker"), "worker"), others=before)
    if kind not in ("spawn", "exited", "ready", "fenced"):
        return JobEvent(kind)  # nothing that the engine acts on
    worker = _name(event.get("worker"), "worker")
    if kind == "spawn":
        return JobEvent(kind, worker, slot=_maybe_whole(event, "slot", 0, slots - 1))
    if kind == "exited":
        return JobEvent(kind, worker, code=_whole(event.get("code", 0), "code", -1000, 1000))
    return JobEvent(kind, worker)


def read_status(raw: object, slots: int) -> JobStatus:
    """The answer of a coordinator to the engine's greeting; raises BadMessage."""
    status = _mapping(raw, "status")
    workers = _mapping(status.get("workers"), "workers")
    names = _names(list(workers), "workers")
    if "processes" in status:
        where = _mapping(status["processes"], "processes")
    else:  # a coordinator of an earlier version
        slots_of = _mapping(status.get("slots", {}), "slots")
        where = {name: slots_of.get(name) for name in names}
    return JobStatus(
        workers={name: _name(workers[name], "status") for name in names},
        slots={name: _maybe_whole(where, name, 0, slots - 1) for name in _names(list(where), "processes")},
        event=_whole(status.get("event", 0), "event", 0, MOST_EVENTS),
        members=frozenset(_names(status.get("members"), "members")),
        target=_whole(status.get("target"), "target", 0, MOST_MEMBERS),
        confined=_confined(status.get("maximum"), status["confined"]) if status.get("confined") else None,
    )


def _confined(workers: object, reason: object) -> Confined:
    return Confined(_whole(workers, "workers", 1, MOST_MEMBERS), _line(reason, "reason"))


# -- types -----------------------------------------------------------------------------------------------


def _mapping(raw: object, what: str) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise _refused(what, raw, "an object")
    return raw


def _number(raw: object, what: str, least: float, most: float) -> float:
    if isinstance(raw, bool) or not isinstance(raw, int | float) or not least <= raw <= most:
        raise _refused(what, raw, f"a number from {least:g} to {most:g}")
    return float(raw)


def _whole(raw: object, what: str, least: int, most: int) -> int:
    if isinstance(raw, bool) or not isinstance(raw, int) or not least <= raw <= most:
        raise _refused(what, raw, f"a whole number from {least} to {most}")
    return raw


def _maybe(raw: dict[str, Any], what: str, least: float, most: float) -> float | None:
    return None if raw.get(what) is None else _number(raw[what], what, least, most)


def _maybe_whole(raw: dict[str, Any], what: str, least: int, most: int) -> int | None:
    return None if raw.get(what) is None else _whole(raw[what], what, least, most)


def _finite(raw: object) -> float | None:
    """The number, or None if it is none: for figures that may be missing."""
    if isinstance(raw, bool) or not isinstance(raw, int | float):
        return None
    return float(raw) if abs(raw) < 1e300 and math.isfinite(raw) else None


def _metrics(raw: object) -> dict[str, float] | None:
    if not isinstance(raw, dict):
        return None
    named = [(name, _finite(value)) for name, value in list(raw.items())[:MOST_METRICS]]
    return {name: value for name, value in named if value is not None and len(name) <= MOST_NAME} or None


def _name(raw: object, what: str) -> str:
    if not isinstance(raw, str) or not 1 <= len(raw) <= MOST_NAME or not raw.isprintable():
        raise _refused(what, raw, f"a text of 1 to {MOST_NAME} printable characters")
    return raw


def _line(raw: object, what: str) -> str:
    """Text of a job in one printable line."""
    if not isinstance(raw, str):
        raise _refused(what, raw, "a text")
    words = " ".join(raw[: 2 * MOST_LINE].split())
    return "".join(letter for letter in words if letter.isprintable())[:MOST_LINE]


def _names(raw: object, what: str) -> tuple[str, ...]:
    if not isinstance(raw, list) or len(raw) > MOST_MEMBERS:
        raise _refused(what, raw, f"a list of at most {MOST_MEMBERS} names")
    return tuple(_name(one, what) for one in raw)


def _refused(what: str, raw: object, allowed: str) -> BadMessage:
    text = repr(raw) if isinstance(raw, str | int | float | bool | None) else type(raw).__name__
    return BadMessage(f"{what}: got {text[:80]!s}, must be {allowed}")
