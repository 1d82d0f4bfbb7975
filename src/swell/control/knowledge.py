"""What is known of a job's speed, gradient noise and length: from its own reports, and before there are any
from the history of its kind (`book.fingerprints`).

Progress, lengths and curves have one unit: iterations at the batch size the job was tuned for. A job that
keeps its batch makes one per step. An *adaptive* job, whose batch follows goodput, makes as many per step as
its gradient noise allows, and its curve is its goodput (see `swell.perf.goodput`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from swell.domain import FloatArray, InputError
from swell.perf.belief import PRIOR_ERROR, JobBelief
from swell.perf.efficiency import SETTLED_UPDATES, MeanNoiseShare, duration_error, gain_at, noise_share
from swell.perf.goodput import BatchLimits
from swell.perf.gpu_types import Ratio, RatioLedger, carried_belief
from swell.perf.length import TargetLength

# What is known of a job's speed on each GPU type: measured there, or carried over from another type.


_CurveFor = tuple[JobBelief, int, int, int, bool]
"""What a curve was computed for: belief, its version, GPUs, GPUs per node, and whether it was measured."""


RETRY_S = 3600.0
"""A number of workers that a belief keeps a job from is tried again after this long."""
TRIAL_S = 60.0
"""How long a trial may take: to get the workers, and then to measure them."""
_LOOK_S = 10.0
"""The least time between two questions whether to try something."""
_HOPE = 1.02
"""A number of workers that is tried counts as so many times as fast as the best of the smaller ones, so that
policies give it slots that nobody else has a better use for."""


@dataclass(slots=True)
class Trials:
    """Which numbers of workers were measured, and the one that is tried although it is believed no faster.

    A model says what speed to expect of numbers that no job of the kind has had, and a measurement may have
    been disturbed. If either says that more workers are no faster, no policy gives them, and nobody would
    find out that it is wrong. So such a number is tried if it was never measured, or not for `RETRY_S`.
    """

    measured: dict[int, float] = field(default_factory=dict)
    """By workers: when a job of the kind was last measured in steady steps with them."""
    workers: int = 0
    """The number that is tried now; 0 if none is."""
    _began_s: float = 0.0
    _until_s: float = 0.0
    _granted: bool = False
    _look_s: float = float("-inf")
    """When to ask again whether something is to be tried."""

    def under_way(self, held: int, now_s: float) -> bool:
        """Whether a trial goes on, for a job that has `held` workers; one that is over is ended."""
        if not self.workers:
            return False
        if held == self.workers and not self._granted:
            self._granted, self._until_s = True, now_s + TRIAL_S
        if now_s < self._until_s and self.measured.get(self.workers, float("-inf")) < self._began_s:
            return True
        self.workers, self._look_s = 0, now_s + RETRY_S / 4
        return False

    def due(self, now_s: float) -> bool:
        """Whether to ask now if something is to be tried."""
        if now_s < self._look_s:
            return False
        self._look_s = now_s + _LOOK_S
        return True

    def begin(self, rates: FloatArray, held: int, most: int, now_s: float) -> bool:
        """Begin a trial if one is due. `rates` are believed; the job has `held` workers of at most `most`."""
        if held not in self.measured or most <= held or int(np.argmax(rates[: most + 1])) > held:
            return False  # nothing to compare with, nothing to try, or it is believed to gain from more
        if now_s - self.measured.get(most, float("-inf")) < RETRY_S:
            return False
        self.workers, self._granted = most, False
        self._began_s, self._until_s = now_s, now_s + TRIAL_S
        return True

    def hopeful(self, rates: FloatArray) -> FloatArray:
        """The curve that a policy is shown, with some hope in the number that is tried."""
        if not 0 < self.workers < len(rates):
            return rates
        shown, best = rates.copy(), int(np.argmax(rates[: self.workers]))
        steps = np.linspace(rates[best], _HOPE * rates[best], self.workers - best + 1)
        shown[best : self.workers + 1] = np.maximum(shown[best : self.workers + 1], steps)
        return shown


@dataclass(slots=True)
class Speed:
    """The beliefs about one job's speed, a belief for each GPU type."""

    kind: str = ""
    """The fingerprint of the job's kind. Ratios between GPU types are learned for each kind."""
    belief: JobBelief | None = None
    """The belief on `gpu_type`; None if no job of the kind has reported a step yet."""
    gpu_type: str = ""
    """The GPU type that the job's reports are about; empty if that is not known."""
    only_carried: bool = False
    """Whether `belief` was carried over from another type, and the job has reported nothing on this one."""
    elsewhere: dict[str, JobBelief] = field(default_factory=dict)
    """The beliefs on other GPU types that the job, or an earlier one of its kind, has run on."""
    ledger: RatioLedger = field(default_factory=RatioLedger)
    """How GPU types compare, as all jobs have shown."""
    trials: Trials = field(default_factory=Trials)
    """The numbers of workers that were tried, on `gpu_type`."""
    _curves: dict[tuple[str, bool], tuple[_CurveFor, FloatArray]] = field(default_factory=dict)
    """By GPU type and `cautious`: the last curve computed, and what it was computed for."""
    _carried: dict[str, tuple[tuple[JobBelief, int, Ratio], JobBelief]] = field(default_factory=dict)
    """By GPU type that the job has not run on: the belief carried over, and what from."""

    @property
    def known(self) -> bool:
        """Whether there is a model of the speed; at first a belief holds no more than the batch limits."""
        return self.belief is not None and self.belief.known

    # -- reports -----------------------------------------------------------------------------------------

    def set_limits(self, limits: BatchLimits, fixed_batch: int | None) -> bool:
        """Plan with these batches from now on; True if that changed a known speed."""
        if self.belief is None:
            self.belief = JobBelief(limits, fixed_batch)
        before = self.belief.version
        self.belief.set_limits(limits, fixed_batch)
        return self.belief.known and self.belief.version != before

    def observe(self, nodes: int, workers: int, local_batch: int, step_s: float, sync_s: float) -> bool:
        """Add a measured step to the model; True if that changed it."""
        assert self.belief is not None
        before = self.belief.version
        self.belief.observe(nodes, workers, local_batch, step_s, sync_s)
        self.only_carried = False
        return self.belief.version != before

    def runs_on(self, gpu_type: str) -> bool:
        """The job's reports are about this GPU type from now on; True if they were about another before."""
        changed, before = self.gpu_type not in ("", gpu_type), self.belief
        if changed:
            self.belief, carried = self.on(gpu_type), gpu_type not in self.elsewhere
            if before is not None and before.known and not self.only_carried:
                self.elsewhere[self.gpu_type] = before
            self.trials = Trials()
            self.only_carried = carried and before is not None and before.known
            self.elsewhere.pop(gpu_type, None)
        self.gpu_type = gpu_type
        return changed

    # -- answers -----------------------------------------------------------------------------------------

    def measured_on(self, gpu_type: str) -> bool:
        """Whether the job, or an earlier one of its kind, has shown its speed on a GPU type."""
        if self.gpu_type not in ("", gpu_type):
            return gpu_type in self.elsewhere
        return self.known and not self.only_carried

    def on(self, gpu_type: str) -> JobBelief | None:
        """The belief on a GPU type: measured there, or carried over by the ratio between the types."""
        known = self.belief
        if known is None or self.gpu_type in ("", gpu_type):
            return known
        made = self.elsewhere.get(gpu_type)
        if made is None:
            if not known.known:
                return known
            ratio = self.ledger.ratios.between(self.kind, self.gpu_type, gpu_type)
            source, before = (known, known.version, ratio), self._carried.get(gpu_type)
            if before is None or before[0] != source:
                before = self._carried[gpu_type] = (source, carried_belief(known, ratio))
            made = before[1]
        # Batch limits and gradient noise do not depend on the GPU.
        made.set_limits(known.limits, known.fixed_batch)
        if known.noise_known:
            made.observe_gradients(known.sqr, known.var)
        return made

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
        belief, measured = self.on(gpu_type), self.measured_on(gpu_type)
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

    def most_workers(self, bound: int) -> int:
        """The exploration bound: twice the most workers ever seen, unless history knows better."""
        if self.belief is None or not self.belief.known:
            return 1
        return max(self.belief.max_gpus(bound), 1)

    # -- history -----------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """What history keeps of the speed (docs/how/history.md)."""
        own = {"params": None, "most_gpus": 0} if self.belief is None else _figures_of(self.belief)
        types = {kind: _figures_of(belief) for kind, belief in self.elsewhere.items() if belief.known}
        tried = {str(workers): round(time_s, 3) for workers, time_s in self.trials.measured.items()}
        return {"gpu_type": self.gpu_type, "types": types, "tried": tried} | own

    @classmethod
    def from_history(cls, content: Mapping[str, Any]) -> Speed:
        """The speed that an earlier job of the kind taught."""
        types = dict(content.get("types") or {})
        return cls(
            belief=_belief_of(content),
            gpu_type=str(content.get("gpu_type") or ""),
            trials=Trials({int(k): float(at_s) for k, at_s in dict(content.get("tried") or {}).items()}),
            elsewhere={
                str(name): _belief_of({**content, "most_gpus": 0, **own}) for name, own in types.items()
            },
        )


