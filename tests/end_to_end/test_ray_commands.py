"""`swell up --engine ray` as people type it: on a Ray that was there, and on one of its own."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from benchmarks.ray.cluster import RayCluster
from tests.commands import Commands
from tests.waiting import wait_until

from swell.engines.ray import head
from swell.engines.ray.site import RayOptions, RaySite
from swell.engines.supervised import SupervisedEngine

from .conftest import TOY

pytestmark = pytest.mark.slow


@pytest.fixture
def swell(tmp_path: Path, commands: Commands) -> Callable[..., str]:
    """Run a command with a home of its own; what it printed."""

    def run(*words: str, code: int = 0) -> str:
        env = {**os.environ, "SWELL_HOME": str(tmp_path)}
        done = commands.run(list(words), tmp_path, env, timeout_s=120)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


def test_down_saves_the_jobs_and_leaves_a_ray_that_was_there_before_running(
    swell: Callable[..., str], tmp_path: Path, ray_cluster: RayCluster
) -> None:
    address = ("--engine", "ray", "--address", ray_cluster.address)
    swell("up", "-d", "--port", "0", *address)
    nodes = json.loads(swell("nodes", "--json"))
    assert sum(node["gpus"] for node in nodes) == 8
    words = ("submit", "-d", "--json", "--min-workers", "2", str(TOY), "--epochs", "90", "--sample-ms", "2")
    job = json.loads(swell(*words))  # on two slots: what ends jobs must know all slots, not only the first
    output = tmp_path / "jobs" / job["job_id"] / "output.log"
    wait_until(lambda: output.exists() and "| step " in output.read_text(), 90, "the first step")
    down = json.loads(swell("down", "--json"))
    assert down["saved"] == [job["job_id"]]
    assert list((tmp_path / "jobs" / job["job_id"] / "checkpoints").iterdir())

    for node in [ray_cluster.head, *ray_cluster.nodes]:
        os.kill(node.raylet, 0)
    again = SupervisedEngine(
        RaySite(tmp_path / "other", RayOptions(address=ray_cluster.address, spares=False))
    )
    again.start(lambda: None)
    try:
        assert again.cluster().capacity == 8
    finally:
        again.close()


def test_a_ray_of_its_own_is_for_its_owner_alone_is_used_again_and_ends_with_down(
    swell: Callable[..., str], tmp_path: Path
) -> None:
    swell("up", "-d", "--port", "0", "--engine", "ray")
    first = head.running(tmp_path)
    assert first is not None and (tmp_path / head.TOKEN).stat().st_mode & 0o077 == 0
    scratch = json.loads((tmp_path / head.FILE).read_text())["scratch"]
    said = swell("submit", str(TOY), "--epochs", "1")
    assert "final loss" in said
    swell("down", "--keep-jobs")
    assert head.running(tmp_path) == first, "jobs that train on need it"
    swell("up", "-d", "--port", "0", "--engine", "ray")
    assert head.running(tmp_path) == first
    assert "The Ray that swell had started has stopped" in swell("down")
    assert head.running(tmp_path) is None and not Path(scratch).exists()
    left = [
        path.parent.name
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if _mentions(path, scratch) and path.parent.name != str(os.getpid())
    ]
    assert not left


def _mentions(path: Path, text: str) -> bool:
    try:
        return text.encode() in path.read_bytes()
    except OSError:
        return False


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--engine", "ray", "--slots", "2"), "--slots is for the local engine"),
        (("--engine", "ray", "--nodes", "2x2"), "--nodes is for the local engine"),
        (("--engine", "ray", "--run-as", "ann"), "--run-as is for the local engine"),
        (
            ("--engine", "ray", "--per-gpu", "2", "--ray-resource", "CPU"),
            "per_gpu: got 2, must be 1, because a slot is one CPU",
        ),
        (
            ("--engine", "ray", "--per-gpu", "2", "--autoscale", "0:3x1", "--provider", "local"),
            "per_gpu: got 2, must be 1 where nodes are rented",
        ),
        (("--address", "auto"), "--address needs --engine ray"),
        (("--no-spares",), "--spares needs --engine ray"),
        (("--engine", "ray", "--address", "nonsense"), "HOST:PORT"),
        (("--engine", "ray", "--address", "127.0.0.1:1", "--port", "0"), "nothing listens at 127.0.0.1:1"),
    ],
)
def test_what_cannot_be_is_refused(swell: Callable[..., str], words: tuple[str, ...], said: str) -> None:
    assert said in swell("up", *words, code=2 if "nothing" not in said else 1)
