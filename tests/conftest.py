"""What tests of several rooms share: one Ray cluster and one Postgres for all that need one, and who runs on
which worker."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from benchmarks.platform.postgres import NoPostgres, PostgresServer
from benchmarks.ray.cluster import RayCluster
from tests.commands import Commands

from swell.engines.nursery import SHARED, Nursery

pytest_plugins = ["tests.completeness"]

# How long one example takes depends on what else the machine does, so that no test fails for its time alone.
hypothesis.settings.register_profile(
    "patient", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("patient")

ROOT = Path(__file__).parents[1]

COMPILED = tuple(
    f"tests/{name}" for name in ("policies/", "sim/", "control/test_same", "control/test_quotes")
)
"""Tests of compiled policies: in one process each function is compiled once, not once for each worker."""


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[RayCluster]:
    """Four Ray nodes of two slots each and a head without, on the loopback."""
    pytest.importorskip("ray")
    with RayCluster(4, 2) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """A real Postgres server for this session."""
    pytest.importorskip("psycopg")
    try:
        with PostgresServer() as server:
            yield server.url
    except NoPostgres as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """One nursery for the local engines of all tests: none of them has to import torch for its jobs."""
    with tempfile.TemporaryDirectory(prefix="swell-nursery-") as folder:  # a test's own path may be too long
        path = Path(folder, "sock")
        made = Nursery(Path(os.devnull), path=path)
        os.environ[SHARED] = str(path)
        yield made
        del os.environ[SHARED]
        made.close()


@pytest.fixture
def nest() -> Iterator[Callable[[Path, int], None]]:
    """Makes folders inside each other, deeper than any path can name, with a file in the last; and removes
    them afterwards, because pytest cannot."""
    tops, name = list[Path](), "x" * 200

    def make(top: Path, depth: int) -> None:
        tops.append(top)
        here = os.open(top, os.O_RDONLY)
        for _ in range(depth):
            os.mkdir(name, dir_fd=here)
            below = os.open(name, os.O_RDONLY, dir_fd=here)
            os.close(here)
            here = below
        os.close(os.open("data", os.O_CREAT | os.O_WRONLY, dir_fd=here))
        os.close(here)

    yield make
    for top in tops:
        subprocess.run(["rm", "-rf", str(top)], check=True)


@pytest.fixture(scope="session")
def commands() -> Iterator[Commands]:
    """Runs `swell` commands in processes of their own."""
    made = Commands()
    yield made
    made.close()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Before a parallel run: compile the policies once, not once for each worker."""
    if session.config.pluginmanager.hasplugin("dsession"):
        subprocess.run([sys.executable, str(ROOT / "scripts" / "compile.py")], check=True)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long ones first: at the end of a parallel run no worker waits for another one's last test."""
    items.sort(key=lambda i: i.get_closest_marker("slow") is None and not i.nodeid.startswith(COMPILED))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests that share a cluster, a platform or compiled code run on one worker; others where there is room.

    By their names, because the workers' marks do not reach the scheduler with the versions we pin.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Grouped(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if "[ray" in nodeid or "test_ray" in nodeid:
                return "ray"
            if nodeid.startswith(COMPILED):
                return "compiled"
            return "platform" if "test_platform" in nodeid else nodeid

    return Grouped(config, log)
