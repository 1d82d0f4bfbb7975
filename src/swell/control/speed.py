"""What is known of a job's speed on each GPU type: measured there, or carried over from another type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from swell.domain import FloatArray
from swell.perf.belief import PRIOR_ERROR, JobBelief
from swell.perf.goodput import BatchLimits
from swell.perf.gpu_types import Ratio, RatioLedger, carried_belief

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
