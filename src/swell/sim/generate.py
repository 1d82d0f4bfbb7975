"""Synthetic workloads with the statistics of real clusters, for use without a trace.

Where the figures come from:

- sizes and GPU counts: the public Philly trace (Jeon et al., ATC'19), in the four classes by GPU-hours of
  Pollux (OSDI'21, section 5.1). For each class its share of the jobs, and the distributions of its GPU-hours
  and GPU counts, over the 82,247 jobs of the part that the Pollux authors published. Like them, we leave out
  the 0.2% of the jobs beyond 1,000 GPU-hours.
- arrivals: submissions of the same trace by hour of day (geometric mean over its days, so that one user's
  burst of a thousand jobs does not make an hour busy). Within an hour arrivals are Poisson.
- deadlines: ElasticFlow (ASPLOS'23, section 6.1): submission plus lambda times the run time on the GPUs asked
  for, lambda uniform between 0.5 and 1.5. Where lambda is below 1, only an elastic job can make it.
- models and batch sizes: drawn evenly among those that run on that many GPUs, as Philly names none.
- fills: uniform in the range that is asked for, as no public trace has them.

Each of these has its own random stream: a larger share of deadlines changes no size and no arrival.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from swell.domain import ANY_GPU, OTHERS, FloatArray, InputError, JobSpec
from swell.perf.profiles import ProfileSet
from swell.sim.traces import Menu, Models, known_gpu_type


@dataclass(frozen=True, slots=True)
class SizeClass:
    """Jobs of about one size."""

    share: float
    """The share of this class among all jobs."""
    gpu_hours: tuple[float, ...]
    """The class's GPU-hours at each of the `QUANTILES`."""
    gpus: tuple[float, ...]
    """The weight of each of the `GPU_COUNTS` in this class."""


QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
GPU_COUNTS = (1, 2, 4, 8, 16, 32)
SIZES = (
    SizeClass(
        0.7695,
        (0.0003, 0.0158, 0.0206, 0.158, 0.455, 0.704, 1.0),
        (0.9638, 0.0238, 0.0078, 0.0039, 0.0006, 0),
    ),
    SizeClass(
        0.1682, (1.0, 1.12, 1.39, 1.70, 3.12, 5.44, 10.0), (0.9542, 0.0021, 0.0204, 0.0197, 0.0019, 0.0009)
    ),
    SizeClass(
        0.0436, (10.0, 12.4, 15.5, 24.7, 44.0, 73.0, 100.0), (0.6456, 0.0517, 0.1771, 0.1124, 0.0073, 0.0048)
    ),
    SizeClass(
        0.0187,
        (100.0, 112.0, 144.0, 237.0, 442.0, 635.0, 1000.0),
        (0.1749, 0.0644, 0.2867, 0.4018, 0.0488, 0.0215),
    ),
)
"""Small, medium, large and very large: below 1, 10, 100 and 1,000 GPU-hours."""

ARRIVALS_BY_HOUR = (
    1.17, 0.95, 1.09, 1.02, 0.89, 1.15, 1.45, 1.55, 1.12, 1.07, 1.00, 0.84,
    0.77, 0.77, 0.71, 0.74, 0.86, 0.91, 0.95, 0.91, 0.93, 0.99, 1.06, 1.09,
)  # fmt: skip
"""Submissions in each hour of the day (of the trace's clock), relative to the mean."""

TIGHTNESS = (0.5, 1.5)
"""The range of lambda: a deadline is the submission plus lambda times the run time."""

BUSY_WINDOW_STARTS = 3.0
"""The default start of a workload: eight hours from here have the busiest hours in their middle."""


