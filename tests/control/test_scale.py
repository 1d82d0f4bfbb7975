"""Bounds set by hand: a running job that is told to have more workers gets them, or keeps what it has."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.control.virtual import Trace, VirtualPlatform

from swell.control.model import Phase
from swell.domain import Cluster, JobSpec


@pytest.mark.parametrize("policy", ["elasticflow", "edf", "edf-admission", "afs-l", "max-min"])
@pytest.mark.parametrize(("cluster", "least"), [("1x3", 3), ("3x1", 3), ("1x6", 5)])
def test_a_job_alone_on_the_cluster_gets_the_minimum_that_it_is_told_to_have(
    tmp_path: Path, policy: str, cluster: str, least: int
) -> None:
    where = Cluster.parse(cluster)
    counts = np.arange(where.capacity + 1)
    spec = JobSpec(job_id="j0", submit_s=0.0, model="j0", batch_size=1, work=1e6, gpus=1)
    trace = Trace([spec], {"j0": counts / (1 + 0.1 * counts)}, where)
    platform = VirtualPlatform(trace, policy, tmp_path / "home", cost_s=1.0, round_s=1.0)
    platform.plane.come_up()
    job_id = platform.plane.jobs.submit(platform.request(spec), "ann").job_id

    def turns(count: int) -> None:
        for _ in range(count):
            platform.now_s += 30.0
            platform.plane.turn()
            assert platform.plane.jobs.get(job_id).phase is Phase.RUNNING, platform.plane.jobs.get(
                job_id
            ).reason

    turns(4)
    platform.plane.jobs.scale(job_id, least, None)
    turns(4)
    assert len(platform.plane.jobs.get(job_id).wanted) >= least
    platform.plane.jobs.scale(job_id, 2, 2)
    turns(4)
    assert len(platform.plane.jobs.get(job_id).wanted) == 2
    platform.store.close()
