"""Strict deadline ratios on the ElasticFlow authors' traces: ours against what their simulator gives."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from swell.domain import Cluster
from swell.perf.profiles import ProfileSet
from swell.sim import simulate
from swell.sim.traces import load_trace

DATA = Path(os.environ.get("SWELL_DATA", Path(__file__).parents[3] / "shared" / "data")) / "elasticflow"

pytestmark = [
    pytest.mark.data,
    pytest.mark.skipif(not DATA.is_dir(), reason="needs the public traces: set SWELL_DATA"),
]

TRACES = {
    "elasticVpollux_e": ("16x4", "T4"),
    "195job": ("16x8", "A100"),
    "cluster10": ("32x8", "A100"),
    "philly_103959": ("32x8", "A100"),
}


def play(trace: str, policy: str, cluster: str = "", resize_cost_s: float = 5.0) -> dict[str, float]:
    full, gpu_type = TRACES[trace]
    profiles = ProfileSet.load(DATA / f"throughputs_{gpu_type}")
    jobs = load_trace(DATA / f"{trace}.csv", profiles).jobs
    nodes = Cluster.parse(cluster or full)
    return simulate(jobs, profiles, nodes, policy, resize_cost=resize_cost_s).record()


@pytest.mark.parametrize(
    ("trace", "at_least"),
    [
        ("elasticVpollux_e", 180 / 195),
        ("195job", 179 / 195),
        ("cluster10", 258 / 260),
        ("philly_103959", 0.93),
    ],
)
def test_elasticflow_meets_nearly_every_deadline_that_can_be_met(trace: str, at_least: float) -> None:
    record = play(trace, "elasticflow")
    assert record["deadline_ratio"] >= at_least
    assert record["promises_broken"] == 0


@pytest.mark.parametrize(
    ("trace", "cluster", "resize_cost_s"),
    [
        ("elasticVpollux_e", "4x4", 5.0),  # a newcomer took the place of a promise that could be kept
        ("elasticVpollux_e", "2x4", 30.0),
        ("195job", "4x8", 60.0),
        ("cluster10", "4x4", 60.0),
        ("philly_103959", "16x8", 60.0),  # a job was moved just before its end
        ("philly_103959", "4x8", 30.0),
    ],
)
def test_no_promise_is_broken_on_a_cluster_that_is_too_small(
    trace: str, cluster: str, resize_cost_s: float
) -> None:
    assert play(trace, "elasticflow", cluster, resize_cost_s)["promises_broken"] == 0


@pytest.mark.parametrize(
    ("trace", "authors"),
    [("elasticVpollux_e", 0.118), ("195job", 0.087), ("cluster10", 0.777), ("philly_103959", 0.436)],
)
def test_edf_does_as_it_does_in_the_authors_simulator(trace: str, authors: float) -> None:
    assert play(trace, "edf")["deadline_ratio"] == pytest.approx(authors, abs=0.02)


@pytest.mark.parametrize(
    ("trace", "authors"), [("elasticVpollux_e", 0.410), ("195job", 0.323), ("cluster10", 0.827)]
)
def test_edf_with_admission_does_about_as_in_the_authors_simulator(trace: str, authors: float) -> None:
    assert play(trace, "edf-admission")["deadline_ratio"] == pytest.approx(authors, abs=0.05)
