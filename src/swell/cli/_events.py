"""An event as one line for people."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from swell.cli._terminal import clean
from swell.cli._when import say_duration, say_moment


def subject(job_id: str | None, node: str | None, data: Mapping[str, Any]) -> str:
    """What an event is about."""
    return job_id or node or str(data.get("reservation") or data.get("policy") or "autoscaler")


def line(time_s: float, kind: str, subject: str, data: Mapping[str, Any]) -> str:
    """One line: when it happened, the job or node, what happened."""
    clock = time.strftime("%H:%M:%S", time.localtime(time_s))
    return clean(f"{clock}  {subject:<24} {_describe(time_s, kind, data)}").rstrip()


def _describe(time_s: float, kind: str, data: Mapping[str, Any]) -> str:
    match kind:
        case "submitted":
            deadline_s = data.get("deadline_s")
            return "submitted" + (
                "" if deadline_s is None else f", deadline {say_moment(deadline_s, time_s)}"
            )
        case "admitted":
            finish_s = data.get("finish_s")
            return "admitted" + (
                "" if finish_s is None else f", will finish by {say_moment(finish_s, time_s)}"
            )
        case "rejected":
            earliest_s = data.get("earliest_deadline_s")
            offer = "" if earliest_s is None else f"; {say_moment(earliest_s, time_s)} would be possible"
            return f"refused: {data.get('reason', '')}{offer}"
        case "allocated":
            return f"starts on {_slots(data.get('gpus', ()))}"
        case "resized":
            pause = f", {data['pause_s'] * 1e3:.0f} ms pause" if data.get("pause_s") else ""
            why = f" ({data['reason']})" if data.get("reason") else ""
            return f"{len(data.get('before', ()))} -> {len(data.get('gpus', ()))} workers{pause}{why}"
        case "preempted":
            why = data.get("reason") or "for a reason that was not reported"
            return f"{len(data.get('before', ()))} -> 0 workers ({why})"
        case "progress":
            of = "" if data.get("of") is None else f" of {data['of']:g}"
            return f"step {data.get('done', 0):g}{of}{figures(data)}"
        case "worker_lost":
            return f"worker {data.get('worker', '?')} was lost: {data.get('reason', '')}"
        case "noticed":
            return str(data.get("text", ""))
        case "checkpoint_saved":
            return f"checkpoint saved at step {data.get('step', '?')}"
        case "finished":
            met = {"True": ", deadline met", "False": ", deadline missed"}.get(str(data.get("met")), "")
            return f"finished after {say_duration(data.get('jct_s'))}{met}"
        case "failed":
            return f"failed: {' '.join(str(data.get('reason', '')).split())}"
        case "cancelled":
            return f"cancelled by {data.get('by', 'its owner')}"
        case "node_joined":
            why = f" ({data['reason']})" if data.get("reason") else ""
            return f"in service with {data.get('gpus', '?')} slots{why}"
        case "node_lost":
            return f"out of service ({data.get('reason', 'lost')})"
        case "node_slow":
            return f"new workers are slow here too, {data.get('times', 0):.1f} times; see 'swell nodes'"
        case "scaled":
            return f"{data.get('before', '?')} -> {data.get('nodes', '?')} nodes: {data.get('reason', '')}"
        case "policy_replaced":
            return f"failed and is replaced by '{data.get('by', '?')}': {data.get('reason', '')}"
        case "reserved":
            return f"reserved by {data.get('by', '?')}"
        case "unreserved":
            return f"removed by {data.get('by', '?')}"
        case "held":
            return f"has {len(data.get('gpus', ()))} slots, had {len(data.get('before', ()))}"
        case "yielded":
            return f"workers have left its {len(data.get('gpus', ()))} slots, after {data['after_s']:.2f} s"
    return kind


def figures(data: Mapping[str, Any]) -> str:
    """Loss, learning rate and metrics of a progress report, if it has any."""
    values = {name: data.get(name) for name in ("loss", "lr")} | dict(data.get("metrics") or {})
    numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
    return "".join(f", {name} {value:.4g}" for name, value in numbers.items())


def _slots(gpus: Any) -> str:
    numbers = list(gpus)
    return f"slot {numbers[0]}" if len(numbers) == 1 else f"slots {', '.join(map(str, numbers))}"
