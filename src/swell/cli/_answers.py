"""Promises, estimates and outcomes, in words."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from swell.cli._terminal import clean
from swell.cli._when import say_duration, say_moment, say_until
from swell.domain.words import many

if TYPE_CHECKING:
    from swell.api.schemas import EstimateView, JobView, PromiseView

REFUSED = 3
"""Exit code for a deadline that cannot be promised."""

_SOURCES = {
    "model": "from what the job has shown so far",
    "history": "from earlier runs of this script",
    "kin": "from runs of this script with other arguments, so it is rough and no promise is made from it",
    "profile": "from a short profiling run",
}


def promise_lines(promise: PromiseView, deadline_s: float | None) -> list[str]:
    """A promise as a few lines."""
    if not promise.admitted:
        return refusal_lines(promise, deadline_s)
    lines = []
    if promise.guaranteed_s is not None:
        lines.append(f"Promised: done by {say_until(promise.guaranteed_s)}.")
    if promise.reason:
        lines.append(f"{promise.reason[:1].upper()}{promise.reason[1:].rstrip('.')}.")
    if promise.estimate.finish_s is not None:
        lines.append(f"Estimate: {estimate(promise.estimate)}.")
    elif not promise.pending and not promise.reason:
        lines.append("Estimate: none yet, this script has never run here. 'swell describe' shows it later.")
    return lines


def refusal_lines(promise: PromiseView, deadline_s: float | None) -> list[str]:
    """A refusal as a few lines: the reason, and what would be possible."""
    lines = []
    if deadline_s is not None:
        lines.append(f"Refused: {say_until(deadline_s)} cannot be promised.")
    lines.append(f"Reason: {promise.reason.rstrip('.')}.")
    if promise.earliest_deadline_s is not None:
        lines.append(f"Counter-offer: {say_until(promise.earliest_deadline_s)} would be promised.")
        lines.append(f"To take it: --deadline {offer(promise.earliest_deadline_s)}")
    else:
        lines.append("Leave the deadline out to run the job as best effort.")
    return lines


def offer(earliest_s: float) -> str:
    """The earliest deadline as a person can type it; a little later, for the time it takes to type."""
    seconds = (earliest_s - time.time()) * 1.05 + 15.0
    return f"{int(seconds / 60) + 1}m" if seconds > 600 else f"{int(seconds) + 1}s"


def estimate(view: EstimateView) -> str:
    """An estimated finish, with its range and its source."""
    if view.finish_s is None:
        return "not known yet"
    text = f"done at about {say_until(view.finish_s)}"
    if view.earliest_s is not None and view.latest_s is not None:
        text += f", between {say_moment(view.earliest_s)} and {say_moment(view.latest_s)}"
    return text + (f", {_SOURCES[view.source]}" if view.source in _SOURCES else "")


def outcome(job: JobView) -> str:
    """How a job ended, in a line."""
    took = say_duration((job.ended_s or time.time()) - job.submitted_s)
    text = f"{job.job_id} {job.phase.value} after {took}"
    if job.phase.value == "finished" and job.request.deadline_s is not None and job.ended_s is not None:
        met = job.ended_s <= job.request.deadline_s
        text += ", by its deadline" if met else ", after its deadline"
    if job.phase.value != "finished" and job.reason:
        text += f": {clean(job.reason)}"
    if job.resizes:
        text += f"; {many(job.resizes, 'resize')} paused it for {say_duration(job.pause_s)} in all"
    return text