def _figures_of(belief: JobBelief) -> dict[str, Any]:
    """What history keeps of the belief on one GPU type."""
    params = belief.params
    return {"params": None if params is None else params.as_array().tolist(), "most_gpus": belief.most_gpus}


def _belief_of(figures: Mapping[str, Any]) -> JobBelief:
    """The belief that was kept as `figures`."""
    belief = JobBelief.from_figures(figures)
    belief.most_gpus = int(figures.get("most_gpus", 0))
    return belief


HISTORY_VERSION = 2
"""Version of what `Knowledge.to_json` writes. An entry without a version has version 1."""
ENOUGH_STEPS = 3
"""Step times of one configuration are used once this many timing reports have arrived."""
_STEADY = ((10, 2.0), (3, 10.0), (1, 15.0))
"""Steps are steady once a mean covers so many, for so many seconds: the first ones of a configuration are
slower than those that follow."""
_SETTLED = 0.1
"""And once the mean has changed by no more than this share since the report before."""
UNKNOWN_WORK = 1e9
"""Iterations assumed for a job that has not reported its length: so many that no plan waits for its end."""
MOST_CLOSING_S = 60.0
"""Upper bound of `closing_s`: a script that goes on longer after its last step does other work."""


class ProgressPoint(NamedTuple):
    time_s: float
    done: float


