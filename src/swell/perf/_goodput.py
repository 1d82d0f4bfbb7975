"""The compiled inner loops of goodput: times of all candidate plans, and the best one per GPU count."""

from __future__ import annotations

import math

import numpy as np

from swell.domain import FloatArray, IntArray
from swell.perf._compiled import compiled


@compiled
def times(params: FloatArray, gpus: IntArray, local_batch: IntArray, accumulation: IntArray) -> FloatArray:
    """Seconds per iteration of each candidate: row 0 on one node, row 1 on several."""
    out = np.empty((2, len(gpus)))
    gamma = params[6]
    for i in range(len(gpus)):
        grad_s = params[0] + params[1] * local_batch[i]
        before_s = accumulation[i] * grad_s
        if gpus[i] < 2:
            out[0, i] = out[1, i] = before_s + grad_s
            continue
        log_grad = math.log(grad_s)
        for across in range(2):
            at = 2 if across == 1 else 4
            log_sync = math.log(params[at] + params[at + 1] * (gpus[i] - 2))
            top = max(log_grad, log_sync)
            gap = abs(log_grad - log_sync)
            out[across, i] = before_s + math.exp(top + math.log1p(math.exp(-gamma * gap)) / gamma)
    return out


@compiled
def best(
    first: IntArray, inverse_scale: FloatArray, times_s: FloatArray, sqr: float, var: float
) -> tuple[FloatArray, IntArray]:
    """For each GPU count the candidate of highest goodput, on one node and on several."""
    counts = len(first) - 1
    goodput = np.zeros((2, counts))
    choice = np.full((2, counts), -1, dtype=np.int64)
    whole = var + sqr
    for across in range(2):
        for k in range(counts):
            # Goodput is whole / cost: the least cost wins, and one division at the end is enough.
            least, at = np.inf, -1
            for i in range(first[k], first[k + 1]):
                below = var * inverse_scale[i] + sqr
                cost = (below if below > 0 else whole) * times_s[across, i]
                if whole <= 0:
                    cost = times_s[across, i]
                if cost < least:
                    least, at = cost, i
            if at >= 0:
                goodput[across, k] = (whole if whole > 0 else 1.0) / least
                choice[across, k] = at
    return goodput, choice
