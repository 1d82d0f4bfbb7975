"""How fast a job is taken to be before it has run: as fast as the jobs of its model that ran before it.

Jobs of one *kind* train the same model and, unless they adapt it, with the same batch size. For each kind the
curve is remembered of the job that was seen on the most GPUs, as it was when the job was first seen there:
later the gradient noise of a job grows, and its curve with it, so that a late curve would promise too much.

A new job of a known kind starts on the share that suits it, and need not be resized once its speed is known.
A new job of an unknown kind starts small.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from swell.domain import FloatArray, IntArray
from swell.perf.belief import JobBelief
from swell.policies._reservations import BoolArray
from swell.policies.snapshot import Snapshot

FIRST_SHARE = 2
"""The most GPUs that a job of an unknown kind is given before anything is known of its speed."""
EXPLORE = 8
"""A job may have this many times the most GPUs that jobs of its kind have been seen on."""
UNSEEN_SCALING = 0.8
"""How a job of an unknown kind is taken to scale before it has been seen."""
REMEMBERED = 200
"""So many kinds are remembered, the last ones seen first. On a live cluster every script is its own kind."""

Kind = tuple[str, int]


class Believed(NamedTuple):
    """What is believed of the speed of each job in a snapshot."""

    rates: FloatArray
    """Curves: those of the snapshot, and behind them those of jobs that have not been seen."""
    curve: IntArray
    """The row in `rates` of each job."""
    most: IntArray
    """The most GPUs that each job may have."""
    unseen: BoolArray
    """Jobs that nothing is known of, not even from other jobs of their kind."""


@dataclass
class SeenModels:
    """By kind: the most GPUs that a job of it was seen on, and the curve as it was then."""

    _seen: dict[Kind, tuple[int, FloatArray]] = field(default_factory=dict)

    def believed(self, snapshot: Snapshot) -> Believed:
        """The curves to decide with, after a look at what the running jobs have shown."""
        rates, beliefs = snapshot.curves.rates, snapshot.beliefs
        curve, most = snapshot.curve.copy(), snapshot.max_gpus.copy()
        unseen = np.zeros(len(curve), dtype=np.bool_)
        kinds = [None if belief is None else kind_of(snapshot, i, belief) for i, belief in enumerate(beliefs)]
        for i, (kind, belief) in enumerate(zip(kinds, beliefs, strict=True)):
            if kind is not None and belief is not None and belief.known:
                self._observe(kind, belief.most_gpus, rates[curve[i]])
        added = [np.arange(rates.shape[1]) ** UNSEEN_SCALING]
        for i, (kind, belief) in enumerate(zip(kinds, beliefs, strict=True)):
            if kind is None or belief is None:
                continue
            bound = min(int(most[i]), belief.limits.max_gpus)
            widest, shown = self._seen.get(kind, (0, None))
            if not belief.known and shown is not None and len(shown) == rates.shape[1]:
                curve[i], bound = len(rates) + len(added), min(bound, EXPLORE * widest)
                added.append(shown)
            elif not belief.known:
                curve[i], bound, unseen[i] = len(rates), min(bound, FIRST_SHARE), True
            elif belief.explores:
                bound = min(bound, max(EXPLORE * max(belief.most_gpus, widest), FIRST_SHARE))
            most[i] = max(bound, min(int(snapshot.min_gpus[i]), int(most[i])))
        return Believed(np.concatenate([rates, np.array(added)]), curve, most, unseen)

    def _observe(self, kind: Kind, gpus: int, curve: FloatArray) -> None:
        """Remember the curve of a running job if no job of its kind has been seen on as many GPUs."""
        if gpus > self._seen.get(kind, (0, None))[0]:
            self._seen.pop(kind, None)
            self._seen[kind] = gpus, curve.copy()
            if len(self._seen) > REMEMBERED:
                del self._seen[next(iter(self._seen))]


def kind_of(snapshot: Snapshot, index: int, belief: JobBelief | None) -> Kind:
    """The kind of a job: its model and, unless it adapts it, its batch size."""
    spec = snapshot.table.specs[snapshot.rows[index]]
    adapts = belief is not None and belief.fixed_batch is None
    return spec.model, 0 if adapts else spec.batch_size
