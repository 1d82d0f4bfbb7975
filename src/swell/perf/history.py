"""Priors from history: what earlier jobs of a model taught is where the next one starts.

A job with a prior need not creep up from one GPU. On a GPU type where the model never ran, computing is
projected by the ratio of other models known on both types, as Sia does with one-GPU runs.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from swell.domain import FloatArray
from swell.perf.throughput import ThroughputParams

_KEPT = 8
"""Jobs remembered for each model and GPU type: old ones may have run with another code or cluster."""


class History:
    """Fitted models of finished jobs, by model and GPU type."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], deque[FloatArray]] = {}

    def add(self, model: str, gpu_type: str, params: ThroughputParams) -> None:
        """Remember what was learned of a job."""
        self._seen.setdefault((model, gpu_type), deque(maxlen=_KEPT)).append(np.log(params.as_array()))

    def prior(self, model: str, gpu_type: str) -> ThroughputParams | None:
        """What to expect of the next job: the geometric mean of the last ones, None if nothing is known."""
        mean = self._mean(model, gpu_type)
        if mean is None:
            mean = self._projected(model, gpu_type)
        return None if mean is None else ThroughputParams(*np.exp(mean).tolist())

    def _mean(self, model: str, gpu_type: str) -> FloatArray | None:
        seen = self._seen.get((model, gpu_type))
        return None if not seen else np.mean(seen, axis=0)

    def _projected(self, model: str, gpu_type: str) -> FloatArray | None:
        for known_model, known_type in self._seen:
            if known_model != model:
                continue
            ratios = [
                there - here
                for other, kind in self._seen
                if kind == gpu_type
                and (there := self._mean(other, gpu_type)) is not None
                and (here := self._mean(other, known_type)) is not None
            ]
            mine = self._mean(model, known_type)
            if ratios and mine is not None:
                ratio = np.mean(ratios, axis=0)
                projected: FloatArray = mine + ratio
                # The slope per sample says best how the GPUs compare; overlap is the model's own.
                projected[0] = mine[0] + ratio[1]
                projected[6] = mine[6]
                return projected
        return None