@dataclass(slots=True)
class Length:
    """How many iterations a job consists of, and how many it has reported to be done."""

    of: float | None = None
    """Iterations that the job consists of; a prediction if the job trains until a target loss."""
    target: TargetLength | None = None
    """Set for a job that trains until its loss is low enough."""
    latest: ProgressPoint | None = None
    """The last progress report."""
    advanced_s: float | None = None
    """When a report last showed more progress than the one before it."""

    @property
    def is_predicted(self) -> bool:
        """Whether `of` is predicted from losses: good enough for estimates, not for guarantees."""
        return self.target is not None

    def progressed(self, time_s: float, done: float, data: Mapping[str, Any] | None = None) -> bool:
        """Take in a progress report; True if the length changed.

        `data` is the whole report: it may hold a length (`of`), or a target loss and the present loss.
        """
        if self.latest is None or done > self.latest.done:
            self.advanced_s = time_s
        self.latest = ProgressPoint(time_s, done)
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

    def reached(self) -> None:
        """The job has finished: a job with a target is as long as its last report says."""
        if self.target is not None and self.latest is not None:
            self.of = self.target.earlier = self.latest.done

    def left(self, done: float) -> float:
        """Progress still to be made, in the unit of the curve; `UNKNOWN_WORK` if the length is unknown."""
        return UNKNOWN_WORK if self.of is None else max(self.of - done, 0.0)

    @property
    def error(self) -> float:
        """Relative standard deviation of the progress still to be made."""
        if self.target is None:
            return 0.0
        left = self.left(0.0 if self.latest is None else self.latest.done)
        return min(self.target.deviation / left, 1.0) if left else 0.0


