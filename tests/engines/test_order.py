"""start.json: what one version of swell wrote, this one and the next can read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swell.domain import JobRequest
from swell.engines import Launch
from swell.engines.order import Order
from swell.engines.supervised_job import SupervisedJob

OLD: dict[str, Any] = {
    "job_id": "digits-0a1b2c3d4e",
    "command": ["train.py", "--epochs", "3"],
    "workdir": "/w",
    "env": {"A": "b"},
    "auto": True,
    "max_workers": 8,
    "workers": 2,
    "threads": 1,
    "placement": [4, 5, 6],
    "checkpoint_s": 5.0,
    "memory_bytes": None,
    "devices": ["/home/devices/0"],
}
"""As swell 0.1 wrote it before requests had `pip`."""


def test_an_order_comes_back_as_it_was(tmp_path: Path) -> None:
    request = JobRequest(name="a", script="t.py", args=("1",), workdir="/w", env={"A": "b"}, workers=7)
    launch = Launch(job_id="a-1", request=request, job_dir=tmp_path, max_workers=5)
    order = Order(launch=launch, slots=(3,), placement=(3, 4), extras={"ray": {"session": "s"}})
    order.write()
    assert Order.read(tmp_path) == order
    assert (tmp_path / "start.json").stat().st_mode & 0o077 == 0, "env may hold secrets"


def test_a_relative_working_directory_is_where_the_engine_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    request = JobRequest(name="a", script="t.py", workdir="here")
    Order(launch=Launch(job_id="a", request=request, job_dir=tmp_path), slots=(), placement=()).write()
    assert Order.read(tmp_path).launch.workdir == tmp_path / "here"


def test_a_job_that_an_older_version_started_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / "start.json").write_text(json.dumps(OLD))
    job = SupervisedJob.found(tmp_path)
    assert job.job_id == "digits-0a1b2c3d4e"
    assert job.launch.max_workers == 8
    request = job.launch.request
    assert (request.script, request.args, request.workdir) == ("train.py", ("--epochs", "3"), "/w")
    assert (request.env, request.auto, request.checkpoint_s) == ({"A": "b"}, True, 5.0)
    assert (request.memory_bytes, request.pip, request.workers) == (None, (), 1)
    job.state.wanted = (4, 5)
    job.note((4,))
    again = Order.read(tmp_path)
    assert (again.placement, again.slots, again.extras) == ((4, 5), (4,), {})
    assert again.launch == job.launch


def test_an_order_of_a_newer_version_is_read(tmp_path: Path) -> None:
    launch = Launch(job_id="a", request=JobRequest(name="a", script="t.py", workdir="/w"), job_dir=tmp_path)
    order = Order(launch=launch, slots=(0,), placement=(0,))
    order.write()
    path = tmp_path / "start.json"
    content = json.loads(path.read_text())
    content["request"]["invented_later"] = 1
    path.write_text(json.dumps(content))
    assert Order.read(tmp_path) == order
