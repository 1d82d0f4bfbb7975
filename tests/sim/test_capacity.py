"""Rented nodes in the simulator: what they cost, when they come and go, and what that does to jobs."""

from __future__ import annotations

import pytest

from swell.cloud import NodeOffer
from swell.domain import Cluster, Event, EventKind, InputError, JobSpec
from swell.perf.profiles import ProfileSet
from swell.sim import parse_cloud, simulate
from swell.sim.capacity import SimulatedProvider
from swell.sim.generate import generate_jobs

PROFILES = ProfileSet.load(None)
CLUSTER = Cluster.parse("4x4")
CIFAR = PROFILES.get("cifar10")


def job(name: str, submit_s: float, seconds: float, **more: float) -> JobSpec:
    """A job that needs `seconds` on one GPU and cannot use a second one."""
    rate = CIFAR.rate((1,), 128, CIFAR.gpu_types[0])
    return JobSpec(
        job_id=name,
        submit_s=submit_s,
        model="cifar10",
        batch_size=128,
        work=seconds * rate,
        max_gpus=1,
        **more,
    )  # type: ignore[arg-type]


def provider(**offer: float) -> SimulatedProvider:
    return SimulatedProvider(CLUSTER, NodeOffer(**{"gpus_per_node": 4, "start_s": 100.0} | offer))  # type: ignore[arg-type]


def test_nodes_come_after_their_start_and_are_paid_from_the_request_on() -> None:
    cloud = provider(price_per_hour=2.0)
    cloud.request(2)
    assert cloud.supply().nodes == cloud.supply().coming == 2 and cloud.due_s == 100.0
    assert [change.node for change in cloud.changes(100.0)] == [0, 1]
    assert cloud.supply().ready == ("n0", "n1")
    cloud.changes(1800.0)
    cloud.request(1, spare=["n0"])
    assert [(c.node, c.up) for c in cloud.changes(1800.0)] == [(0, False)]
    assert cloud.node_hours(3600.0) == pytest.approx(1.5)


def test_nodes_on_their_way_are_cancelled_first() -> None:
    cloud = provider()
    cloud.request(1)
    cloud.changes(100.0)
    cloud.request(3)
    cloud.request(2, spare=["n0"])
    assert cloud.supply().ready == ("n0",) and cloud.supply().coming == 1


def test_a_spot_node_is_taken_back_and_comes_again_only_if_requested() -> None:
    cloud = provider(spot_life_s=1000.0)
    cloud.request(1)
    cloud.changes(100.0)
    lost_s = cloud.due_s
    assert 100.0 < lost_s < 1e5
    assert [(c.node, c.up) for c in cloud.changes(lost_s)] == [(0, False)]
    assert cloud.supply().nodes == 0 and cloud.lost == 1
    cloud.request(1)
    assert cloud.due_s == lost_s + 100.0


def test_the_cluster_goes_from_nothing_to_what_is_needed_and_back() -> None:
    nodes, most = 0, 0

    def count(event: Event) -> None:
        nonlocal nodes, most
        nodes += {EventKind.NODE_JOINED: 1, EventKind.NODE_LOST: -1}.get(event.kind, 0)
        most = max(most, nodes)

    jobs = [job(f"a{i}", 0.0, 900.0) for i in range(10)] + [job("late", 5000.0, 100.0)]
    cloud = parse_cloud("price=3,start=60", CLUSTER)
    result = simulate(jobs, PROFILES, CLUSTER, "max-min", cloud=cloud, on_event=count)
    # ten jobs of one GPU each want three nodes, and the late one finds none and waits for one
    assert most == 3
    assert result.finish_s[:10] == pytest.approx([960.0] * 10)
    assert result.finish_s[10] == pytest.approx(5160.0)
    hours = (3 * 960 + 60 + 160) / 3600  # the last nodes are kept for another minute
    assert result.node_hours == pytest.approx(hours, abs=0.06)
    assert result.cost == pytest.approx(3 * result.node_hours)


def test_jobs_survive_that_their_nodes_are_taken_back() -> None:
    jobs = [job(f"a{i}", 0.0, 3600.0) for i in range(8)]
    cloud = parse_cloud("start=60,spot=0.2", CLUSTER, seed=1)
    result = simulate(jobs, PROFILES, CLUSTER, "tide-fixed", resize_cost=5.0, cloud=cloud, seed=1)
    assert cloud.provider.lost > 0
    assert result.record()["finished"] == 8 and not result.stalled


def test_promises_count_on_nodes_that_can_be_rented() -> None:
    fine, tight = job("fine", 0.0, 1000.0, deadline_s=1300.0), job("tight", 0.0, 1000.0, deadline_s=1040.0)
    cloud = parse_cloud("start=100", CLUSTER)
    result = simulate([fine, tight], PROFILES, CLUSTER, "elasticflow", cloud=cloud)
    assert result.rejected.tolist() == [0, 1]  # a node could not be there early enough
    assert result.promises_broken == 0 and result.deadline_met == 1


@pytest.mark.parametrize("policy", ["elasticflow", "tide", "max-min", "afs-l"])
def test_every_job_of_a_mixed_workload_ends(policy: str) -> None:
    jobs = generate_jobs(PROFILES, jobs=20, hours=2.0, seed=2, deadlines=0.3, max_gpu_hours=4.0)
    cloud = parse_cloud("start=120,spot=2,price=1", CLUSTER, seed=2)
    record = simulate(jobs, PROFILES, CLUSTER, policy, resize_cost=10.0, cloud=cloud, seed=2).record()
    assert record["finished"] + record["rejected"] == 20
    assert 0 < record["cost"] < 4 * record["makespan_s"] / 3600


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prize=3", "price"),
        ("price=much", "price must be a number"),
        ("low=0.9,high=0.5", "low"),
        ("price", "price"),
    ],
)
def test_options_that_make_no_sense_are_refused(text: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        parse_cloud(text, CLUSTER)
    with pytest.raises(InputError, match="equal nodes"):
        parse_cloud("price=1", Cluster.parse("2x4,1x8"))