@dataclass(slots=True)
class GradientNoise:
    """The noise in an adaptive job's gradients, over this run and earlier ones of its kind."""

    mean: MeanNoiseShare = field(default_factory=MeanNoiseShare)
    settled: bool = False
    """Whether the last figures were averaged over enough steps to be relied on."""
    _since: float | None = None
    """Progress at the last report of settled figures."""

    def take(self, sqr: float, var: float, updates: int | None, latest: ProgressPoint | None) -> bool:
        """Take in a mean over `updates` steps; False if what is known is better.

        Settled figures, from history or from before a restart, are better than a mean over few steps.
        `latest` says how far the job is.
        """
        settled = updates is None or updates >= SETTLED_UPDATES
        if self.settled and not settled:
            return False
        self.settled = settled
        if settled and latest is not None:
            if self._since is not None:
                self.mean.add(noise_share(sqr, var), latest.done - self._since)
            self._since = latest.done
        return True


@dataclass(slots=True)
class Timings:
    """The timing reports of a job on its present GPU type."""

    seen: dict[tuple[int, int, int], int] = field(default_factory=dict)
    """By nodes, workers and local batch: how many reports have arrived."""
    ran: dict[int, tuple[float, float]] = field(default_factory=dict)
    """By number of workers: the progress made with them, and the seconds that took."""
    last: tuple[int, int, int, float, float] | None = None
    """Nodes, workers, local batch, step and sync seconds of the last report."""
    steady_with: set[int] = field(default_factory=set)
    """The numbers of workers that steady steps were reported with."""
    _stretch_from: tuple[ProgressPoint, int] | None = None
    """How far the job was at the last report, and with how many workers."""

    def add(
        self, nodes: int, workers: int, local_batch: int, step_s: float, sync_s: float, steps: int | None
    ) -> bool:
        """Take in a report; True if its steps are steady, and some came before it.

        `steps`: how many steps the times are means of; None for a job that does not say.
        """
        key, before = (nodes, workers, local_batch), self.last
        self.seen[key] = self.seen.get(key, 0) + 1
        self.last = (*key, step_s, sync_s)
        settled = before is not None and before[:3] == key and abs(step_s - before[3]) <= _SETTLED * before[3]
        covers = steps is None or any(steps >= least and steps * step_s >= s for least, s in _STEADY)
        if self.seen[key] < ENOUGH_STEPS or not settled or not covers:
            return False
        self.steady_with.add(workers)
        return True

    def count_stretch(self, workers: int, latest: ProgressPoint | None) -> None:
        """Add the time since the last report to `ran`, if the number of workers is the same."""
        if latest is None:
            return
        before, with_workers = self._stretch_from or (latest, workers)
        if with_workers == workers and latest.done >= before.done and latest.time_s > before.time_s:
            made, seconds = self.ran.get(workers, (0.0, 0.0))
            self.ran[workers] = (made + latest.done - before.done, seconds + latest.time_s - before.time_s)
        self._stretch_from = (latest, workers)

    @property
    def rates(self) -> dict[int, float]:
        """By number of workers: the progress per second that was measured."""
        return {workers: made / s for workers, (made, s) in sorted(self.ran.items()) if made > 0}


