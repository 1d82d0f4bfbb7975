"""The trials of a sweep, kept by Optuna in a database beside the sweep's file.

Optuna chooses the hyper-parameters and the trials to give up. All its state is on disk: a sweep that is
killed goes on where it was, and Optuna's own tools can read the study.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from swell.domain import SwellError
from swell.sweep.spec import Choice, Parameter, Sweep, Value, grid

# Which trials go on, wait or are given up: successive halving (Jamieson and Talwalkar, AISTATS 2016).
#
# All trials train up to the first rung, `warmup` epochs, and wait there. When the last has arrived, the
# best third goes on to the next rung, three times as far; and so on, until one is left, which trains to its
# end. A trial that waits has saved its state and holds no slot.
#
# A pure function of what the trials have reported: a driver that is started again comes to the same
# decisions.


FACTOR = 3


class Verdict(Enum):
    """The next thing to do with a trial."""

    GO = "go"
    WAIT = "wait"
    GIVE_UP = "give up"


@dataclass(frozen=True, slots=True)
class TrialStanding:
    """How far a trial has come."""

    number: int
    curve: Mapping[int, float] = field(default_factory=dict)
    """The metric by epoch."""
    ended: bool = False
    failed: bool = False

    def at(self, rung: int) -> float | None:
        """The metric when the trial came to a rung; None if it is not there yet."""
        reached = [epoch for epoch in self.curve if epoch >= rung]
        return self.curve[min(reached)] if reached else None


def verdicts(
    trials: Sequence[TrialStanding], total: int, warmup: int, *, maximize: bool
) -> dict[int, Verdict]:
    """The next thing to do with each trial that has not ended; `total` is the number of trials in the end."""
    found = {trial.number: Verdict.GO for trial in trials if not trial.ended}
    group, rung = list(trials), warmup
    missing = total - len(trials)
    while len(group) + missing > 1:
        waiting = [trial for trial in group if trial.ended or trial.at(rung) is not None]
        if missing or len(waiting) < len(group):
            found |= {trial.number: Verdict.WAIT for trial in waiting if not trial.ended}
            break
        able = [trial for trial in group if not trial.failed and trial.curve]
        able.sort(key=lambda trial: _score(trial, rung, maximize), reverse=True)
        kept = able[: -(-len(group) // FACTOR)]
        dropped = [trial for trial in group if trial not in kept and not trial.ended]
        found |= {trial.number: Verdict.GIVE_UP for trial in dropped}
        group, rung = kept, rung * FACTOR
    return found


def _score(trial: TrialStanding, rung: int, maximize: bool) -> float:
    value = trial.at(rung)
    if value is None:  # it ended before this rung
        value = trial.curve[max(trial.curve)]
    return value if maximize else -value


JOB, KEY, SPACE = "swell:job", "swell:key", "swell:space"


@dataclass(frozen=True, slots=True)
class Trial:
    """One trial: its hyper-parameters and what came of it."""

    number: int
    parameters: dict[str, Value]
    state: str
    """running, complete, pruned or fail."""
    job_id: str | None
    value: float | None
    """The metric at the end; the last one reported, for a trial that was given up."""
    epochs: int

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


class Study:
    """Asks for trials, takes their reports, and remembers everything on disk."""

    def __init__(self, path: Path, sweep: Sweep, *, fresh: bool = False) -> None:
        """Open or make the study in the database `path`; with `fresh`, one that is there is an error."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        if fresh and path.exists():
            raise SwellError(f"{path} holds a sweep already: --resume goes on with it, or delete the file")
        self._optuna = optuna
        self._sweep = sweep
        self._read: list[Any] | None = None
        """The trials as they were read last; None after a change. To read them takes Optuna some time."""
        self._distributions = {
            name: _distribution(optuna, parameter) for name, parameter in sweep.parameters.items()
        }
        self._study = optuna.create_study(
            storage=f"sqlite:///{path.absolute()}",
            study_name=path.stem,
            direction=optuna.study.StudyDirection[sweep.direction.upper()],
            sampler=_sampler(optuna, sweep),
            pruner=_pruner(optuna, sweep),
            load_if_exists=True,
        )
        attributes = self._study.user_attrs
        if not attributes:
            self._study.set_user_attr(KEY, secrets.token_hex(8))
            self._study.set_user_attr(SPACE, _fingerprint(sweep))
            if sweep.sampler == "grid":
                for point in grid(sweep.parameters):
                    self._study.enqueue_trial(point)
        elif attributes.get(SPACE) != _fingerprint(sweep):
            raise SwellError(
                f"{path} holds a sweep with other parameters or another metric: "
                "choose another file with --study, or put the old values back"
            )
        self.key: str = self._study.user_attrs[KEY]
        """A text that no other study has."""

    def trials(self) -> list[Trial]:
        """All trials so far."""
        return [_view(t) for t in self._stored() if t.state.name != "WAITING"]

    def best(self) -> Trial | None:
        """The best of the complete trials."""
        done = [t for t in self.trials() if t.state == "complete" and t.value is not None]
        sign = 1.0 if self._sweep.direction == "minimize" else -1.0
        return min(done, key=lambda t: sign * float(t.value or 0.0), default=None)

    def curves(self) -> dict[int, dict[int, float]]:
        """By trial: the metric by epoch."""
        return {t.number: dict(sorted(t.intermediate_values.items())) for t in self._stored()}

    def ask(self) -> Trial:  # words: ok
        """A new trial; it is on disk before this returns."""
        trial, self._read = self._study.ask(self._distributions), None
        return _view(self._stored()[trial.number])

    def started(self, number: int, job_id: str) -> None:
        """Remember a trial's job."""
        self._live(number).set_user_attr(JOB, job_id)
        self._read = None

    def report(self, number: int, epoch: int, value: float) -> None:
        """Record a trial's metric after an epoch."""
        if math.isfinite(value) and epoch not in self._stored()[number].intermediate_values:
            self._live(number).report(value, epoch)
            self._read = None

    def verdicts(self) -> dict[int, Verdict]:
        """The next thing to do with each trial that has not ended."""
        running = [t.number for t in self._stored() if t.state.name == "RUNNING"]
        if self._sweep.pruner == "halving":
            standing = [
                TrialStanding(
                    t.number, t.intermediate_values, t.state.is_finished(), failed=t.state.name == "FAIL"
                )
                for t in self._stored()
                if t.state.name != "WAITING"
            ]
            maximize = self._sweep.direction == "maximize"
            return verdicts(standing, self._sweep.trials, self._sweep.warmup, maximize=maximize)
        return {
            number: Verdict.GIVE_UP if self._live(number).should_prune() else Verdict.GO for number in running
        }

    def tell(self, number: int, state: str, last: float | None = None) -> None:  # words: ok
        """End a trial: complete, pruned or fail. `last`: its last metric, if that is not the last epoch's."""
        frozen = self._stored()[number]
        if frozen.state.is_finished():
            return
        if last is None or not math.isfinite(last):
            last = frozen.intermediate_values.get(frozen.last_step) if frozen.intermediate_values else None
        if state == "complete" and last is None:
            state = "fail"  # it never reported the metric
        value = last if state == "complete" else None
        self._study.tell(number, value, state=self._optuna.trial.TrialState[state.upper()])
        self._read = None

    def _stored(self) -> list[Any]:
        if self._read is None:
            self._read = list(self._study.get_trials(deepcopy=False))
        return self._read

    def _live(self, number: int) -> Any:
        return self._optuna.trial.Trial(self._study, self._stored()[number]._trial_id)


