"""Pollux's throughput model (OSDI'21, section 3.2): how long one step takes on a placement.

    T_grad = alpha_c + beta_c * local_batch
    T_sync = 0                                  one GPU
             alpha_r + beta_r * (gpus - 2)      several GPUs on one node
             alpha_n + beta_n * (gpus - 2)      several nodes
    T_step = (T_grad^gamma + T_sync^gamma)^(1/gamma)
    T_iter = accumulation * T_grad + T_step

`gamma` is how far computing and synchronising overlap: not at all at 1, almost completely at 10. The fit
minimises the root mean squared error of the logarithms of both times. What has not been observed yet follows
the paper's priors, which are optimistic, so that a scheduler explores.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from swell.domain import FloatArray

SMALLEST = 1e-8
"""Lower bound of every time in the model, in seconds; also the value of a time that nothing is known of."""

PRIOR_NODE_PENALTY = 1.1
"""Until a run on several nodes is observed, synchronising there is assumed this much slower than on one."""


@dataclass(frozen=True, slots=True)
class ThroughputParams:
    """The seven parameters of the model; times in seconds, `beta_c` in seconds per sample."""

    alpha_c: float
    beta_c: float
    alpha_n: float
    beta_n: float
    alpha_r: float
    beta_r: float
    gamma: float

    def as_array(self) -> FloatArray:
        """The parameters in the order of the fields."""
        return np.array(
            [
                self.alpha_c,
                self.beta_c,
                self.alpha_n,
                self.beta_n,
                self.alpha_r,
                self.beta_r,
                self.gamma,
            ]
        )


def step_times(
    params: ThroughputParams, nodes: npt.ArrayLike, gpus: npt.ArrayLike, local_batch: npt.ArrayLike
) -> tuple[FloatArray, FloatArray]:
    """Seconds to compute a gradient, and to compute and synchronise it; the inputs broadcast."""
    nodes, gpus, local_batch = np.broadcast_arrays(nodes, gpus, local_batch)
    grad_s: FloatArray = params.alpha_c + params.beta_c * local_batch.astype(np.float64)
    extra = np.maximum(gpus - 2, 0)
    sync_s = np.where(
        nodes > 1, params.alpha_n + params.beta_n * extra, params.alpha_r + params.beta_r * extra
    )
    sync_s = np.where(gpus > 1, sync_s, 0.0)
    # The larger time is factored out of the root, so that no power of a small time underflows.
    longer, shorter = np.maximum(grad_s, sync_s), np.minimum(grad_s, sync_s)
    step_s: FloatArray = longer * (1.0 + (shorter / longer) ** params.gamma) ** (1.0 / params.gamma)
    return grad_s, step_s


def iteration_s(
    params: ThroughputParams,
    nodes: npt.ArrayLike,
    gpus: npt.ArrayLike,
    local_batch: npt.ArrayLike,
    accumulation: npt.ArrayLike,
) -> FloatArray:
    """Seconds of one iteration: `accumulation` gradients computed locally, then one synchronised step."""
    grad_s, step_s = step_times(params, nodes, gpus, local_batch)
    return np.asarray(accumulation) * grad_s + step_s


def fit_throughput(
    nodes: npt.ArrayLike,
    gpus: npt.ArrayLike,
    local_batch: npt.ArrayLike,
    grad_s: npt.ArrayLike,
    step_s: npt.ArrayLike,
    prior: ThroughputParams | None = None,
) -> ThroughputParams:
    """The model that fits the observed times best.

    `grad_s` is the time of an accumulation step (no synchronising), NaN where it was not measured. A `prior`
    from similar jobs replaces the optimistic assumptions about what these observations do not cover.
    """
    from swell.perf._kernels import fit

    columns = [
        np.atleast_1d(np.asarray(c, dtype=np.float64)) for c in (nodes, gpus, local_batch, grad_s, step_s)
    ]
    n, k, m, grad, step = (np.ascontiguousarray(c) for c in np.broadcast_arrays(*columns))
    if not (np.all(step > 0) and np.all((grad > 0) | np.isnan(grad)) and len(step)):
        raise ValueError("a fit needs at least one observation, and all times must be positive")

    start = np.array([0.1, 0.01] * 3 + [1.001])
    lower = np.array([SMALLEST] * 6 + [1.0])
    upper = np.array([np.inf] * 6 + [10.0])

    def pin(index: int, value: float) -> None:
        start[index] = lower[index] = upper[index] = value

    across, inside, many = n > 1, (n == 1) & (k > 1), k > 2
    if np.all(m == m[0]):
        # One batch size cannot separate constant from slope: split the time as the prior does, or in half.
        constant = 0.5 if prior is None else prior.alpha_c / (prior.alpha_c + prior.beta_c * m[0])
        seen = grad[~np.isnan(grad)]
        pin(0, max(float(np.mean(seen if len(seen) else step)) * constant, SMALLEST))
    if not np.any(across):
        pin(2, SMALLEST)
        pin(3, SMALLEST)
    if not np.any(inside):
        pin(4, SMALLEST)
        pin(5, SMALLEST)
    if not np.any(many):
        pin(3, SMALLEST)
        pin(5, SMALLEST)
    found = ThroughputParams(*(float(v) for v in fit(n, k, m, grad, step, start, lower, upper)))

    if prior is not None:
        return _complete(
            found, prior, across=bool(across.any()), inside=bool(inside.any()), many=bool(many.any())
        )
    if not np.any(across):
        found = replace(
            found,
            alpha_n=max(found.alpha_n, PRIOR_NODE_PENALTY * found.alpha_r),
            beta_n=max(found.beta_n, PRIOR_NODE_PENALTY * found.beta_r),
        )
    return found


def _complete(
    found: ThroughputParams, prior: ThroughputParams, *, across: bool, inside: bool, many: bool
) -> ThroughputParams:
    """The fitted parameters, with those that no observation covers taken from the prior."""
    return replace(
        found,
        alpha_n=found.alpha_n if across else prior.alpha_n,
        beta_n=found.beta_n if across and many else prior.beta_n,
        alpha_r=found.alpha_r if inside else prior.alpha_r,
        beta_r=found.beta_r if inside and many else prior.beta_r,
        gamma=found.gamma if across or inside else prior.gamma,
    )
