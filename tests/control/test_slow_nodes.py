"""A node on which workers stay slow is reported, avoided for a while, and tried again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.control.virtual import VirtualPlatform, make_trace

from swell.control.slow_nodes import (
    AGAIN_S,
    AVOID_S,
    AVOID_SILENT_S,
    AVOID_UNSTARTABLE_S,
    MOST_AVOID_S,
    SlowNodes,
)
from swell.domain import Cluster, EventKind, JobSpec
from swell.engines.border import read_event, told

CLUSTER = Cluster.parse("4x2")


def found(nodes: SlowNodes, name: str = "n1", at_s: float = 0.0, times: float = 2.0) -> None:
    """Have a node found slow: a worker, and the one that came in its place."""
    assert nodes.heard(name, times, at_s) is None
    assert nodes.heard(name, times, at_s + 90.0) is not None


def test_one_slow_worker_is_no_slow_node_and_two_far_apart_are_none() -> None:
    nodes = SlowNodes()
    assert nodes.heard("n1", 2.0, 0.0) is None and nodes.heard("n2", 2.0, 1.0) is None
    assert nodes.heard("n1", 2.0, AGAIN_S + 1.0) is None
    assert not nodes.slow(AGAIN_S + 2.0)


def test_it_is_avoided_for_a_while_and_longer_if_it_is_slow_again() -> None:
    nodes = SlowNodes()
    found(nodes)
    assert nodes.avoided(CLUSTER, 0, 91.0) == {"n1"}
    back_s = 90.0 + AVOID_S
    assert nodes.avoided(CLUSTER, 0, back_s) == frozenset()
    again = nodes.heard("n1", 2.0, back_s + 70.0)
    assert again is not None and again.until_s == back_s + 70.0 + 2 * AVOID_S
    for _ in range(10):
        again = nodes.heard("n1", 2.0, again.until_s + 1.0) or again
    assert again.until_s - again.heard_s == MOST_AVOID_S
    well_s = again.until_s + AGAIN_S + 1.0
    assert nodes.heard("n1", 2.0, well_s) is None, "it was well for a while: it is counted anew"
    once = nodes.heard("n1", 2.0, well_s + 70.0)
    assert once is not None and once.until_s - once.heard_s == AVOID_S


def test_it_is_used_all_the_same_where_the_others_have_too_little_room_and_then_stays_in_use() -> None:
    nodes = SlowNodes()
    found(nodes)
    assert nodes.avoided(CLUSTER, 6, 91.0) == {"n1"}
    assert nodes.avoided(CLUSTER, 7, 92.0) == frozenset()
    assert nodes.avoided(CLUSTER, 1, 93.0) == frozenset(), "jobs do not move to and fro"
    assert list(nodes.slow(93.0)) == ["n1"], "people still see it"


def test_the_last_node_and_a_whole_cluster_are_never_avoided() -> None:
    nodes = SlowNodes()
    for name in ("n0", "n1", "n2", "n3"):
        found(nodes, name, times=3.0 if name == "n2" else 2.0)
    assert nodes.avoided(CLUSTER, 1, 91.0) == {"n2"}, "one in four, the slowest"
    alone = SlowNodes()
    found(alone, "n0")
    assert alone.avoided(Cluster.parse("1x4"), 0, 91.0) == frozenset()


def test_it_is_written_and_read_and_nonsense_is_refused() -> None:
    nodes = SlowNodes()
    found(nodes)
    again = SlowNodes(nodes.to_json())
    assert again.avoided(CLUSTER, 0, 91.0) == {"n1"} and again.to_json() == nodes.to_json()
    again.forget("n1")
    assert not again.slow(91.0)
    with pytest.raises(TypeError):
        SlowNodes({"n1": {"invented": 1}})


@pytest.mark.parametrize(("said", "leads"), [({}, False), ({"leader": True}, True)])
def test_the_leader_may_have_more_to_do_so_it_says_nothing_of_its_node(said: Any, leads: bool) -> None:
    event = read_event({"event": "straggler", "worker": "w1", "times": 2.0} | said, 8)
    assert event.leader is leads and told(event)


class Live:
    """A control plane with two elastic jobs on three nodes of two slots."""

    def __init__(self, home: Path, least: int = 1) -> None:
        trace = make_trace(1, 2, "3x2", 0.0)
        jobs = [
            JobSpec(
                job_id=j.job_id, submit_s=0.0, model=j.model, batch_size=1, work=1e6, gpus=2, min_gpus=least
            )
            for j in trace.jobs
        ]
        self.home = home
        self.platform = VirtualPlatform(
            type(trace)(jobs, trace.rates, trace.cluster), "max-min", home, cost_s=1.0, round_s=None
        )
        self.plane = self.platform.plane
        self.plane.come_up()
        self.ids = [self.plane.jobs.submit(self.platform.request(job), "ann").job_id for job in jobs]
        self.turn(1.0)

    def turn(self, now_s: float) -> None:
        self.platform.now_s = now_s
        self.plane.turn()
        self.plane.turn()

    def slow_worker(self, at_s: float, slot: int = 2) -> None:
        """The job on this slot says that its worker there is slow."""
        holder = next(j for j in self.ids if slot in self.plane.jobs.get(j).held)
        self.platform.engine.say(holder, "slow", {"slot": slot, "times": 2.5})
        self.turn(at_s)

    def used(self) -> set[int]:
        return {slot // 2 for job_id in self.ids for slot in self.plane.jobs.get(job_id).wanted}

    def events(self, kind: EventKind) -> list[tuple[str | None, Any]]:
        found = [event for _, event in self.plane.events(limit=10_000) if event.kind is kind]
        return [(event.node, event.data.get("reason")) for event in found if event.time_s > 1.0]


def test_jobs_leave_a_slow_node_and_come_back_and_people_are_told(tmp_path: Path) -> None:
    live = Live(tmp_path)
    assert live.used() == {0, 1, 2}
    live.slow_worker(10.0)
    assert live.used() == {0, 1, 2} and not live.events(EventKind.NODE_SLOW)
    live.slow_worker(80.0)
    assert [node for node, _ in live.events(EventKind.NODE_SLOW)] == ["n1"]
    assert live.used() == {0, 2}
    ((node, reason),) = live.events(EventKind.NODE_LOST)
    assert node == "n1" and reason.startswith("slow: ")
    (shown,) = [n for n in live.plane.nodes.states() if n.slow is not None]
    assert (shown.name, shown.slow, shown.avoided_until_s) == ("n1", 2.5, 80.0 + AVOID_S)
    live.turn(80.0 + AVOID_S)
    assert live.used() == {0, 1, 2} and [n for n, _ in live.events(EventKind.NODE_JOINED)] == ["n1"]
    assert not any(n.slow for n in live.plane.nodes.states())


def test_a_person_has_a_slow_node_used_again_at_once(tmp_path: Path) -> None:
    live = Live(tmp_path)
    live.slow_worker(10.0)
    live.slow_worker(80.0)
    live.plane.nodes.undrain("n1")
    live.turn(81.0)
    assert live.used() == {0, 1, 2}


def test_a_slow_node_that_is_needed_is_reported_and_used(tmp_path: Path) -> None:
    live = Live(tmp_path, least=3)
    live.slow_worker(10.0)
    live.slow_worker(80.0)
    assert [node for node, _ in live.events(EventKind.NODE_SLOW)] == ["n1"]
    assert live.used() == {0, 1, 2} and not live.events(EventKind.NODE_LOST)
    (shown,) = [n for n in live.plane.nodes.states() if n.slow is not None]
    assert shown.name == "n1" and shown.avoided_until_s is None


def test_a_job_says_nothing_of_slots_that_are_not_its_own(tmp_path: Path) -> None:
    live = Live(tmp_path)
    other = next(j for j in live.ids if 2 not in live.plane.jobs.get(j).held)
    for at_s in (10.0, 80.0):
        live.platform.engine.say(other, "slow", {"slot": 2, "times": 2.5})
        live.turn(at_s)
    assert not live.events(EventKind.NODE_SLOW)


def test_a_node_on_which_no_worker_starts_is_avoided_at_once_and_named_and_used_again_when_it_comes_back(
    tmp_path: Path,
) -> None:
    live = Live(tmp_path, least=3)  # the jobs need all slots: the node is of no use all the same
    holder = next(j for j in live.ids if 2 in live.plane.jobs.get(j).held)
    live.platform.engine.say(holder, "unstartable", {"slot": 2, "cause": "home"})
    live.turn(10.0)
    assert 1 not in live.used()
    ((node, reason),) = live.events(EventKind.NODE_LOST)
    assert node == "n1" and reason == "avoided: no worker can be started there, it does not see swell's home"
    (shown,) = [n for n in live.plane.nodes.states() if n.unstartable]
    assert (shown.name, shown.slow, shown.avoided_until_s) == ("n1", None, 10.0 + AVOID_UNSTARTABLE_S)
    live.turn(10.0 + AVOID_UNSTARTABLE_S)
    assert live.used() == {0, 1, 2}
    holder = next(j for j in live.ids if 2 in live.plane.jobs.get(j).held)
    live.platform.engine.say(holder, "unstartable", {"slot": 2, "cause": "home"})
    live.turn(20.0 + AVOID_UNSTARTABLE_S)
    (shown,) = [n for n in live.plane.nodes.states() if n.unstartable]
    assert shown.avoided_until_s == 20.0 + 3 * AVOID_UNSTARTABLE_S, "twice as long the second time"
    live.platform.engine.set_node("n1", up=False)
    live.turn(30.0 + AVOID_UNSTARTABLE_S)
    live.platform.engine.set_node("n1", up=True)
    live.turn(31.0 + AVOID_UNSTARTABLE_S)
    assert live.used() == {0, 1, 2}


def test_one_job_cannot_take_the_nodes_out_of_use_one_after_another_and_two_jobs_that_agree_can() -> None:
    nodes = SlowNodes()
    for number in range(4):
        nodes.unstartable(f"n{number}", "home", "a", float(number))
    assert len(nodes.avoided(CLUSTER, 8, 5.0)) == 1
    for number in range(4):
        nodes.unstartable(f"n{number}", "home", "b", 10.0 + number)
    assert len(nodes.avoided(CLUSTER, 8, 15.0)) == 2


def test_a_node_that_did_not_reach_a_job_once_may_have_been_cut_off_for_a_moment() -> None:
    nodes = SlowNodes()
    assert nodes.unstartable("n1", "link", "a", 0.0) is None
    assert nodes.avoided(CLUSTER, 0, 1.0) == frozenset()
    assert nodes.unstartable("n1", "link", "a", 60.0) is not None
    assert nodes.avoided(CLUSTER, 0, 61.0) == {"n1"}


def test_a_node_that_does_not_answer_is_avoided_at_once_where_there_is_room() -> None:
    for needed, avoided in ((6, {"n1"}), (7, set())):
        nodes = SlowNodes()
        assert nodes.unstartable("n1", "silent", "a", 0.0) is not None
        assert nodes.avoided(CLUSTER, needed, 1.0) == avoided
        assert nodes.avoided(CLUSTER, 0, AVOID_SILENT_S) == frozenset()


def test_a_node_on_which_workers_start_again_and_are_slow_is_slow() -> None:
    nodes = SlowNodes()
    nodes.unstartable("n1", "home", "a", 0.0)
    later_s = AVOID_UNSTARTABLE_S + 1.0
    found(nodes, "n1", later_s)
    assert not nodes.trouble("n1") and nodes.avoided(CLUSTER, 8, later_s + 91.0) == frozenset()


def test_a_slow_node_is_remembered_over_a_restart(tmp_path: Path) -> None:
    live = Live(tmp_path)
    live.slow_worker(10.0)
    live.slow_worker(80.0)
    written = SlowNodes(json.loads(live.plane.store.setting("slow_nodes") or ""))
    assert written.avoided(CLUSTER, 0, 81.0) == {"n1"}
