"""A worker's place in its job, by events and instructions alone; and the link around it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.train.agent.test_strangers import Running
from tests.waiting import wait_until

from swell.train.agent.errors import FENCED, PeerLost
from swell.train.agent.protocol import (
    Broken,
    Fenced,
    GoToEpoch,
    NextGeneration,
    Offer,
    Ready,
    SaveAndLeave,
    Suspect,
    Switched,
    TryReach,
    Waiting,
    Welcome,
)
from swell.train.agent.wire import Connection
from swell.train.sync.control import STOP, Abandon, Connect, End, Link, Send, Standing, Try


def candidate(number: int, members: str, *, recovery: bool = False, epoch: int = 0) -> NextGeneration:
    names = tuple(members.split())
    return NextGeneration(Offer(number, names, dict.fromkeys(names, ("10.0.0.1", 7)), epoch, recovery))


def mesh(number: int, members: str = "w0 w1") -> Any:
    return SimpleNamespace(
        number=number, members=tuple(members.split()), broken=False, lost="", certain=False
    )


@pytest.fixture
def member() -> Standing:
    """w0, in generation 1 with w1."""
    made = Standing("w0", lease_s=10.0)
    made.hear(Welcome())
    assert made.ready(0) == [Send(Ready(0))]
    (connect,) = made.hear(candidate(1, "w0 w1"))
    assert isinstance(connect, Connect) and connect.offer.addresses["w1"] == ("10.0.0.1", 7)
    assert made.joinable() is None
    first = mesh(1)
    assert made.connected(first) and made.joinable() is first
    made.enter(first, 0, 0)
    return made


def test_a_candidate_is_taken_once_it_is_connected(member: Standing) -> None:
    assert member.pick(0) == 0
    (connect,) = member.hear(candidate(2, "w0 w1 w2"))
    assert isinstance(connect, Connect)
    assert member.pick(0) == 0, "not connected yet"
    second = mesh(2, "w0 w1 w2")
    assert member.connected(second)
    assert member.pick(1) == 0, "the newcomer is in another epoch"
    assert member.pick(0) == 2 and member.take(2) is second
    assert member.brings_newcomers(2) and not member.brings_newcomers(1)
    (said,) = member.enter(second, 5, 0)
    assert isinstance(said, Send) and said.message == Switched(2, second.members, 0, 5)
    assert member.hello(7, ("10.0.0.1", 7)).generation == 2


def test_what_was_agreed_on_is_kept_until_it_is_released_unless_a_death_comes_between(
    member: Standing,
) -> None:
    member.hear(candidate(2, "w1"))
    assert member.pick(0) == 2 and member.take(2) is None, "this worker has to leave"
    assert member.hear(candidate(3, "w0 w1 w3")) == [] and member.take(2) is None
    (connect,) = member.release()
    assert isinstance(connect, Connect) and connect.offer.number == 3
    assert member.hear(candidate(3, "w0 w1 w3")) == [], "the same again only brings addresses"
    member.hold(3)
    out = member.hear(candidate(4, "w0", recovery=True))
    assert out[0] == Abandon(member.current) and isinstance(out[1], Connect)  # type: ignore[arg-type]
    with pytest.raises(PeerLost, match="replaced"):
        member.take(3)


def test_a_mesh_of_a_candidate_that_was_replaced_is_given_up(member: Standing) -> None:
    member.hear(candidate(2, "w0 w1 w2"))
    second = mesh(2)
    member.connected(second)
    assert member.hear(candidate(3, "w1")) == [Abandon(second)]
    assert not member.connected(mesh(2)), "connected too late"
    assert member.hear(NextGeneration()) == [] and member.pick(0) == 0


def test_a_broken_generation_is_replaced_with_or_without_this_worker(member: Standing) -> None:
    (said,) = member.broke(mesh(1), 7)
    assert said == Send(Broken(1, 7)) and member.hello(7, ("10.0.0.1", 7)).broken == 1
    assert member.replacement(1) is False
    member.hear(candidate(2, "w0 w1"))
    assert member.replacement(1) is False, "that is no recovery"
    member.hear(candidate(3, "w0", recovery=True))
    assert member.replacement(1) is False and member.pick(0) == 0
    third = mesh(3, "w0")
    member.connected(third)
    assert member.replacement(1) is third
    member.hear(candidate(4, "w1", recovery=True))
    assert member.replacement(1) is True


def test_a_newcomer_follows_the_job_to_its_epoch_even_to_the_first() -> None:
    newcomer = Standing("w2")
    newcomer.ready(3)
    newcomer.hear(GoToEpoch(3))
    assert newcomer.joinable() is None
    newcomer.hear(GoToEpoch(0))
    assert newcomer.joinable() == 0 and newcomer.status == "starting"
    newcomer.ready(0)
    assert newcomer.joinable() is None


def test_without_its_coordinator_a_worker_goes_on_for_its_lease(member: Standing) -> None:
    assert member.away(100.0) == [] and member.away(109.0) == []
    assert member.away(110.5) == [Abandon(member.current)]  # type: ignore[arg-type]
    member.hear(Welcome())
    assert member.away(200.0) == [], "it was there in between"
    near = Standing("w1")
    near.welcome, near.current = Welcome(), mesh(1)
    assert near.away(0.0) == near.away(1e6) == [], "on one host both end together"


def test_links_and_standstills_are_reported_now_and_then(member: Standing) -> None:
    assert member.suspect("w1", 0.0) == [Send(Suspect("w1"))]
    assert member.suspect("w1", 0.3) == [] and member.suspect("w2", 0.3) and member.suspect("w1", 0.6)
    waits: Any = SimpleNamespace(exchange=(1, 4, 0), since_s=2.0, workers=["w1"])
    assert member.standstill(waits, 4, 1.0) == [], "a step takes a second"
    assert member.standstill(waits, 4, 0.1) == [Send(Waiting(4, ("w1",)))]
    assert member.standstill(waits, 4, 0.1) == [] and member.standstill(None, 5, 0.1) == []


def test_orders_of_the_coordinator(member: Standing) -> None:
    assert member.hear(Fenced()) == [End(FENCED)]
    there = {"w0": ("10.0.0.1", 1), "w1": ("10.0.0.2", 2), "w2": None}
    assert member.hear(TryReach(3, there)) == [Try(3, {"w1": ("10.0.0.2", 2)})]
    member.hear(SaveAndLeave())
    assert member.stop


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    made = Running(tmp_path / "job")
    yield made
    made.stop()


def test_a_link_joins_trains_recovers_and_ends(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread, the sockets and a coordinator around the machine."""
    monkeypatch.delenv("SWELL_LAUNCH", raising=False)
    agent = Connection.open(running.address, "s", timeout_s=30.0)
    agent.send({"type": "hello", "role": "agent"})
    while (spawn := agent.receive(20.0))["type"] != "spawn":
        pass
    link = Link(running.job, spawn["worker"])
    try:
        assert link.welcome().live is False
        link.announce_ready(0)
        joined = link.wait_join()
        assert not isinstance(joined, int) and joined.members == (link.name,)
        link.entered(joined, 3, 0)
        link.report = {"step": 3}
        wait_until(lambda: running.status()["generation"] == joined.number, 20, "the switch to be known")
        assert link.offer(0) == 0
        after = link.wait_recovery(joined, 1)
        assert after.recovery and after.number > joined.number
        link.entered(after, 4, 0)
        wait_until(lambda: running.status()["reports"] == {link.name: {"step": 3}}, 20, "the report")
        tool = Connection.open(running.address, "s")
        tool.request({"type": "hello", "role": "tool"})
        tool.request({"type": "stop", "save": True})
        wait_until(lambda: link.offer(0) == STOP, 20, "the order to stop")
        tool.close()
        link.done(2)
        link.flush()
        wait_until(lambda: running.status()["workers"] == {link.name: "done"}, 20, "the end to be known")
    finally:
        link.close()
        agent.close()
