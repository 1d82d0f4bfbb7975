"""What tests of several rooms share: one Ray cluster for all that need one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from benchmarks.ray.cluster import RayCluster


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[RayCluster]:
    """Four Ray nodes of two slots each and a head without, on the loopback; for tests in the group ray."""
    pytest.importorskip("ray")
    with RayCluster(4, 2) as cluster:
        yield cluster
