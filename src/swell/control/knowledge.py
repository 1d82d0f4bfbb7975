"""What is known of each job's speed and length: its own reports first, before that the history of its kind.

A kind is a fingerprint: the same script with the same arguments. What a job taught is kept when it ends, so
the second run of a script starts with the first one's curve.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from swell.control.model import JobRequest
from swell.domain import FloatArray
from swell.perf.belief import JobBelief
from swell.perf.goodput import BatchLimits
from swell.perf.throughput import ThroughputParams

_ENOUGH_STEPS = 3
"""Step times of one configuration are believed once this many reports have come."""
UNKNOWN_WORK = 1e9
"""Iterations of a job that has not said how long it is: long, so that nobody waits for it."""
MOST_CLOSING_S = 60.0
"""A job that takes longer to end than this does something else."""


def fingerprint(request: JobRequest) -> str:
    """Jobs with the same fingerprint are expected to run alike."""
    script = Path(request.workdir, request.script)
    try:
        content = script.read_bytes()
    except OSError:
        content = request.script.encode()
    digest = hashlib.sha256(content)
    digest.update(json.dumps([list(request.args), request.auto]).encode())
    return digest.hexdigest()[:32]


@dataclass(slots=True)
class Knowledge:
    """One job's belief, length and start-up time."""

    fingerprint: str
    belief: JobBelief | None = None
    of: float | None = None
    """Iterations in all."""
    batch_size: int | None = None
    startup_s: float = 15.0
    """From slots to the first step."""
    pause_s: float = 0.5
    """What a resize costs, as last seen."""
    closing_s: float = 1.0
    """From the last step to the end of its processes."""
    source: str = "none"
    """Where it comes from: 'model', 'history' or 'none'."""
    seen: dict[tuple[int, int, int], int] = field(default_factory=dict)
    ran: dict[int, tuple[float, float]] = field(default_factory=dict)
    """By number of workers: iterations done and the seconds they took, as they went by."""
    _last: tuple[int, int, int, float, float] | None = None
    """Nodes, workers, local batch, step and sync seconds of the last timing report."""
    _moved_s: float | None = None
    _now: tuple[float, float] | None = None
    _before: tuple[float, float, int] | None = None
    _curves: dict[bool, tuple[tuple[int, int, int], FloatArray]] = field(default_factory=dict)

    @property
    def known(self) -> bool:
        """Whether speed and length are both known."""
        return self.of is not None and self.belief is not None and self.belief.known

    def progressed(self, time_s: float, done: float) -> None:
        """Take in a progress report."""
        if self._now is None or done > self._now[1]:
            self._moved_s = time_s
        self._now = (time_s, done)

    def finished(self, time_s: float) -> None:
        """It is over: what came after its last step is known now."""
        if self._moved_s is not None:
            self.closing_s = min(max(time_s - self._moved_s, 0.0), MOST_CLOSING_S)
        if self._last is not None and self.belief is not None and not self.belief.known:
            self._believe()  # a job of a few seconds says little, but the next need not start from nothing

    def timing(self, data: dict[str, Any]) -> bool:
        """Take in a timing report; True if the belief changed."""
        workers, local_batch = int(data["workers"]), max(int(data["local_batch"]), 1)
        self._passed(workers)
        accumulation = int(data.get("accumulation", 0))
        if self.batch_size is None:
            self.batch_size = workers * local_batch * (accumulation + 1)
        if self.belief is None:
            self.belief = JobBelief(_limits(self.batch_size), fixed_batch=self.batch_size)
        key = (int(data.get("nodes", 1)), workers, local_batch)
        self.seen[key] = self.seen.get(key, 0) + 1
        self._last = (*key, float(data["step_s"]), float(data["sync_s"]))
        return self.seen[key] >= _ENOUGH_STEPS and self._believe()

    def _believe(self) -> bool:
        """Take the last step times into the model; True if that changed it."""
        assert self.belief is not None and self._last is not None
        before = self.belief.version
        self.belief.observe(*self._last)
        if self.belief.version != before:
            self.source = "model"
        return self.belief.version != before

    def _passed(self, workers: int) -> None:
        """Count the stretch since the last report, if the workers were as many at both of its ends."""
        if self._now is None:
            return
        (time_s, done), before = self._now, self._before
        if before is not None and before[2] == workers and done >= before[1] and time_s > before[0]:
            steps, seconds = self.ran.get(workers, (0.0, 0.0))
            self.ran[workers] = (steps + done - before[1], seconds + time_s - before[0])
        self._before = (time_s, done, workers)

    def figures(self) -> dict[str, Any]:
        """What a replay needs to know of the job: its model, and its speed as it was seen."""
        params = self.belief.params if self.belief is not None and self.belief.known else None
        return {
            "params": None if params is None else params.as_array().tolist(),
            "batch_size": self.batch_size,
            "rates": {str(n): steps / s for n, (steps, s) in sorted(self.ran.items()) if steps > 0},
            "startup_s": self.startup_s,
            "pause_s": self.pause_s,
        }

    def curve(self, max_gpus: int, gpus_per_node: int, *, cautious: bool = False) -> FloatArray:
        """Iterations per second by workers; cautious: no faster on more workers than were ever seen."""
        if self.belief is None:
            return np.arange(max_gpus + 1, dtype=np.float64)
        # Every decision asks for every job's, and few of them have changed.
        asked = (self.belief.version, max_gpus, gpus_per_node)
        before = self._curves.get(cautious)
        if before is not None and before[0] == asked:
            return before[1]
        curve = self.belief.curve(max_gpus, gpus_per_node).copy()
        most = self.belief.most_gpus
        if cautious and self.belief.prior is None and 0 < most < max_gpus:
            curve[most + 1 :] = np.minimum(curve[most + 1 :], curve[most])
        curve.setflags(write=False)
        self._curves[cautious] = (asked, curve)
        return curve

    def left(self, done: float, of: float | None) -> float:
        """Work still to be done, in the unit of the curve; `of` is what the job itself said, if it did."""
        total = self.of if of is None else of
        return UNKNOWN_WORK if total is None else max(total - done, 0.0)

    def most_workers(self, bound: int) -> int:
        """The exploration bound: twice the workers ever seen, unless history knows better."""
        if self.belief is None or not self.belief.known:
            return 1
        return max(self.belief.max_gpus(bound), 1)

    def error(self, gpus: int) -> float:
        """One standard deviation of the predicted duration, relative to it."""
        if self.belief is None or not self.belief.known:
            return 1.0
        return float(self.belief.relative_error(1, max(gpus, 1)))

    def to_json(self) -> dict[str, Any]:
        """What the next job of this kind should start with."""
        params = self.belief.params if self.belief is not None else None
        return {
            "params": None if params is None else params.as_array().tolist(),
            "of": self.of,
            "batch_size": self.batch_size,
            "startup_s": self.startup_s,
            "pause_s": self.pause_s,
            "closing_s": self.closing_s,
            "most_gpus": 0 if self.belief is None else self.belief.most_gpus,
        }

    @classmethod
    def from_history(cls, mark: str, content: dict[str, Any] | None) -> Knowledge:
        """Start with what an earlier job of the kind taught, if there was one."""
        if not content or content.get("params") is None or content.get("batch_size") is None:
            return cls(mark)
        batch = int(content["batch_size"])
        prior = ThroughputParams(*content["params"])
        belief = JobBelief(_limits(batch), fixed_batch=batch, prior=prior)
        belief.most_gpus = int(content.get("most_gpus", 0))
        return cls(
            mark,
            belief=belief,
            of=content.get("of"),
            batch_size=batch,
            startup_s=float(content.get("startup_s", 15.0)),
            pause_s=float(content.get("pause_s", 0.5)),
            closing_s=float(content.get("closing_s", 1.0)),
            source="history",
        )


def _limits(batch_size: int) -> BatchLimits:
    return BatchLimits(batch_size, batch_size, 1, batch_size)