@dataclass(slots=True)
class Knowledge:
    """What is known of one job."""

    fingerprint: str
    speed: Speed = field(default_factory=Speed)
    length: Length = field(default_factory=Length)
    noise: GradientNoise = field(default_factory=GradientNoise)
    timings: Timings = field(default_factory=Timings)
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
    source: str = "none"
    """Where the knowledge comes from: 'model' (the job's own reports), 'history', 'kin' or 'none'."""
    kin_mark: str = ""
    """The fingerprint of the job's kin; empty if nothing is kept for them."""
    kin: Knowledge | None = None
    """What a job with the same script and other arguments taught, if no earlier run of this kind did."""

    def __post_init__(self) -> None:
        self.speed.kind = self.fingerprint

    @property
    def known(self) -> bool:
        """Whether speed and length are known, and for an adaptive job its gradient noise too."""
        if self.length.of is None or not self.speed.known:
            return False
        return self.mode != "adaptive" or (self.speed.belief is not None and self.speed.belief.noise_known)

    # -- reports -----------------------------------------------------------------------------------------

    def take(self, kind: str, time_s: float, data: Mapping[str, Any]) -> bool:
        """Take in a report of the job; True if that changed the believed speed or length."""
        if kind == "progress":
            return self.length.progressed(time_s, float(data["done"]), data)
        if kind == "timing":
            return self._timing(time_s, data)
        if kind == "noise":
            return self._gradients(float(data["sqr"]), float(data["var"]), data.get("updates"))
        return False

    def runs_on(self, gpu_type: str) -> None:
        """The job's reports are about this GPU type from now on."""
        if self.speed.runs_on(gpu_type):
            self.timings = Timings()

    def _timing(self, time_s: float, data: Mapping[str, Any]) -> bool:
        """Take in a timing report; True if the belief changed."""
        workers, local_batch = int(data["workers"]), max(int(data["local_batch"]), 1)
        self.timings.count_stretch(workers, self.length.latest)
        gradients = int(data.get("accumulation", 0)) + 1
        batch = self.batch_size or workers * local_batch * gradients
        limits = _limits(data.get("limits")) or BatchLimits(batch, batch, 1, batch)
        self.mode, self.batch_size = str(data.get("mode", self.mode)), limits.init_batch
        switched = self.speed.set_limits(limits, None if self.mode == "adaptive" else limits.init_batch)
        # The model's step is one gradient and its exchange, so accumulated gradients are averaged into one.
        sync_s = float(data["sync_s"])
        step_s = (float(data["step_s"]) - sync_s) / gradients + sync_s
        steps = None if data.get("steps") is None else int(data["steps"])
        enough = self.timings.add(int(data.get("nodes", 1)), workers, local_batch, step_s, sync_s, steps)
        if enough:
            self.speed.trials.measured[workers] = time_s
        return (enough and self._believe()) or switched

    def _believe(self) -> bool:
        """Add the last step times to the model; True if that changed it."""
        assert self.timings.last is not None
        changed = self.speed.observe(*self.timings.last)
        if changed:
            self.source = "model"
        return changed

    def _gradients(self, sqr: float, var: float, updates: int | None) -> bool:
        """Take in gradient statistics at the tuned batch, a mean over `updates` steps; True for the first."""
        belief = self.speed.belief
        if belief is None or not self.noise.take(sqr, var, updates, self.length.latest):
            return False
        first = not belief.noise_known
        belief.observe_gradients(sqr, var)
        return first

    def finished(self, time_s: float) -> None:
        """The job has finished: set how long it took to end, and the length of a job with a target."""
        if self.length.advanced_s is not None:
            self.closing_s = min(max(time_s - self.length.advanced_s, 0.0), MOST_CLOSING_S)
        self.length.reached()

    # -- answers -----------------------------------------------------------------------------------------

    def basis(self, done: float) -> Knowledge | None:
        """What an estimate can be made from, at that progress: this, or as far as needed the job's kin."""
        if self.known:
            return self
        kin = self.kin
        if kin is None or not kin.known or (kin.length.of is not None and done >= kin.length.of):
            return None
        if not self.speed.known or self.mode == "adaptive":
            return kin
        return replace(self, length=replace(self.length, of=kin.length.of), source="kin")

    def error(self, gpus: int) -> float:
        """Relative standard deviation of the predicted duration, from those of speed, noise and length."""
        belief = self.speed.belief
        if belief is None or not belief.known:
            return 1.0
        gpus = max(gpus, 1)
        speed, noise = float(belief.relative_error(1, gpus)), 0.0
        if self.mode == "adaptive":
            scale = belief.plan(1, gpus).total(gpus) / belief.limits.init_batch
            noise = duration_error(noise_share(belief.sqr, belief.var), self.noise.mean.deviation, scale)
        return math.hypot(speed, noise, self.length.error)

    def noise_figures(self, batch_size: int | None) -> dict[str, float]:
        """Gradient noise scale and statistical efficiency of an adaptive job at its present batch."""
        belief = self.speed.belief
        if belief is None or self.mode != "adaptive" or not belief.noise_known or belief.sqr <= 0:
            return {}
        tuned = belief.limits.init_batch
        scale = (batch_size or tuned) / tuned
        gain = float(gain_at(belief.sqr, belief.var, scale))
        return {"noise_scale": belief.var / belief.sqr * tuned, "efficiency": gain / scale}

    # -- history and replay ------------------------------------------------------------------------------

    def figures(self) -> dict[str, Any]:
        """What a replay needs to know of the job: its model, and its measured speed."""
        params = None if self.speed.belief is None else self.speed.belief.params
        return {
            "params": None if params is None else params.as_array().tolist(),
            "rates": {str(workers): rate for workers, rate in self.timings.rates.items()},
        } | self._common_figures()

    def to_json(self) -> dict[str, Any]:
        """What the next job of this kind should start with (docs/how/history.md)."""
        length, target = self.length, self.length.target
        return {
            "version": HISTORY_VERSION,
            # Of a job with a target only a length that was really reached is kept, not a prediction.
            "of": length.of if target is None else target.earlier,
            "target_loss": None if target is None else target.target,
            "closing_s": self.closing_s,
            "noise_progress": self.noise.mean.weight,
            "noise_deviation": self.noise.mean.deviation,
        } | (self.speed.to_json() | self._common_figures())

    def _common_figures(self) -> dict[str, Any]:
        """Batches and times; for an adaptive job also its mean noise, as `sqr` and `var` that add up to 1."""
        belief, mean = self.speed.belief, self.noise.mean
        out: dict[str, Any] = {
            "batch_size": self.batch_size,
            "startup_s": self.startup_s,
            "pause_s": self.pause_s,
            "mode": self.mode,
            "limits": None if belief is None else belief.limits.as_dict(),
        }
        if belief is not None and self.mode == "adaptive" and belief.noise_known:
            share = mean.mean if mean.weight else noise_share(belief.sqr, belief.var)
            out |= {"sqr": 1.0 - share, "var": share}
        return out

    @classmethod
    def from_history(cls, mark: str, content: Mapping[str, Any] | None) -> Knowledge:
        """Start with what an earlier job of the kind taught, if there was one."""
        if not content or content.get("params") is None or content.get("batch_size") is None:
            return cls(mark)
        if int(content.get("version", 1)) > HISTORY_VERSION:
            return cls(mark)  # written by a newer swell: start from nothing rather than misread it
        speed, noise = Speed.from_history(content), GradientNoise()
        of, goal = content.get("of"), content.get("target_loss")
        if speed.belief is not None and speed.belief.noise_known:
            # All earlier runs together count at most as one run, so that a change in the job is soon learnt.
            weight = min(float(content.get("noise_progress", 0.0)), of or 0.0)
            deviation = float(content.get("noise_deviation", 0.0))
            noise = GradientNoise(MeanNoiseShare(weight, float(content["var"]), deviation), settled=True)
        return cls(
            mark,
            speed=speed,
            length=Length(of, None if goal is None else TargetLength(float(goal), earlier=of)),
            noise=noise,
            mode=str(content.get("mode", "fixed")),
            batch_size=int(content["batch_size"]),
            startup_s=float(content.get("startup_s", 15.0)),
            pause_s=float(content.get("pause_s", 0.5)),
            closing_s=float(content.get("closing_s", 1.0)),
            source="history",
        )


def _limits(reported: Any) -> BatchLimits | None:
    """Batch limits from a job's report; None if the report has none, or impossible ones."""
    try:
        return BatchLimits(**{str(name): int(value) for name, value in reported.items()})
    except (AttributeError, TypeError, ValueError, InputError):
        return None