def _view(trial: Any) -> Trial:
    steps = trial.intermediate_values
    value = trial.value if trial.value is not None else (steps[max(steps)] if steps else None)
    state = trial.state.name.lower()
    return Trial(
        trial.number, dict(trial.params), state, trial.user_attrs.get(JOB), value, max(steps, default=0)
    )


def _distribution(optuna: Any, parameter: Parameter) -> Any:
    kinds = optuna.distributions
    if isinstance(parameter, Choice):
        return kinds.CategoricalDistribution(parameter.values)
    if parameter.whole:
        step = int(parameter.step or 1)
        return kinds.IntDistribution(int(parameter.low), int(parameter.high), log=parameter.log, step=step)
    return kinds.FloatDistribution(parameter.low, parameter.high, log=parameter.log, step=parameter.step)


def _sampler(optuna: Any, sweep: Sweep) -> Any:
    if sweep.sampler == "tpe":
        # Trials that run count as if they had done badly: so several at a time do not try the same place.
        return optuna.samplers.TPESampler(seed=sweep.seed, constant_liar=True)
    return optuna.samplers.RandomSampler(seed=sweep.seed)


def _pruner(optuna: Any, sweep: Sweep) -> Any:
    if sweep.pruner == "median":
        return optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=sweep.warmup)
    return optuna.pruners.NopPruner()  # halving is ours: see `halving`


def _fingerprint(sweep: Sweep) -> str:
    space = {
        name: [*p.values] if isinstance(p, Choice) else [p.low, p.high, p.step, p.log]
        for name, p in sweep.parameters.items()
    }
    return json.dumps([space, sweep.metric, sweep.direction], sort_keys=True)
