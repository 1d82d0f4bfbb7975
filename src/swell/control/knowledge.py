"""What is known of a job's speed, gradient noise and length: from its own reports, and before there are any
from the history of its kind.

Jobs are of one kind if they have the same fingerprint: the same script with the same arguments. What a job
taught is kept when it ends, so the second run of a script starts with the curve of the first
(docs/history.md). Jobs with the same script and other arguments are kin: what one of them taught is good for
an estimate of another, and for nothing else.

Progress, lengths and curves have one unit: iterations at the batch size the job was tuned for. A job that
keeps its batch makes one per step. An *adaptive* job, whose batch follows goodput, makes as many per step as
its gradient noise allows, and its curve is its goodput (see `swell.perf.goodput`).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from swell.control.model import JobRequest
from swell.domain import FloatArray, InputError
from swell.perf.belief import PRIOR_ERROR, JobBelief
from swell.perf.efficiency import SETTLED_UPDATES, MeanNoiseShare, duration_error, gain_at, noise_share
from swell.perf.goodput import BatchLimits
from swell.perf.gpu_types import Ratio, RatioLedger, carried_belief
from swell.perf.length import TargetLength

MAX_SCRIPT_BYTES = 4 << 20
"""Largest training script. A script is read whenever a job is handed in, while others wait."""
HISTORY_VERSION = 2
"""Version of what `Knowledge.to_json` writes. An entry without a version has version 1."""
_ENOUGH_STEPS = 3
"""Step times of one configuration are used once this many timing reports have arrived."""
UNKNOWN_WORK = 1e9
"""Iterations assumed for a job that has not reported its length: so many that no plan waits for its end."""
MOST_CLOSING_S = 60.0
"""Upper bound of `closing_s`: a script that goes on longer after its last step does other work."""


_CurveFor = tuple[JobBelief, int, int, int, bool]
"""What a curve was computed for: belief, its version, GPUs, GPUs per node, and whether it was measured."""


def _without_waiting(path: str, flags: int) -> int:
    """Open a file, but do not wait if it is a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


def fingerprint(request: JobRequest) -> str:
    """Jobs with the same fingerprint are expected to run alike."""
    return fingerprints(request)[0]


def fingerprints(request: JobRequest) -> tuple[str, str]:
    """The fingerprint of a job's kind, and that of its kin: the same script, whatever the arguments."""
    digest = hashlib.sha256(_content(request, request.script) or request.script.encode())
    how: list[Any] = [list(request.args), request.auto]
    if request.command:
        # What `python train.py` does is in its first argument that is a file.
        inside = (_content(request, word) for word in request.args if not word.startswith("-"))
        digest.update(next((content for content in inside if content), b""))
        how.append("command")
    kin = digest.copy()
    kin.update(json.dumps(["kin", *how[1:]]).encode())
    digest.update(json.dumps(how).encode())
    return digest.hexdigest()[:32], kin.hexdigest()[:32]


def _content(request: JobRequest, path: str) -> bytes:
    """The beginning of a file in a job's working directory; nothing if there is no such file."""
    try:
        with open(Path(request.workdir, path), "rb", opener=_without_waiting) as file:
            return file.read(MAX_SCRIPT_BYTES)
    except (OSError, ValueError):
        return b""


