"""Workers on several hosts (network namespaces): a cut link, and the same bits as on one host.

`python -m benchmarks.runtime.hosts` has the longer form: every kind of cut, 20 s and 170 s.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.runtime.hosts import HostsJob
from benchmarks.runtime.netns import Hosts, why_not
from tests.sharded import SCRIPT as SHARDED
from tests.sharded import check_every_sample_once, newest
from tests.waiting import wait_until

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "runtime" / "identity_script.py"


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with Hosts(4) as made:
        yield made


@pytest.fixture
def job(hosts: Hosts, _stage: Any, tmp_path: Path) -> Iterator[HostsJob]:
    made = HostsJob(hosts, _stage.prepared, tmp_path / "job", epochs=60, pace_s=0.1)
    yield made
    hosts.heal_all()
    made.close()


def test_training_goes_on_without_a_worker_whose_link_is_cut_and_with_it_when_healed(job: HostsJob) -> None:
    def happened(event: str) -> list[dict[str, Any]]:
        return [e for e in job.directory.events() if e["event"] == event]

    job.together()
    job.hosts.cut(2, 3)
    wait_until(lambda: happened("left_out"), 60, "the cut to be noticed")
    (left,) = happened("left_out")
    assert left["by"] == ["w1"] and left["worker"] == "w2", "of two that lose each other the younger"
    two = job.wait_for(lambda s: s["members"] == ["w0", "w1"])
    job.wait_for(lambda s: s["step"] > two["step"])
    wait_until(lambda: happened("unreachable"), 60, "its successor to be found unreachable")
    job.hosts.heal(2, 3)
    job.together()
    assert [e["instead_of"] for e in happened("back")] == ["w2"]
    assert happened("standstill")[0]["workers"], "and people were told for whom the step waited"
    assert job.finish() is None, "every sample once, no step twice"


NETWORK_SCRIPT = """
import sys, time, torch, swell
data = torch.utils.data.TensorDataset(torch.zeros(4096, 256))
model = torch.nn.Linear(256, 1024)
job = swell.elastic(model, torch.optim.SGD(model.parameters(), lr=0.01))
for epoch in job.epochs(100):
    for (x,) in job.loader(data, batch_size=12):
        time.sleep(0.05)
        job.step(model(x).mean())
"""


class NetworkJob:
    """A job with a worker on each of the hosts 1, 2 and 3, whose steps send a megabyte each."""

    def __init__(self, hosts: Hosts, stage: Any, root: Path) -> None:
        script = root / "train.py"
        script.write_text(NETWORK_SCRIPT)
        place = {"workers": 3, "maximum": 3, "slots": [1, 2, 3], "hosts": hosts.describe()}
        self.hosts, self.run = hosts, stage.run(script, **place)

    def wait_for_steps(self, count: int) -> None:
        with self.hosts.inside(0):
            status = self.run.members(3)
            self.run.wait_for(lambda s: s["step"] >= status["step"] + count, 120)

    def slow(self) -> list[dict[str, Any]]:
        return list(self.run.events("straggler"))


def test_the_worker_of_a_host_with_slow_links_is_named_and_replaced(
    hosts: Hosts, stage: Any, tmp_path: Path
) -> None:
    job = NetworkJob(hosts, stage, tmp_path)
    job.wait_for_steps(20)
    assert not job.slow()
    with hosts.slowed(3, "10mbit"):
        wait_until(job.slow, 120, "the slow links to be noticed")
    (event,) = job.slow()
    assert (event["worker"], event["slot"], event["link"]) == ("w2", 3, True) and event["times"] > 4
    with hosts.inside(0):
        job.run.wait_for(lambda s: len(s["members"]) == 3 and "w2" not in s["members"], 120)


@pytest.mark.long
def test_an_evenly_slow_network_is_nobodys_fault(hosts: Hosts, stage: Any, tmp_path: Path) -> None:
    with contextlib.ExitStack() as slowed:
        slowed.enter_context(hosts.slowed(1, "20mbit"))
        slowed.enter_context(hosts.slowed(2, "20mbit"))
        slowed.enter_context(hosts.slowed(3, "20mbit"))
        job = NetworkJob(hosts, stage, tmp_path)
        job.wait_for_steps(60)
        assert not job.slow()


def test_three_hosts_give_the_bits_of_one(hosts: Hosts, stage: Any, tmp_path: Path) -> None:
    digests = []
    for name, options in (
        ("one", {"workers": 1, "maximum": 1}),
        ("three", {"workers": 3, "maximum": 3, "slots": [1, 2, 3], "hosts": hosts.describe()}),
    ):
        (tmp_path / name).mkdir()
        job = stage.run(SCRIPT, "--epochs", "3", "--out", str(tmp_path / name), **options)
        assert job.wait() == 0, job.output()
        digests.append(json.loads((tmp_path / name / "result.json").read_text())["hash"])
    assert digests[0] == digests[1]


def test_the_workers_of_a_replica_are_on_two_hosts(hosts: Hosts, stage: Any, tmp_path: Path) -> None:
    (tmp_path / "hurry").touch()
    place = {"workers": 2, "minimum": 2, "maximum": 2, "slots": [1, 2], "hosts": hosts.describe()}
    job = stage.run(SHARDED, str(tmp_path), "2", **place, settings={"workers_per_replica": 2})
    assert job.wait() == 0, job.output()
    check_every_sample_once(newest(tmp_path), 2)
