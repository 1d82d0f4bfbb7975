"""The parts of `make bench-runtime`: what each measures, how long it takes and how long it may take.

The figures of a part with `alone` are times, so nothing else runs beside it. The other parts check what holds
at any speed, and three of them run at the same time; most of their time they wait.
"""

from __future__ import annotations

from typing import Any

from benchmarks.bench import Part
from benchmarks.runtime import (
    auto,
    coordinator,
    death,
    disaster,
    exactly_once,
    hosts,
    identity,
    links,
    mesh_size,
    overhead,
    quality,
    start,
    straggler,
    switch,
)
from benchmarks.runtime.anchors import ray_train, torchft, torchrun

MODELS = ("small", "large")


def _switch(quick: bool) -> Any:
    return {m: switch.measure(m, *((4, 30.0) if quick else (20, 150.0))) for m in MODELS}


def _death(quick: bool) -> Any:
    return {m: death.measure(m, 5 if quick else 50) for m in MODELS} | {"frozen": death.frozen()}


def _start(quick: bool) -> Any:
    rounds = {"cold": 5, "fork": 10, "spare": 10}
    return {kind: start.measure(kind, 3 if quick else count) for kind, count in rounds.items()}


def _overhead(quick: bool) -> Any:
    return {mode: overhead.measure(mode) for mode in ("fixed", "adaptive", "consistent")}


PARTS: dict[str, Part] = {
    "switch": Part(measure=_switch, expected_s=150),
    "death": Part(measure=_death, expected_s=150),
    "start": Part(measure=_start, expected_s=50),
    "overhead": Part(measure=_overhead, expected_s=50),
    "sizes": Part(measure=lambda quick: overhead.sizes(), expected_s=60),
    "links": Part(
        measure=lambda quick: links.steps(("0.4M", "10M") if quick else ("0.4M", "10M", "60M")),
        expected_s=150,
    ),
    "join_across_hosts": Part(measure=lambda quick: links.joins(), expected_s=130),
    "torchrun": Part(measure=lambda quick: torchrun.measure(1 if quick else 2), expected_s=60),
    "torchft": Part(measure=lambda quick: torchft.measure(1 if quick else 4), expected_s=60),
    "ray_train": Part(measure=lambda quick: ray_train.measure(), expected_s=60),
    "straggler": Part(measure=lambda quick: straggler.measure(), expected_s=55),
    "mesh": Part(
        measure=lambda quick: mesh_size.measure((2, 8, 32) if quick else (2, 4, 8, 16, 32, 64)), expected_s=20
    ),
    "exactly_once": Part(
        measure=lambda quick: exactly_once.measure(10 if quick else 200, 480.0), expected_s=480, alone=False
    ),
    "hosts": Part(measure=lambda quick: hosts.figures(quick=quick), expected_s=400, alone=False),
    "hosts_at_random": Part(
        measure=lambda quick: hosts.figures(schedules=3 if quick else 10), expected_s=200, alone=False
    ),
    "identity": Part(measure=lambda quick: identity.measure(), expected_s=60, alone=False),
    "coordinator": Part(
        measure=lambda quick: coordinator.measure(3 if quick else 10), expected_s=20, alone=False
    ),
    "disaster": Part(measure=lambda quick: disaster.run(quick=quick), expected_s=120, alone=False),
    "auto": Part(measure=lambda quick: auto.measure(2 if quick else 5, 60), expected_s=150, alone=False),
    "quality": Part(measure=lambda quick: quality.run(quick=quick), expected_s=240, alone=False),
}
"""In the order in which they begin."""
