"""Nodes of a real Ray that come with the queue and go with it: 0 -> 3 -> 0, and who provides them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.rented import follow_queue, renting_platform
from tests.waiting import wait_until

from swell.cli._platform import with_rented
from swell.cloud import NodeOffer, Supply
from swell.control.plane import ControlPlane
from swell.domain import EventKind
from swell.engines.ray import head, raylet
from swell.engines.ray import site as site_module
from swell.engines.ray.places import RayNode, RentedNodes, dump, follow, load, to_cluster
from swell.engines.ray.places import with_rented as with_places
from swell.engines.ray.site import LocalProvider, RayOptions, RayProvider, RaySite
from swell.engines.supervised import SupervisedEngine

READ = """
import sys
from ray._raylet import GcsClient
print(GcsClient(address=sys.argv[1]).internal_kv_get(b"autoscaler_resource_request", None).decode())
"""
"""Prints what Ray's autoscaler has been asked for."""
LONG_S = 200.0
"""Ray nodes start in seconds; on a machine that does much else, in many of them."""


@pytest.fixture
def plane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ControlPlane]:
    """A platform on a Ray of its own that rents up to three nodes of one slot."""
    monkeypatch.setattr(head, "STARTED_S", LONG_S)
    monkeypatch.setattr(site_module, "FIRST_SIGHT_S", LONG_S)
    with renting_platform(tmp_path) as made:
        yield made


@pytest.mark.slow
def test_nodes_follow_the_queue_from_none_to_three_and_back(plane: ControlPlane, tmp_path: Path) -> None:
    found = follow_queue(plane, tmp_path)
    assert found["nodes"] == [0, 3, 0]
    assert not any(node.up for node in plane.nodes.states())
    events = [event for _, event in plane.events(limit=1000)]
    assert max(found["wanted"]) == 3 and found["wanted"][-1] == 0
    joined = {event.node: event.data.get("reason") for event in events if event.kind is EventKind.NODE_JOINED}
    assert set(joined) == {"rented-1", "rented-2", "rented-3"}
    assert all(str(why).startswith("the jobs are worth") for why in joined.values())
    gone = [event.data.get("reason") for event in events if event.kind is EventKind.NODE_LOST]
    assert len(gone) >= 3 and gone[-1] == "let go: no jobs"

    # On the same Ray, what can be tried of Ray's own autoscaler: that it is asked for whole nodes.
    assert isinstance(plane.engine, SupervisedEngine)
    site = plane.engine.site
    assert isinstance(site, RaySite)
    by_ray = RayProvider(site, NodeOffer(gpus_per_node=2))
    by_ray.request(3)
    assert by_ray.supply() == Supply((), 3)
    scout, heard_s = site._scout, site._scout.heard_s
    wait_until(lambda: scout.heard_s > heard_s + 1.0, LONG_S, "the scout, after it has asked", poll_s=0.2)
    words = [sys.executable, "-c", READ, site.address]
    read = subprocess.run(words, env=site.access(), capture_output=True, text=True, timeout=LONG_S)
    assert json.loads(read.stdout) == [{"CPU": 2}] * 3, read.stderr


class Processes:
    """Stands in for the processes of Ray nodes: a node lives until the test says that it has ended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.living: dict[str, str | None] = {}
        """By name: the address of the Ray that the node has joined; None while it starts."""
        self.told_to_end: list[str] = []
        monkeypatch.setattr(raylet, "running", lambda _: dict.fromkeys(self.living, 7))
        monkeypatch.setattr(raylet, "address_of", lambda _, name, __: self.living[name])
        monkeypatch.setattr(raylet, "ask_to_stop", lambda _, name: self.told_to_end.append(name) or True)
        monkeypatch.setattr(LocalProvider, "_start", lambda _, name: self.living.setdefault(name, None))


def test_the_local_provider_drops_nodes_that_start_first_and_reuses_no_name_before_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = RaySite(tmp_path, with_rented(RayOptions(), "0:3x1", "local"))
    monkeypatch.setattr(RaySite, "address", "a:1")
    provider, processes = LocalProvider(site, NodeOffer(gpus_per_node=1)), Processes(monkeypatch)
    provider.request(2)
    assert provider.supply() == Supply((), 2)
    processes.living["rented-1"] = "a:1"
    assert provider.supply() == Supply(("rented-1",), 1)
    provider.request(2)
    provider.request(1)
    assert processes.told_to_end == ["rented-2"] and provider.supply() == Supply(("rented-1",), 0)
    provider.request(3)
    assert sorted(processes.living) == ["rented-1", "rented-2", "rented-3"]
    assert provider.supply() == Supply(("rented-1",), 1), "rented-2 has not ended yet"
    del processes.living["rented-2"]
    provider.request(3)
    assert provider.supply() == Supply(("rented-1",), 2)
    processes.living |= {"rented-2": "a:1", "rented-3": "a:1"}
    provider.request(1, ["rented-3", "rented-1"])
    assert provider.supply() == Supply(("rented-2",), 0)
    monkeypatch.setattr(RaySite, "address", "a:2")
    assert provider.supply() == Supply((), 0), "Ray was started again: the node can never be used"
    assert processes.told_to_end == ["rented-2", "rented-3", "rented-1", "rented-2"]


def node(node_id: str, name: str, slots: int = 4) -> RayNode:
    return RayNode(node_id=node_id, name=name, address="10.0.0.2", slots=slots, gpu_type="a100")


def test_nodes_of_a_cloud_take_rented_places_whatever_their_names() -> None:
    rented = RentedNodes(nodes=2, slots=4, gpu_type="gpu", any_host=True)
    places, names = with_places([], rented)
    assert names == ("rented-1", "rented-2") and to_cluster(places).capacity == 0
    places = follow(places, [node("a", "ip-1"), node("b", "ip-2", slots=8)])
    assert [(p.name, p.up, p.gpu_type) for p in places] == [
        ("rented-1", True, "a100"), ("rented-2", False, "gpu"), ("ip-2", True, "a100"),
    ]  # fmt: skip
    places = follow(places, [node("c", "ip-9")])
    assert [p.up for p in places] == [True, False, False], "another node in the place of the one that went"
    places, names = with_places(load(dump(places)), RentedNodes(nodes=3, slots=2, gpu_type="cpu"))
    assert names == ("rented-1-2", "rented-2-2", "rented-3"), "other sizes are other nodes"
    assert [p.slots for p in places] == [4, 4, 8, 2, 2, 2]
