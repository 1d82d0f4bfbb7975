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


# Fitting the throughput model, compiled: the loss with its gradient, and a small bounded minimiser.
#
# The search works on the logarithms of the six times, so that milliseconds and seconds count alike. The
# minimiser is BFGS on the free variables with projection on the bounds (Bertsekas 1982). Seven dimensions do
# not need a limited-memory method, and one call costs a fraction of a general optimiser's bookkeeping.


_MAX_ITERATIONS = 200
_TOLERANCE = 1e-8
"""The search ends after three steps in a row that each lower the loss by less than this."""

_SMOOTHING = (1e-3, 1e-6, 1e-10)
"""Added to the squared errors under the square root, one value per round of the search. The root has a kink
where the fit is perfect; a large value first keeps the search from getting stuck at that kink too early."""


@compiled
def loss_and_gradient(
    x: FloatArray,
    nodes: FloatArray,
    gpus: FloatArray,
    local_batch: FloatArray,
    log_grad: FloatArray,
    log_step: FloatArray,
    smoothing: float,
    gradient: FloatArray,
) -> float:
    """RMSLE of both times plus the regularisers; `x` holds six log times and gamma; fills `gradient`."""
    a_c, b_c = math.exp(x[0]), math.exp(x[1])
    a_n, b_n = math.exp(x[2]), math.exp(x[3])
    a_r, b_r = math.exp(x[4]), math.exp(x[5])
    gamma = x[6]
    count = len(nodes)
    sum1 = sum2 = 0.0
    g1_a = g1_b = 0.0
    g2 = np.zeros(7)
    seen1 = 0
    for i in range(count):
        t_grad = a_c + b_c * local_batch[i]
        l_grad = math.log(t_grad)
        from_a, from_b = a_c / t_grad, b_c * local_batch[i] / t_grad
        if not math.isnan(log_grad[i]):
            r1 = l_grad - log_grad[i]
            sum1 += r1 * r1
            g1_a += r1 * from_a
            g1_b += r1 * from_b
            seen1 += 1
        if gpus[i] <= 1:
            r2 = l_grad - log_step[i]
            g2[0] += r2 * from_a
            g2[1] += r2 * from_b
        else:
            extra = max(gpus[i] - 2.0, 0.0)
            across = nodes[i] > 1
            a_s, b_s = (a_n, b_n) if across else (a_r, b_r)
            t_sync = a_s + b_s * extra
            l_sync = math.log(t_sync)
            # log of (T_grad^g + T_sync^g)^(1/g), without overflow; `share` is the gradient's part of it.
            gap = gamma * (l_grad - l_sync)
            if gap >= 0:
                small = math.exp(-gap)
                l_step = l_grad + math.log1p(small) / gamma
                share = 1.0 / (1.0 + small)
            else:
                small = math.exp(gap)
                l_step = l_sync + math.log1p(small) / gamma
                share = small / (1.0 + small)
            r2 = l_step - log_step[i]
            g2[0] += r2 * share * from_a
            g2[1] += r2 * share * from_b
            at = 2 if across else 4
            g2[at] += r2 * (1.0 - share) * a_s / t_sync
            g2[at + 1] += r2 * (1.0 - share) * b_s * extra / t_sync
            g2[6] += r2 * (share * l_grad + (1.0 - share) * l_sync - l_step) / gamma
        sum2 += r2 * r2
    err1 = math.sqrt(sum1 / max(seen1, 1) + smoothing)
    err2 = math.sqrt(sum2 / count + smoothing)
    for j in range(7):
        gradient[j] = g2[j] / (count * err2)
    if seen1 > 0:
        gradient[0] += g1_a / (seen1 * err1)
        gradient[1] += g1_b / (seen1 * err1)
    ratio_n, ratio_r = (b_n / a_n) ** 2, (b_r / a_r) ** 2
    gradient[2] -= 2e-2 * ratio_n
    gradient[3] += 2e-2 * ratio_n
    gradient[4] -= 2e-2 * ratio_r
    gradient[5] += 2e-2 * ratio_r
    gradient[6] += 2e-3 * (gamma - 1.0)
    return err1 + err2 + 1e-3 * (gamma - 1.0) ** 2 + 1e-2 * (ratio_n + ratio_r)


@compiled
def reset(matrix: FloatArray) -> None:
    """Make a matrix the identity."""
    for i in range(len(matrix)):
        for j in range(len(matrix)):
            matrix[i, j] = 1.0 if i == j else 0.0


