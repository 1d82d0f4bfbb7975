"""The parts of `make bench-cluster`: what each measures, and how long it takes.

Each part calls a benchmark that can also be run by itself (`python -m benchmarks.sweep`, for example), with
fewer seeds where the whole would take too long. The figures of parts with `alone` are times of real
processes. The other parts are simulations, or check what holds at any speed, so they may run side by side.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from benchmarks import (
    autoscaling,
    elasticdl_accuracy,
    elasticdl_service,
    elasticdl_two_jobs,
    gpu_sharing,
    gpu_types,
    reclaims,
    rented,
    sweep,
    teams,
)
from benchmarks.bench import Part
from benchmarks.runtime import straggler

SMALL_CLUSTER, SMALL_JOBS = "6x4:T4", 180
SLOW = "pollux:generations=30"
"""Searches for long, so its teams share a small cluster."""


def _two_jobs(quick: bool) -> Any:
    return {name: found for name, (found, _) in elasticdl_two_jobs.measure(15 if quick else 60).items()}


def _accuracy(quick: bool) -> Any:
    return elasticdl_accuracy.measure(*((2, 4) if quick else (5, 12)))


def _reclaims(quick: bool) -> Any:
    return reclaims.measure(reclaims=10, jobs=3, slots=6, promised=1) if quick else reclaims.measure()


def _sweep(quick: bool) -> Any:
    return sweep.measure(6 if quick else 24, 1)


def _sweep_killed(quick: bool) -> Any:
    with tempfile.TemporaryDirectory(prefix="swell-sweep-") as folder:
        return sweep.killed_and_resumed(4 if quick else 24, Path(folder))


def _autoscaling(quick: bool) -> Any:
    return {job: autoscaling.measure(job, 1 if quick else 5) for job in autoscaling.JOBS}


def _gpu_types(quick: bool) -> Any:
    ways, seeds = ("blind", "by type"), 1 if quick else 5
    policies = ("max-min",) if quick else gpu_types.POLICIES
    return {policy: gpu_types.measure(policy, seeds, ways=ways) for policy in policies}


def _teams(quick: bool) -> Any:
    jobs, seeds = (20, 1) if quick else (SMALL_JOBS, 16)
    small = teams.simulated([SLOW], SMALL_CLUSTER, jobs, seeds)
    if quick:
        return small
    others = [policy for policy in teams.POLICIES if policy != "pollux"]
    return small | teams.simulated(others, teams.CLUSTER, teams.JOBS, 10)


PARTS: dict[str, Part] = {
    "two_jobs": Part(measure=_two_jobs, expected_s=110),
    "service": Part(
        measure=lambda quick: elasticdl_service.measure(minutes=0.5 if quick else 2.0), expected_s=150
    ),
    "reclaims": Part(measure=_reclaims, expected_s=180),
    "sweep": Part(measure=_sweep, expected_s=220),
    "teams_live": Part(measure=lambda quick: teams.live(3 if quick else 10), expected_s=30),
    "rented": Part(measure=lambda quick: rented.measure(), expected_s=30),
    "straggler": Part(measure=lambda quick: straggler.measure(), expected_s=55),
    "gpu_sharing": Part(measure=lambda quick: gpu_sharing.measured(5.0 if quick else 20.0), expected_s=90),
    "accuracy": Part(measure=_accuracy, expected_s=270, alone=False),
    "sweep_killed": Part(measure=_sweep_killed, expected_s=120, alone=False),
    "autoscaling": Part(measure=_autoscaling, expected_s=200, alone=False),
    "gpu_types": Part(measure=_gpu_types, expected_s=100, alone=False),
    "teams": Part(measure=_teams, expected_s=300, alone=False),
}
"""In the order in which they begin."""
