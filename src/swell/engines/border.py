"""The border between a job and the platform: everything a job says is checked here, once.

A job's processes run its owner's code, so whatever comes from them may be anything: a report that is a list,
a step that took minus one second, a loss of NaN. Here it becomes one of the types of
`protocol`, whose fields have bounds, or `BadMessage`, which costs the job that message and nobody else
anything.

A loss, a learning rate or a metric that is no finite number is left out and the rest of the report is kept,
because honest jobs diverge. Everything else that is wrong refuses the whole message.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, TypeVar

from msgspec import Struct, structs

from swell.train.agent import protocol
from swell.train.agent.errors import Refused, TrainError
from swell.train.agent.story import MOST_STORY

S = TypeVar("S", bound=Struct)
LEAST_S = 1e-9
"""Shortest step that a job may report, in seconds."""
MOST_METRICS = 100
MOST_LINE = 500
"""Longest line of text that is shown to people, in characters; the rest of it is cut off."""
MOST_NAME = 100
"""Longest name of a metric, in characters."""


class BadMessage(TrainError):
    """A job sent something that is not a report, an event or a status; the message says what."""


@dataclass(frozen=True, slots=True)
class WorkerReport:
    rank: int
    progress: dict[str, Any]
    timing: dict[str, Any] | None
    """Step times and how the batch is split, if the report has them."""
    noise: dict[str, Any] | None


def read_beat(raw: object) -> WorkerReport:
    """The report of a heartbeat; raises BadMessage."""
    report = _read(protocol.Report, raw)
    progress = {
        "done": report.step if report.done is None else report.done,
        "of": report.of,
        "at_most": report.at_most,
        "batch_size": report.batch_size,
        "epoch": report.epoch,
        "target_loss": _finite(report.target_loss),
        "loss": _finite(report.loss),
        "lr": _finite(report.lr),
        "metrics": _metrics(report.metrics),
    }
    noise = None
    if report.sqr is not None and report.var is not None:
        noise = {"sqr": report.sqr, "var": report.var, "updates": report.noise_updates}
    return WorkerReport(report.rank, progress, _timing(report), noise)


def _timing(report: protocol.Report) -> dict[str, Any] | None:
    if not report.local_batch or not report.step_s:
        return None
    timing: dict[str, Any] = {
        "local_batch": report.local_batch,
        "step_s": max(report.step_s, LEAST_S),
        # The two are means over different steps, so the exchange may seem to be longer than the step.
        "sync_s": min(report.sync_s, report.step_s),
        "accumulation": report.accumulation,
        "workers": report.workers or report.world or 1,
    }
    if report.steps is not None:
        timing["steps"] = report.steps
    if report.mode is not None:
        timing["mode"] = report.mode
    if report.limits is not None:
        timing["limits"] = structs.asdict(report.limits)
    return timing


def read_event(raw: object, slots: int) -> Any:
    """An event of the job's log; raises BadMessage. None if the engine does not act on it.

    A slot must be one of the cluster's `slots`.
    """
    try:
        event = protocol.happened(raw)
    except Refused as error:
        raise BadMessage(str(error)) from None
    if isinstance(event, protocol.Spawn):
        _check_slots([event.slot], slots)
    return event


def read_story(raw: object) -> list[str]:
    """The last transitions of a job's membership, as its coordinator sent them; raises BadMessage."""
    return [line(one) for one in _read(protocol.StoryLines, raw).lines[:MOST_STORY]]


def read_status(raw: object, slots: int) -> protocol.JobStatus:
    """The answer of a coordinator to the engine's greeting; raises BadMessage."""
    status = _read(protocol.JobStatus, raw)
    if status.processes is None:  # a coordinator of an earlier version
        status = structs.replace(status, processes={name: status.slots.get(name) for name in status.workers})
    _check_slots((status.processes or {}).values(), slots)
    return status


def _read(kind: type[S], raw: object) -> S:
    try:
        return protocol.read(kind, raw)
    except Refused as error:
        raise BadMessage(str(error)) from None


def _check_slots(named: Collection[int | None], slots: int) -> None:
    for slot in named:
        if slot is not None and slot >= slots:
            raise BadMessage(f"slot: got {slot}, must be a whole number from 0 to {slots - 1}")


# -- what people are told --------------------------------------------------------------------------------


def told(event: Struct | None) -> str:
    """What people are told about slow workers and links between workers; empty for other events."""
    match event:
        case protocol.LeftOut(worker, _, silent_s) if silent_s is not None:
            return f"{worker} was left out: nothing was heard of it for {silent_s:.0f} s"
        case protocol.LeftOut(worker, by):
            return f"{worker} was left out: {_listed(by or ())} cannot reach it"
        case protocol.NewcomerWaits(worker, by):
            return f"newcomer {worker} cannot be reached by {_listed(by)}; it is tried again"
        case protocol.Standstill(step, workers):
            return f"step {step + 1} stands still and waits for {_listed(workers)}"
        case protocol.StepRepeated(worker, step):
            return f"{worker} found the workers out of step; step {step + 1} is made again, see the job's log"
        case protocol.Straggler(worker, times, link=True):
            return f"the links to {worker} were {times:.1f} times slower than the others' and it is replaced"
        case protocol.Straggler(worker, times):
            return f"{worker} was {times:.1f} times slower than the others and is replaced"
        case protocol.Unstartable(worker, node, _, reason):
            return (
                f"{worker} cannot be started on node {line(node)}, and the job goes on without that slot: "
                f"{line(reason)}"
            )
        case protocol.Parted(workers, ""):
            replica = _listed(workers)
            return f"{replica}, of one replica, cannot reach each other; the replica is started again"
        case protocol.Parted(workers, worker):
            replica = _listed(workers)
            return f"{worker} asked to be started again, with its replica ({replica}); see its log"
        case protocol.Returned(worker, instead_of):
            return f"{worker} is back in the place of {instead_of}"
    return ""


def confined(workers: int, reason: str) -> tuple[str, dict[str, Any]]:
    """The kind and the data of the report that a job cannot use more workers than this."""
    return "confined", {"workers": workers, "reason": line(reason)}


def _listed(names: tuple[str, ...]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def line(text: str) -> str:
    """Text of a job in one printable line."""
    words = " ".join(text[: 2 * MOST_LINE].split())
    return "".join(letter for letter in words if letter.isprintable())[:MOST_LINE]


# -- figures that may be missing -------------------------------------------------------------------------


def _finite(raw: object) -> float | None:
    """The number, or None if it is none."""
    if isinstance(raw, bool) or not isinstance(raw, int | float):
        return None
    return float(raw) if abs(raw) < 1e300 and math.isfinite(raw) else None


def _metrics(raw: object) -> dict[str, float] | None:
    if not isinstance(raw, dict):
        return None
    named = [(name, _finite(value)) for name, value in list(raw.items())[:MOST_METRICS]]
    return {name: value for name, value in named if value is not None and len(name) <= MOST_NAME} or None
