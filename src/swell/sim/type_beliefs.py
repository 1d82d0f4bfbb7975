"""What is believed of simulated jobs on each GPU type, for policies that learn speeds as jobs run.

A job has a belief on each type that it has run on. On the other types it has one that is carried over, by the
ratios between types that all jobs have shown so far (`perf.gpu_types`). Once the job runs there, its own
observations complete the carried model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from swell.domain import IntArray
from swell.perf.belief import JobBelief
from swell.perf.curves import Curves
from swell.perf.gpu_types import RatioLedger, carried_belief


class TypeBeliefs:
    """The beliefs about all jobs of a simulation on all types."""

    def __init__(self, width: Mapping[str, int], models: Sequence[str], exact: Curves, row: IntArray) -> None:
        """`width`: for each type the GPUs of its largest node; `row`: each job's row in `exact`."""
        self._width = dict(width)
        self._models = models
        self._exact, self._exact_row = exact, row
        self._beliefs: list[dict[str, JobBelief]] = [{} for _ in models]
        self._ran_on: list[list[str]] = [[] for _ in models]
        """The types that each job has run on, the latest last."""
        self._ledger = RatioLedger()
        self._versions: dict[tuple[int, str], tuple[JobBelief, int]] = {}
        """By job and type: the belief that its curve was computed from, and its version."""
        self._rates = {kind: exact.rates[row].copy() for kind in self._width}

    def add(self, row: int, make: Callable[[], JobBelief]) -> Mapping[str, JobBelief]:
        """Enter a job of which nothing is known; returns its beliefs by type, which change as it runs."""
        self._beliefs[row].update({kind: make() for kind in self._width})
        return self._beliefs[row]

    def on(self, row: int, kind: str) -> JobBelief:
        """The belief about a job that runs on a type from now on."""
        if self._ran_on[row][-1:] != [kind]:
            self._ran_on[row] = [known for known in self._ran_on[row] if known != kind] + [kind]
        return self._beliefs[row][kind]

    def curves(self, active: Sequence[int]) -> Curves:
        """The believed curves on each type; those of jobs that are not active may be out of date."""
        learned = self._learn(active)
        for row in active:
            if self._beliefs[row]:
                self._carry_over(row, learned)
                for kind, belief in self._beliefs[row].items():
                    self._compute(row, kind, belief)
        by_type = {kind: Curves(rates.copy()) for kind, rates in self._rates.items()}
        return Curves(next(iter(self._rates.values())).copy(), by_type)

    def _learn(self, active: Sequence[int]) -> bool:
        """Learn the ratios anew if a job's model has changed; returns whether they were."""
        learned = False
        for row in active:
            for kind in self._ran_on[row]:
                learned |= self._ledger.note(self._models[row], kind, self._beliefs[row][kind])
        if learned:
            self._ledger.learn()
        return learned

    def _carry_over(self, row: int, learned: bool) -> None:
        ran_on, beliefs = self._ran_on[row], self._beliefs[row]
        if not ran_on or beliefs[ran_on[-1]].params is None:
            return
        source = ran_on[-1]
        known = beliefs[source]
        if not learned and self._versions.get((row, source)) == (known, known.version):
            return
        for kind in self._width:
            if kind not in ran_on:
                beliefs[kind] = carried_belief(
                    known, self._ledger.ratios.between(self._models[row], source, kind)
                )

    def _compute(self, row: int, kind: str, belief: JobBelief) -> None:
        version = (belief, belief.version)
        if belief.known and self._versions.get((row, kind)) == version:
            return
        self._versions[row, kind] = version
        curve = belief.curve(self._exact.max_gpus, self._width[kind])
        if not belief.known:  # nothing is known but how the types compare
            curve = curve * self._ledger.relative_speed(kind)
        self._rates[kind][row] = curve

    def tell_exact(self, row: int) -> None:
        """Enter the true curves of a job whose speed cannot be learned."""
        for kind in self._width:
            self._rates[kind][row] = np.array(self._exact.on(kind).rates[self._exact_row[row]])