@compiled
def minimise(
    x: FloatArray,
    lower: FloatArray,
    upper: FloatArray,
    nodes: FloatArray,
    gpus: FloatArray,
    local_batch: FloatArray,
    log_grad: FloatArray,
    log_step: FloatArray,
    smoothing: float,
) -> float:
    """Projected BFGS from `x`, which it changes in place; returns the loss there."""
    size = len(x)
    gradient, trial_gradient = np.empty(size), np.empty(size)
    inverse = np.empty((size, size))
    reset(inverse)
    free = np.ones(size, dtype=np.bool_)
    value = loss_and_gradient(x, nodes, gpus, local_batch, log_grad, log_step, smoothing, gradient)
    direction, trial = np.empty(size), np.empty(size)
    step, turn, hy = np.empty(size), np.empty(size), np.empty(size)
    fresh = True
    stalled = 0
    for _ in range(_MAX_ITERATIONS):
        changed = False
        slope = 0.0
        for i in range(size):
            bound = (x[i] <= lower[i] and gradient[i] >= 0) or (x[i] >= upper[i] and gradient[i] <= 0)
            if bound == free[i]:
                free[i] = not bound
                changed = True
            if free[i]:
                slope = max(slope, abs(gradient[i]))
        if slope < 1e-6:
            break
        if changed:
            reset(inverse)
            fresh = True
        downhill = 0.0
        longest = 0.0
        for i in range(size):
            direction[i] = 0.0
            if free[i]:
                for j in range(size):
                    if free[j]:
                        direction[i] -= inverse[i, j] * gradient[j]
            downhill += direction[i] * gradient[i]
            longest = max(longest, abs(direction[i]))
        if downhill >= 0:
            reset(inverse)
            fresh = True
            downhill = longest = 0.0
            for i in range(size):
                direction[i] = -gradient[i] if free[i] else 0.0
                downhill += direction[i] * gradient[i]
                longest = max(longest, abs(direction[i]))
        # A first step has no scale of its own; no step moves a time by more than a factor e^2.
        rate = min(1.0, 2.0 / longest)
        if fresh:
            rate = min(rate, 0.5 / longest)
        accepted = False
        for _ in range(30):
            moved = 0.0
            for i in range(size):
                trial[i] = min(max(x[i] + rate * direction[i], lower[i]), upper[i])
                moved += gradient[i] * (trial[i] - x[i])
            trial_value = loss_and_gradient(
                trial, nodes, gpus, local_batch, log_grad, log_step, smoothing, trial_gradient
            )
            if trial_value <= value + 1e-4 * moved:
                accepted = True
                break
            # Shrink the step to the minimum of the parabola through the known values and slope, but by no
            # less than half and no more than a factor of ten.
            bend = trial_value - value - moved
            cut = -0.5 * moved / bend if bend > 0 else 0.5
            rate *= min(max(cut, 0.1), 0.5)
        if not accepted:
            if fresh:
                break
            reset(inverse)
            fresh = True
            continue
        curvature = 0.0
        yy = 0.0
        for i in range(size):
            if free[i]:
                s, y = trial[i] - x[i], trial_gradient[i] - gradient[i]
                curvature += s * y
                yy += y * y
        if curvature > 1e-12:
            if fresh:
                for i in range(size):
                    inverse[i, i] = curvature / yy
            for i in range(size):
                step[i] = trial[i] - x[i] if free[i] else 0.0
                turn[i] = trial_gradient[i] - gradient[i] if free[i] else 0.0
            yhy = 0.0
            for i in range(size):
                hy[i] = 0.0
                for j in range(size):
                    hy[i] += inverse[i, j] * turn[j]
                yhy += turn[i] * hy[i]
            factor = (1.0 + yhy / curvature) / curvature
            for i in range(size):
                for j in range(size):
                    inverse[i, j] += factor * step[i] * step[j]
                    inverse[i, j] -= (hy[i] * step[j] + step[i] * hy[j]) / curvature
            fresh = False
        gained = value - trial_value
        for i in range(size):
            x[i], gradient[i] = trial[i], trial_gradient[i]
        value = trial_value
        stalled = stalled + 1 if gained < _TOLERANCE else 0
        if stalled >= 3:
            break
    return value


def fit(
    nodes: FloatArray,
    gpus: FloatArray,
    local_batch: FloatArray,
    grad_s: FloatArray,
    step_s: FloatArray,
    start: FloatArray,
    lower: FloatArray,
    upper: FloatArray,
) -> FloatArray:
    """The parameters of least loss between the bounds, from one start."""
    x, low, high = start.copy(), lower.copy(), upper.copy()
    for column in (x, low, high):
        column[:6] = np.log(column[:6])
    log_grad, log_step = np.log(grad_s), np.log(step_s)
    for smoothing in _SMOOTHING:
        minimise(x, low, high, nodes, gpus, local_batch, log_grad, log_step, smoothing)
    x[:6] = np.exp(x[:6])
    return x
