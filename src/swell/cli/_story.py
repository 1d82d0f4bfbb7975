"""What happens to a job under `swell run`, in lines: who joined, left or died, and a summary at the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swell.domain.words import many


class Story:
    """Turns the events of a job's history into lines for people."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._members: list[str] = []
        self._before: list[str] = []
        self._step = 0
        self._begin_s: float | None = None
        self._since_s = 0.0
        self._worker_s = 0.0
        self._sizes: list[int] = []
        self._deaths = 0
        self._pauses: list[float] = []
        self._told_dead: set[str] = set()

    def tell(self, event: Mapping[str, Any]) -> str | None:
        """The line for an event, or None if it says nothing new."""
        kind = event["event"]
        if kind == "generation":
            return self._generation(event)
        if kind in ("switch", "recovery"):
            return self._changed(event, died=kind == "recovery")
        if kind == "confined" and event.get("workers", 1) > 1:
            return f"at most {event['workers']} workers from now on: {event['reason']}"
        if kind == "straggler" and event.get("link"):
            worker, times = event["worker"], event["times"]
            return f"the links to {worker} were {times:.1f} times slower than the others' and it is replaced"
        if kind == "straggler":
            return f"{event['worker']} was {event['times']:.1f} times slower than the others and is replaced"
        if kind == "exited" and event.get("code") == 75 and event["worker"] not in self._members:
            return f"{event['worker']} is started again"
        return None

    def summary(self, now_s: float, code: int) -> str:
        """The last line: how long, how far, and what was survived."""
        if self._begin_s is None:
            return "it never trained"
        self._count(now_s)
        took_s = max(now_s - self._begin_s, 1e-9)
        least, most = min(self._sizes), max(self._sizes)
        sizes = many(most, "worker")
        if least < most:
            sizes = f"{least} to {sizes} ({self._worker_s / took_s:.1f} on average)"
        parts = [f"{'done' if code == 0 else 'ended'} after {took_s:.1f} s of training", sizes]
        if len(self._sizes) > 1:
            parts.append(f"{many(len(self._sizes) - 1, 'change')} of membership")
        if self._deaths:
            parts.append(f"{many(self._deaths, 'death')} survived")
        if self._pauses:
            parts.append(f"{1000 * sum(self._pauses):.0f} ms paused in all")
        return ", ".join(parts)

    def _generation(self, event: Mapping[str, Any]) -> str | None:
        self._count(event["time_s"])
        self._before, self._members = self._members, [str(m) for m in event["members"]]
        self._sizes.append(len(self._members))
        self._step = int(event.get("step") or 0)
        if self._begin_s is None:
            self._begin_s = self._since_s = event["time_s"]
            where = f" from step {self._step}" if self._step else ""
            return f"training{where} with {many(len(self._members), 'worker')}: {', '.join(self._members)}"
        if self._before and not set(self._before) & set(self._members):  # nobody was left to recover
            self._deaths += len(self._before)
            where = f"goes on from step {self._step}" if self._step else "begins again"
            return f"{', '.join(self._before)} died; training {where} with {', '.join(self._members)}"
        return None

    def _changed(self, event: Mapping[str, Any], *, died: bool) -> str:
        gone = [m for m in self._before if m not in self._members]
        came = [m for m in self._members if m not in self._before]
        pause_s = float(event.get("pause_s") or 0.0)
        self._pauses.append(pause_s)
        self._deaths += len(gone) if died else 0
        what = [f"{', '.join(gone)} {'died' if died else 'left'}"] if gone else []
        what += [f"{', '.join(came)} joined"] if came else []
        how = "recovered in" if died else "paused for"
        told = "; ".join(what) or "the workers met again"
        size = many(len(self._members), "worker")
        return f"{told}; {how} {1000 * pause_s:.0f} ms, {size} at step {int(event.get('step') or self._step)}"

    def _count(self, now_s: float) -> None:
        if self._begin_s is not None:
            self._worker_s += len(self._members) * (now_s - self._since_s)
            self._since_s = now_s