def generate_jobs(
    profiles: ProfileSet,
    *,
    jobs: int,
    hours: float,
    seed: int = 0,
    deadlines: float = 0.0,
    max_gpus: int = GPU_COUNTS[-1],
    max_gpu_hours: float = 1000.0,
    start_hour: float = BUSY_WINDOW_STARTS,
    gpu_type: str = ANY_GPU,
    gpus_per_node: int = 4,
    teams: Sequence[str] = (),
    users: Sequence[str] = (),
    fill: tuple[float, float] = (1.0, 1.0),
) -> list[JobSpec]:
    """Draw `jobs` jobs submitted within `hours`; a share `deadlines` of them gets a deadline.

    Each job is of one of the `teams` and of one of the `users`, at random, if there are any. `fill` is the
    range from which each job's fill is drawn: the part of a GPU's time that one of its workers uses alone.
    """
    _check("jobs", jobs, "at least 1", jobs >= 1)
    _check("hours", hours, "more than 0", 0 < hours < np.inf)
    _check("deadlines", deadlines, "a share between 0 and 1", 0 <= deadlines <= 1)
    _check("max-gpus", max_gpus, "at least 1", max_gpus >= 1)
    _check("max-gpu-hours", max_gpu_hours, "more than 0", max_gpu_hours > 0)
    _check("start-hour", start_hour, "an hour of the day, from 0 to 24", 0 <= start_hour <= 24)
    _check("seed", seed, "at least 0", seed >= 0)
    for bound in fill:
        _check("fill", bound, "more than 0 and at most 1", 0 < bound <= 1)
    _check("fill", fill[1], f"at least its lower bound {fill[0]:g}", fill[0] <= fill[1])

    def stream(which: int) -> np.random.Generator:
        return np.random.default_rng([seed, which])

    submit_s = np.round(arrivals(jobs, hours, start_hour, stream(0)), 1).tolist()
    gpu_hours, gpus = sizes(jobs, max_gpu_hours, stream(1))
    gpus = np.minimum(gpus, max_gpus)
    drawn = stream(2).random((jobs, 2)).tolist()
    has_deadline = stream(3).permutation(jobs) < round(deadlines * jobs)
    lambdas = stream(4).uniform(*TIGHTNESS, jobs)
    of_team = stream(5).integers(0, max(len(teams), 1), jobs).tolist()
    of_user = stream(6).integers(0, max(len(users), 1), jobs).tolist()
    fills = np.clip(np.round(stream(7).uniform(*fill, jobs), 3), *fill).tolist()
    menus = _menus(profiles, gpu_type, gpus_per_node, dict.fromkeys(gpus.astype(int).tolist()))
    specs = []
    for i in range(jobs):
        count = int(gpus[i])
        menu = menus[count]
        model, batches = menu[int(drawn[i][0] * len(menu))]
        batch_size, rate = batches[int(drawn[i][1] * len(batches))]
        duration_s = float(gpu_hours[i]) * 3600 / count
        # At least a tenth of a second, so that rounding cannot make it equal to the submission.
        deadline_s = round(submit_s[i] + max(lambdas[i] * duration_s, 0.1), 1)
        specs.append(
            JobSpec(
                job_id=f"{model}-{i}",
                submit_s=submit_s[i],
                model=model,
                batch_size=batch_size,
                gpus=count,
                work=float(max(round(duration_s * rate), 1)),
                deadline_s=deadline_s if has_deadline[i] else None,
                user=users[of_user[i]] if users else "",
                team=teams[of_team[i]] if teams else OTHERS,
                fill=fills[i],
            )
        )
    return specs


def arrivals(jobs: int, hours: float, start_hour: float, rng: np.random.Generator) -> FloatArray:
    """Moments of submission in ascending order, in seconds since the window's start."""
    edges = np.concatenate(
        [[0.0], np.arange(np.floor(start_hour) + 1, start_hour + hours) - start_hour, [hours]]
    )
    hour_of_day = np.floor(start_hour + edges[:-1] + 1e-9).astype(int) % 24
    mass = np.array(ARRIVALS_BY_HOUR)[hour_of_day] * np.diff(edges)
    reached = np.concatenate([[0.0], np.cumsum(mass)])
    moments: FloatArray = np.interp(np.sort(rng.random(jobs)) * reached[-1], reached, edges)
    return moments * 3600


def sizes(jobs: int, max_gpu_hours: float, rng: np.random.Generator) -> tuple[FloatArray, FloatArray]:
    """GPU-hours and GPU counts of `jobs` jobs, none of them larger than `max_gpu_hours`."""
    shares = np.array([size.share * (size.gpu_hours[0] < max_gpu_hours) for size in SIZES])
    shares[0] = SIZES[0].share
    which = rng.choice(len(SIZES), size=jobs, p=shares / shares.sum())
    at, count_at = rng.random((2, jobs))
    gpu_hours, gpus = np.zeros(jobs), np.zeros(jobs)
    for index, size in enumerate(SIZES):
        mine = which == index
        gpu_hours[mine] = np.exp(np.interp(at[mine], QUANTILES, np.log(size.gpu_hours)))
        reached = np.cumsum(size.gpus) / np.sum(size.gpus)
        gpus[mine] = np.array(GPU_COUNTS)[np.searchsorted(reached, count_at[mine], side="right")]
    return np.minimum(gpu_hours, max_gpu_hours), gpus


def _check(field: str, given: float, allowed: str, fine: bool) -> None:
    if not fine:
        raise InputError(f"{field} must be {allowed}, got {given:g}", field=field)


def _menus(profiles: ProfileSet, gpu_type: str, gpus_per_node: int, counts: Iterable[int]) -> dict[int, Menu]:
    """For each GPU count the models that run on so many GPUs of one type; raises if there is none."""
    if gpu_type == ANY_GPU:  # one type for all jobs, that of most profiles, so that one cluster can run them
        kinds = [kind for profile in profiles for kind in profile.gpu_types]
        gpu_type = max(profiles.gpu_types, key=kinds.count)
    models = Models(profiles, known_gpu_type(profiles, gpu_type), gpus_per_node)
    menus = {count: models.menu(count) for count in counts}
    if missing := [count for count, menu in menus.items() if not menu]:
        raise InputError(
            f"none of the profiles runs on {missing[0]} GPUs of type '{gpu_type}';"
            " give another --gpu-type or --profiles",
            field="profiles",
        )
    return menus