@dataclass(slots=True)
class Knowledge:
    """What is known of one job."""

    fingerprint: str
    belief: JobBelief | None = None
    of: float | None = None
    """Iterations that the job consists of; a prediction if the job trains until a target loss."""
    mode: str = "fixed"
    """How the job treats its batch: 'fixed', 'adaptive' or 'consistent'."""
    batch_size: int | None = None
    """The batch size that the job was tuned for."""
    startup_s: float = 15.0
    """Seconds from getting slots to the first step."""
    pause_s: float = 0.5
    """Seconds without a step that the last resize cost."""
    closing_s: float = 1.0
    """Seconds from the last step to the end of the job's processes."""
    gpu_type: str = ""
    """The GPU type that `belief`, `seen` and `ran` are about; empty if that is not known."""
    only_carried: bool = False
    """Whether `belief` was carried over from another type, and the job has reported nothing on this one."""
    elsewhere: dict[str, JobBelief] = field(default_factory=dict)
    """The beliefs on other GPU types that the job, or an earlier one of its kind, has run on."""
    ledger: RatioLedger = field(default_factory=RatioLedger)
    """How GPU types compare, as all jobs have shown."""
    source: str = "none"
    """Where the knowledge comes from: 'model' (the job's own reports), 'history', 'kin' or 'none'."""
    kin_mark: str = ""
    """The fingerprint of the job's kin; empty if nothing is kept for them."""
    kin: Knowledge | None = None
    """What a job with the same script and other arguments taught, if no earlier run of this kind did."""
    target: TargetLength | None = None
    """Set for a job that trains until its loss is low enough."""
    noise: MeanNoiseShare = field(default_factory=MeanNoiseShare)
    """The noise in an adaptive job's gradients, over this run and earlier ones of its kind."""
    seen: dict[tuple[int, int, int], int] = field(default_factory=dict)
    """By nodes, workers and local batch: how many timing reports have arrived."""
    ran: dict[int, tuple[float, float]] = field(default_factory=dict)
    """By number of workers: the progress made with them, and the seconds that took."""
    _last: tuple[int, int, int, float, float] | None = None
    """Nodes, workers, local batch, step and sync seconds of the last timing report."""
    _advanced_s: float | None = None
    """When a report last showed more progress than the one before it."""
    _latest: tuple[float, float] | None = None
    """Time and progress of the last progress report."""
    _stretch_from: tuple[float, float, int] | None = None
    """Time, progress and number of workers at the last timing report."""
    _noise_at: float | None = None
    """Progress at the last report of settled noise."""
    _noise_settled: bool = False
    """Whether the noise was averaged over enough steps to be relied on."""
    _curves: dict[tuple[str, bool], tuple[_CurveFor, FloatArray]] = field(default_factory=dict)
    """By GPU type and `cautious`: the last curve computed, and what it was computed for."""
    _carried: dict[str, tuple[tuple[JobBelief, int, Ratio], JobBelief]] = field(default_factory=dict)
    """By GPU type that the job has not run on: the belief carried over, and what from."""

    @property
    def known(self) -> bool:
        """Whether speed and length are known, and for an adaptive job its gradient noise too."""
        if self.of is None or self.belief is None or not self.belief.known:
            return False
        return self.mode != "adaptive" or self.belief.noise_known

    @property
    def length_is_predicted(self) -> bool:
        """Whether `of` is predicted from losses: good enough for estimates, not for guarantees."""
        return self.target is not None

    # -- reports -----------------------------------------------------------------------------------------

    def take(self, kind: str, time_s: float, data: Mapping[str, Any]) -> bool:
        """Take in a report of the job; True if that changed the believed speed or length."""
        if kind == "progress":
            return self.progressed(time_s, float(data["done"]), data)
        if kind == "timing":
            return self.timing(data)
        if kind == "noise":
            return self.gradients(float(data["sqr"]), float(data["var"]), data.get("updates"))
        return False

    def progressed(self, time_s: float, done: float, data: Mapping[str, Any] | None = None) -> bool:
        """Take in a progress report; True if the length changed.

        `data` is the whole report: it may hold a length (`of`), or a target loss and the present loss.
        """
        if self._latest is None or done > self._latest[1]:
            self._advanced_s = time_s
        self._latest = (time_s, done)
        data, before = data or {}, self.of
        if data.get("target_loss") is not None:
            self._follow_target(done, data)
        elif data.get("of") is not None:
            self.of, self.target = float(data["of"]), None
        return self.of != before

    def _follow_target(self, done: float, data: Mapping[str, Any]) -> None:
        """Predict when the loss will have come down to the job's target."""
        goal = float(data["target_loss"])
        if self.target is None or self.target.target != goal:
            self.target = TargetLength(goal)
        if data.get("loss") is not None:
            at_most = data.get("at_most")
            self.target.add(done, float(data["loss"]), None if at_most is None else float(at_most))
        self.of = self.target.predicted

    def timing(self, data: Mapping[str, Any]) -> bool:
        """Take in a timing report; True if the belief changed."""
        workers, local_batch = int(data["workers"]), max(int(data["local_batch"]), 1)
        self._count_stretch(workers)
        gradients = int(data.get("accumulation", 0)) + 1
        batch = self.batch_size or workers * local_batch * gradients
        limits = _limits(data.get("limits")) or BatchLimits(batch, batch, 1, batch)
        switched = self._set_limits(str(data.get("mode", self.mode)), limits)
        key = (int(data.get("nodes", 1)), workers, local_batch)
        self.seen[key] = self.seen.get(key, 0) + 1
        # The model's step is one gradient and its exchange, so accumulated gradients are averaged into one.
        sync_s = float(data["sync_s"])
        self._last = (*key, (float(data["step_s"]) - sync_s) / gradients + sync_s, sync_s)
        believed = self.seen[key] >= _ENOUGH_STEPS and self._believe()
        return believed or switched

    def _set_limits(self, mode: str, limits: BatchLimits) -> bool:
        """Plan with the batch limits that the job reported; True if that changed a known speed."""
        self.mode, self.batch_size = mode, limits.init_batch
        fixed_batch = None if mode == "adaptive" else limits.init_batch
        if self.belief is None:
            self.belief = JobBelief(limits, fixed_batch)
        before = self.belief.version
        self.belief.set_limits(limits, fixed_batch)
        return self.belief.known and self.belief.version != before

    def gradients(self, sqr: float, var: float, updates: int | None = None) -> bool:
        """Take in gradient statistics at the tuned batch, a mean over `updates` steps; True for the first."""
        if self.belief is None:
            return False
        first = not self.belief.noise_known
        settled = updates is None or updates >= SETTLED_UPDATES
        if self._noise_settled and not settled:
            return False  # the settled figures, from history or from before a restart, are better
        self._noise_settled = settled
        self.belief.observe_gradients(sqr, var)
        if self._latest is not None and settled:
            if self._noise_at is not None:
                self.noise.add(noise_share(sqr, var), self._latest[1] - self._noise_at)
            self._noise_at = self._latest[1]
        return first

    def finished(self, time_s: float) -> None:
        """The job has finished: set how long it took to end, and the length of a job with a target."""
        if self._advanced_s is not None:
            self.closing_s = min(max(time_s - self._advanced_s, 0.0), MOST_CLOSING_S)
        if self.target is not None and self._latest is not None:
            self.of = self.target.earlier = self._latest[1]
        if self._last is not None and self.belief is not None and not self.belief.known:
            self._believe()  # a very short job reports little, but it is all that the next one starts with

    def _believe(self) -> bool:
        """Add the last step times to the model; True if that changed it."""
        assert self.belief is not None and self._last is not None
        before = self.belief.version
        self.belief.observe(*self._last)
        self.only_carried = False
        if self.belief.version != before:
            self.source = "model"
        return self.belief.version != before

    def _count_stretch(self, workers: int) -> None:
        """Add the time since the last timing report to `ran`, if the number of workers is the same."""
        if self._latest is None:
            return
        (time_s, done), before = self._latest, self._stretch_from
        if before is not None and before[2] == workers and done >= before[1] and time_s > before[0]:
            progress, seconds = self.ran.get(workers, (0.0, 0.0))
            self.ran[workers] = (progress + done - before[1], seconds + time_s - before[0])
        self._stretch_from = (time_s, done, workers)

    # -- GPU types ---------------------------------------------------------------------------------------

    def runs_on(self, gpu_type: str) -> None:
        """The job's reports are about this GPU type from now on."""
        before = self.belief
        if self.gpu_type not in ("", gpu_type):
            self.belief, carried = self.belief_on(gpu_type), gpu_type not in self.elsewhere
            if before is not None and before.known and not self.only_carried:
                self.elsewhere[self.gpu_type] = before
            self.only_carried = carried and before is not None and before.known
            self.elsewhere.pop(gpu_type, None)
            self.seen, self.ran = {}, {}
            self._last = self._stretch_from = None
        self.gpu_type = gpu_type

    def measured_on(self, gpu_type: str) -> bool:
        """Whether the job, or an earlier one of its kind, has shown its speed on a GPU type."""
        if self.gpu_type not in ("", gpu_type):
            return gpu_type in self.elsewhere
        return self.belief is not None and self.belief.known and not self.only_carried

    def belief_on(self, gpu_type: str) -> JobBelief | None:
        """The belief on a GPU type: measured there, or carried over by the ratio between the types."""
        known = self.belief
        if known is None or self.gpu_type in ("", gpu_type):
            return known
        made = self.elsewhere.get(gpu_type)
        if made is None:
            if not known.known:
                return known
            ratio = self.ledger.ratios.between(self.fingerprint, self.gpu_type, gpu_type)
            source, before = (known, known.version, ratio), self._carried.get(gpu_type)
            if before is None or before[0] != source:
                before = self._carried[gpu_type] = (source, carried_belief(known, ratio))
            made = before[1]
        # Batch limits and gradient noise do not depend on the GPU.
        made.set_limits(known.limits, known.fixed_batch)
        if known.noise_known:
            made.observe_gradients(known.sqr, known.var)
        return made

    # -- answers -----------------------------------------------------------------------------------------

    def curve(self, max_gpus: int, gpus_per_node: int, *, cautious: bool = False) -> FloatArray:
        """Progress per second by workers, on the GPU type that the job last ran on."""
        return self.curve_on(self.gpu_type, max_gpus, gpus_per_node, cautious=cautious)

    def curve_on(
        self, gpu_type: str, max_gpus: int, gpus_per_node: int, *, cautious: bool = False
    ) -> FloatArray:
        """Progress per second by workers on a GPU type.

        `cautious`: more workers than were ever seen bring no speed; on a type that the job has not run on it
        counts as slower by the usual error, and as unable to run if no job has shown how the types compare.
        """
        belief, measured = self.belief_on(gpu_type), self.measured_on(gpu_type)
        if belief is None or not belief.known:  # nothing is known but how the types compare
            return np.arange(max_gpus + 1, dtype=np.float64) * self.ledger.relative_speed(gpu_type)
        # Every decision asks for the curves of all jobs, and few of them have changed.
        asked = (belief, belief.version, max_gpus, gpus_per_node, measured)
        before = self._curves.get((gpu_type, cautious))
        if before is not None and before[0] == asked:
            return before[1]
        curve = belief.curve(max_gpus, gpus_per_node).copy()
        most = belief.most_gpus
        if cautious and belief.explores and 0 < most < max_gpus:
            curve[most + 1 :] = np.minimum(curve[most + 1 :], curve[most])
        if cautious and not measured:
            known = [kind for kind in (self.gpu_type, *self.elsewhere) if kind != gpu_type]
            sure = any(self.ledger.ratios.has(kind, gpu_type) for kind in known)
            curve *= 1.0 / (1.0 + PRIOR_ERROR) if sure else 0.0
        curve.setflags(write=False)
        self._curves[gpu_type, cautious] = (asked, curve)
        return curve

    def basis(self, done: float) -> Knowledge | None:
        """What an estimate can be made from, at that progress: this, or as far as needed the job's kin."""
        if self.known:
            return self
        kin = self.kin
        if kin is None or not kin.known or (kin.of is not None and done >= kin.of):
            return None
        if self.belief is None or not self.belief.known or self.mode == "adaptive":
            return kin
        return replace(self, of=kin.of, source="kin")

    def left(self, done: float) -> float:
        """Progress still to be made, in the unit of the curve; `UNKNOWN_WORK` if the length is unknown."""
        return UNKNOWN_WORK if self.of is None else max(self.of - done, 0.0)

    def most_workers(self, bound: int) -> int:
        """The exploration bound: twice the most workers ever seen, unless history knows better."""
        if self.belief is None or not self.belief.known:
            return 1
        return max(self.belief.max_gpus(bound), 1)

    def error(self, gpus: int) -> float:
        """Relative standard deviation of the predicted duration, from those of speed, noise and length."""
        belief = self.belief
        if belief is None or not belief.known:
            return 1.0
        gpus = max(gpus, 1)
        speed, noise, length = float(belief.relative_error(1, gpus)), 0.0, 0.0
        if self.mode == "adaptive":
            scale = belief.plan(1, gpus).total(gpus) / belief.limits.init_batch
            noise = duration_error(noise_share(belief.sqr, belief.var), self.noise.deviation, scale)
        if self.target is not None:
            left = self.left(0.0 if self._latest is None else self._latest[1])
            length = min(self.target.deviation / left, 1.0) if left else 0.0
        return math.hypot(speed, noise, length)

    def noise_figures(self, batch_size: int | None) -> dict[str, float]:
        """Gradient noise scale and statistical efficiency of an adaptive job at its present batch."""
        belief = self.belief
        if belief is None or self.mode != "adaptive" or not belief.noise_known or belief.sqr <= 0:
            return {}
        tuned = belief.limits.init_batch
        scale = (batch_size or tuned) / tuned
        gain = float(gain_at(belief.sqr, belief.var, scale))
        return {"noise_scale": belief.var / belief.sqr * tuned, "efficiency": gain / scale}

    # -- history and replay ------------------------------------------------------------------------------

    def figures(self) -> dict[str, Any]:
        """What a replay needs to know of the job: its model, and its measured speed."""
        params = self.belief.params if self.belief is not None and self.belief.known else None
        return {
            "params": None if params is None else params.as_array().tolist(),
            "batch_size": self.batch_size,
            "rates": {str(n): made / s for n, (made, s) in sorted(self.ran.items()) if made > 0},
            "startup_s": self.startup_s,
            "pause_s": self.pause_s,
        } | self._batch_figures()

    def _batch_figures(self) -> dict[str, Any]:
        """Mode and limits; for an adaptive job also its mean noise, as `sqr` and `var` that add up to 1."""
        belief = self.belief
        out: dict[str, Any] = {
            "mode": self.mode,
            "limits": None if belief is None else belief.limits.as_dict(),
        }
        if belief is not None and self.mode == "adaptive" and belief.noise_known:
            share = self.noise.mean if self.noise.weight else noise_share(belief.sqr, belief.var)
            out |= {"sqr": 1.0 - share, "var": share}
        return out

    def to_json(self) -> dict[str, Any]:
        """What the next job of this kind should start with (docs/history.md)."""
        params = self.belief.params if self.belief is not None else None
        return {
            "version": HISTORY_VERSION,
            "gpu_type": self.gpu_type,
            "types": {kind: _figures_of(belief) for kind, belief in self.elsewhere.items() if belief.known},
            "params": None if params is None else params.as_array().tolist(),
            "most_gpus": 0 if self.belief is None else self.belief.most_gpus,
            # Of a job with a target only a length that was really reached is kept, not a prediction.
            "of": self.of if self.target is None else self.target.earlier,
            "target_loss": None if self.target is None else self.target.target,
            "batch_size": self.batch_size,
            "startup_s": self.startup_s,
            "pause_s": self.pause_s,
            "closing_s": self.closing_s,
            "noise_progress": self.noise.weight,
            "noise_deviation": self.noise.deviation,
        } | self._batch_figures()

    @classmethod
    def from_history(cls, mark: str, content: Mapping[str, Any] | None) -> Knowledge:
        """Start with what an earlier job of the kind taught, if there was one."""
        if not content or content.get("params") is None or content.get("batch_size") is None:
            return cls(mark)
        if int(content.get("version", 1)) > HISTORY_VERSION:
            return cls(mark)  # written by a newer swell: start from nothing rather than misread it
        belief, types = JobBelief.from_figures(content), dict(content.get("types") or {})
        belief.most_gpus = int(content.get("most_gpus", 0))
        elsewhere = {str(kind): JobBelief.from_figures({**content, **own}) for kind, own in types.items()}
        for kind, own in types.items():
            elsewhere[str(kind)].most_gpus = int(own.get("most_gpus", 0))
        of, goal = content.get("of"), content.get("target_loss")
        made = cls(
            mark,
            belief=belief,
            gpu_type=str(content.get("gpu_type") or ""),
            elsewhere=elsewhere,
            of=of,
            mode=str(content.get("mode", "fixed")),
            batch_size=int(content["batch_size"]),
            startup_s=float(content.get("startup_s", 15.0)),
            pause_s=float(content.get("pause_s", 0.5)),
            closing_s=float(content.get("closing_s", 1.0)),
            source="history",
            target=None if goal is None else TargetLength(float(goal), earlier=of),
        )
        made._noise_settled = belief.noise_known
        if belief.noise_known:
            # All earlier runs together count at most as one run, so that a change in the job is soon learnt.
            weight = min(float(content.get("noise_progress", 0.0)), of or 0.0)
            made.noise = MeanNoiseShare(
                weight, float(content["var"]), float(content.get("noise_deviation", 0.0))
            )
        return made


def _figures_of(belief: JobBelief) -> dict[str, Any]:
    """What history keeps of a belief on another GPU type than the last one."""
    assert belief.params is not None
    return {"params": belief.params.as_array().tolist(), "most_gpus": belief.most_gpus}


def _limits(reported: Any) -> BatchLimits | None:
    """Batch limits from a job's report; None if the report has none, or impossible ones."""
    try:
        return BatchLimits(**{str(name): int(value) for name, value in reported.items()})
    except (AttributeError, TypeError, ValueError, InputError):
        return None
