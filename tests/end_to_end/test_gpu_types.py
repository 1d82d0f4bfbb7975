"""Whole jobs on one GPU type, and beliefs on both, on a real Ray cluster with pretended types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmarks.ray.cluster import RayCluster
from tests.end_to_end.conftest import Platform, finished
from tests.waiting import wait_until

from swell.domain import EventKind
from swell.engines.ray.site import RayOptions, RaySite
from swell.engines.supervised import SupervisedEngine

pytestmark = pytest.mark.slow


@pytest.mark.timeout(480)
def test_a_job_is_whole_on_one_type_and_what_it_shows_on_each_is_kept_apart(
    tmp_path: Path, ray_cluster: RayCluster
) -> None:
    nodes = [
        ray_cluster.join(f"typed-{kind}", 0, resources={"typed": 2, f"swell_type:{kind}": 1})
        for kind in ("t4", "a100")
    ]
    options = RayOptions(address=ray_cluster.address, resource="typed")
    platform = Platform(tmp_path, lambda: SupervisedEngine(RaySite(tmp_path, options)), "tide")
    hurry, slower = tmp_path / "hurry", tmp_path / "slower"

    def types(job_id: str) -> dict[str, Any]:
        explained = platform.plane.jobs.explain(job_id)
        assert len(explained["gpu_types"]) <= 1, "whatever is decided is on one type"
        return {one["gpu_type"]: one for one in explained["types"]}

    try:
        assert sorted(node.gpu_type for node in platform.plane.nodes.states()) == ["a100", "t4"]
        job = platform.submit("toy", "--epochs", 200, "--sample-ms", 2, "--hurry", hurry, "--slower", slower)
        first: list[str] = []

        def is_measured_where_it_is() -> bool:
            """The policy may try the other type at any moment: where the job is now is what counts."""
            explained = platform.plane.jobs.explain(job.job_id)
            measured = [one["gpu_type"] for one in explained["types"] if one["measured"]]
            first[:] = explained["gpu_types"]
            return len(platform.plane.jobs.get(job.job_id).held) == 2 and measured == first

        wait_until(
            is_measured_where_it_is,
            180,
            lambda: f"{platform.plane.jobs.explain(job.job_id)}",
            poll_s=0.5,  # an explanation holds the platform up: it has an estimate
        )
        slower.touch()  # the other type is the slower one
        platform.plane.nodes.drain(f"typed-{first[0]}")
        wait_until(
            lambda: (
                all(one["measured"] for one in types(job.job_id).values())
                and platform.plane.jobs.explain(job.job_id)["gpu_types"] != first
            ),
            180,
            lambda: f"{platform.plane.jobs.explain(job.job_id)}",
            poll_s=0.5,  # an explanation holds the platform up: it has an estimate
        )
        (second,) = platform.plane.jobs.explain(job.job_id)["gpu_types"]
        curves = {kind: one["curve"] for kind, one in types(job.job_id).items()}
        assert curves[second][1] < 0.6 * curves[first[0]][1]
        hurry.touch()
        assert finished(platform.wait_over(job.job_id)[0])
        starts = [e for e in platform.events() if e.kind in (EventKind.ALLOCATED, EventKind.RESIZED)]
        # While a job moves, its workers change one after the other.
        shown = [e.data["gpu_type"] for e in starts if "+" not in e.data["gpu_type"]]
        assert shown[0] == first[0] and shown[-1] == second
    finally:
        for record in platform.plane.jobs.find():
            if not record.phase.over:
                platform.plane.jobs.cancel(record.job_id)
        hurry.touch()
        platform.close()
        for node in nodes:
            node.stop()
