"""Members that stay slower than the others are found and replaced, and nobody else is."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.train.agent.test_membership import Play, announced, spawned

from swell.train.agent.membership import SETTLE_S, Instruction, Say
from swell.train.agent.protocol import record
from swell.train.agent.stragglers import LINK_SLOWER, PERSISTS_S, REST_S, SLOWER, Stragglers, slow_hosts
from swell.train.reporting import LEAST_LINK_BYTES, MOST_OWN, LinkTimes, StepTimes


class Watched:
    """A job whose members take these times for a step of 8 samples each."""

    def __init__(self, workers: int = 3, **options: Any) -> None:
        self.play = Play.training(workers, **options)
        self.found = Stragglers()
        self.step = 0

    def goes_on(self, for_s: float, samples: int | dict[str, int] = 8, **own_s: float) -> list[Instruction]:
        out: list[Instruction] = []
        for _ in range(round(2 * for_s)):
            self.step += 10
            self.play.now += 0.5
            for name in self.play.m.generation.members:
                self.play.m.beat(name, self.step, self.play.now)
                many = samples if isinstance(samples, int) else samples.get(name, 8)
                report = {
                    "generation": self.play.m.generation.number,
                    "own_s": own_s.get(name, 0.01),
                    "samples": many,
                }
                self.found.heard(name, report | {"step": self.step})
            out += [*self.found.tick(self.play.m, self.play.now), *self.play.m.tick(self.play.now)]
        return out


def said(out: list[Instruction]) -> list[dict[str, Any]]:
    events = [record(i.event) for i in out if isinstance(i, Say)]
    return [event for event in events if event.pop("event") == "straggler"]


@pytest.mark.parametrize("slow", ["w0", "w1", "w2"])
def test_a_member_at_half_speed_leaves_and_another_comes(slow: str) -> None:
    job = Watched()
    assert said(job.goes_on(PERSISTS_S, **{slow: 0.02})) == []
    out = job.goes_on(5.0, **{slow: 0.02})
    leader = {"leader": True} if slow == "w0" else {}
    assert said(out) == [{"worker": slow, "times": 2.0} | leader]
    staying = tuple(m for m in ("w0", "w1", "w2") if m != slow)
    candidate = announced(out)
    assert candidate is not None and candidate.members == staying and not candidate.recovery
    job.play.switch()
    assert spawned(out + job.play.m.tick(job.play.now + SETTLE_S)) == ["w3"]
    job.play.ready("w3")
    job.play.switch()
    assert job.play.m.generation.members == [*staying, "w3"]


def test_its_slot_is_named_and_gets_the_new_worker() -> None:
    job = Watched(2, slots=(4, 7))
    job.goes_on(PERSISTS_S, w1=0.03)
    out = job.goes_on(5.0, w1=0.03)
    assert said(out) == [{"worker": "w1", "times": 3.0, "slot": 7}]
    job.play.switch()
    job.play.m.exited("w1", 0, job.play.now)
    job.play.m.tick(job.play.now + SETTLE_S)
    assert [w.slot for w in job.play.m.workers.values()] == [4, 7]


def test_nobody_is_replaced_for_a_moment_or_a_little_or_because_it_has_more_to_do() -> None:
    job = Watched()
    for _ in range(4):
        assert said(job.goes_on(PERSISTS_S / 2, w1=0.05)) == []
        assert said(job.goes_on(2.0)) == []
    assert said(job.goes_on(60.0, w1=0.01 * SLOWER * 0.95)) == []
    assert said(job.goes_on(60.0, samples={"w1": 16}, w1=0.02)) == []
    assert said(Watched(1).goes_on(60.0, w0=0.5)) == []


def test_each_replacement_is_followed_by_a_longer_rest() -> None:
    job = Watched(2)
    times_s = []
    for _ in range(2000):
        if said(job.goes_on(0.5, **{job.play.m.generation.members[-1]: 0.05})):
            times_s.append(job.play.now)
        while job.play.m.candidate is not None:
            job.play.switch()
        job.play.ready(*(w.name for w in job.play.m.workers.values() if w.status.value == "starting"))
    rests = [b - a for a, b in pairwise(times_s)]
    assert len(rests) >= 3 and rests[0] >= REST_S and all(b >= 1.9 * a for a, b in pairwise(rests))


SLOW_2 = lambda a, b: 0.8 if "2" in (a, b) else 0.01  # noqa: E731
"""Seconds for a megabyte from one host to another, if the links of host 2 are slow."""


class Linked:
    """A job with workers on some hosts, whose links take these seconds for a megabyte."""

    def __init__(self, hosts: int = 4, per_host: int = 1) -> None:
        count = hosts * per_host
        self.play, self.found = Play.training(count, maximum=count), Stragglers()
        for worker in self.play.m.workers.values():
            number = int(worker.name[1:])
            worker.address, worker.slot = (f"10.0.0.{number // per_host}", 7), 10 + number

    def goes_on(
        self, for_s: float, mb_s: Callable[[str, str], float], *, megabytes: float = 10.0, own_s: float = 0.1
    ) -> list[dict[str, Any]]:
        """`mb_s`: given two hosts, the seconds for a megabyte from the first to the second."""
        m, out = self.play.m, list[Instruction]()
        host = {name: w.address[0][-1] for name, w in m.workers.items() if w.address is not None}
        far = [(a, b) for a in host for b in host if host[a] != host[b]]
        longest_s = max(mb_s(host[a], host[b]) for a, b in far) * megabytes
        for beat in range(round(2 * for_s)):
            self.play.now += 0.5
            for name in m.generation.members:
                rates = {a: float(mb_s(host[a], host[b])) for a, b in far if b == name}
                report = {"generation": m.generation.number, "step": beat, "own_s": own_s, "samples": 8}
                report |= {"step_s": own_s + longest_s, "links": rates}
                self.found.heard(name, report | {"link_s": max(rates.values()) * megabytes})
            out += self.found.tick(m, self.play.now)
        return said(out)


def test_the_worker_of_a_host_with_slow_links_is_replaced_and_its_place_named() -> None:
    job = Linked()
    assert job.goes_on(PERSISTS_S, SLOW_2) == []
    (event,) = job.goes_on(5.0, SLOW_2)
    assert event == {"worker": "w2", "times": 80.0, "slot": 12, "link": True}


def test_a_slow_direction_is_enough_and_the_leader_has_no_excuse() -> None:
    (event,) = Linked(3).goes_on(PERSISTS_S + 5, lambda a, b: 0.8 if a == "0" else 0.01)
    assert (event["worker"], event["link"], event.get("leader")) == ("w0", True, None)


def test_of_two_hosts_with_one_slow_link_the_one_with_the_younger_worker_is_at_fault() -> None:
    (event,) = Linked().goes_on(PERSISTS_S + 5, lambda a, b: 0.8 if {a, b} == {"1", "3"} else 0.01)
    assert event["worker"] == "w3"
    (event,) = Linked(3, per_host=2).goes_on(PERSISTS_S + 5, lambda a, b: 0.8 if "0" in (a, b) else 0.01)
    assert event["worker"] == "w1", "of the workers on the host it is the one that does not lead"


def test_no_healthy_link_is_called_slow() -> None:
    """An even network is nobody's fault, however slow it is; nor is a link that nobody waits for."""
    seconds = 3 * PERSISTS_S
    assert Linked().goes_on(seconds, lambda a, b: 0.8) == []
    assert Linked(2).goes_on(seconds, lambda a, b: 0.8) == [], "of two nobody can tell"
    uneven = {0: 0.2, 1: 0.35, 2: 0.5, 3: 0.7}
    assert Linked().goes_on(seconds, lambda a, b: uneven[(int(a) + 3 * int(b)) % 4]) == []
    assert Linked().goes_on(seconds, lambda a, b: 0.01 if {a, b} == {"0", "1"} else 0.8) == [], (
        "most are slow"
    )
    assert Linked().goes_on(seconds, SLOW_2, megabytes=0.1, own_s=0.3) == [], "it is a small part of a step"
    job = Linked()
    for _ in range(4):
        assert job.goes_on(PERSISTS_S / 2, SLOW_2) == [] == job.goes_on(2.0, lambda a, b: 0.01)


@given(st.integers(3, 8), st.floats(1e-4, 10.0), st.randoms(use_true_random=False))
def test_links_that_differ_by_less_than_the_limit_are_all_healthy(
    count: int, rate: float, draw: Random
) -> None:
    both = [frozenset((f"h{a}", f"h{b}")) for a in range(count) for b in range(a)]
    assert slow_hosts({pair: rate * draw.uniform(1, 0.99 * LINK_SLOWER) for pair in both}) == ([], 1.0)
    assert slow_hosts({p: rate * (10 * LINK_SLOWER if "h1" in p else 1) for p in both})[0] == ["h1"]


def test_a_host_with_slow_links_is_found_by_the_only_fast_link_beside_it() -> None:
    to_h1 = {frozenset(("h1", other)): 0.8 for other in ("h0", "h2", "h3")}
    assert slow_hosts({**to_h1, frozenset(("h0", "h2")): 0.01}) == (["h1"], 80.0)


def test_link_times_are_means_over_steps_and_little_data_says_nothing() -> None:
    times = LinkTimes()
    for _ in range(100):
        times.add(3, {"w1": (10 * LEAST_LINK_BYTES, 0.05), "w2": (LEAST_LINK_BYTES // 2, 0.5)}, 0.1)
    found = times.report()
    assert found["links"] == {"w1": pytest.approx(1e6 * 0.05 / (10 * LEAST_LINK_BYTES), rel=0.01)}
    assert found["link_s"] == pytest.approx(0.05)
    for _ in range(100):
        times.add(3, {"w1": (10 * LEAST_LINK_BYTES, 0.5)}, 0.1)
    assert times.report()["link_s"] == pytest.approx(0.5, rel=0.1)
    times.add(4, {}, 0.1)
    assert times.report() == {}, "the members of the next generation have links of their own"


@settings(max_examples=50)
@given(st.dictionaries(st.text(), st.one_of(st.none(), st.integers(), st.floats(), st.text(), st.booleans())))
def test_whatever_a_heartbeat_says_it_does_no_harm(report: dict[str, Any]) -> None:
    found, play = Stragglers(), Play.training(2)
    found.heard("w0", report)
    found.heard("w1", {"generation": 1, "links": report, "link_s": 1.0, "step_s": 0.0} | report)
    assert found.tick(play.m, 1e6) == []


def test_the_mean_of_a_workers_own_time_follows_soon_and_one_long_step_is_no_pace() -> None:
    pace = StepTimes()
    for _ in range(200):
        pace.add((1,), 0.01, 0.001, 0.009)
    pace.add((1,), 5.0, 0.001, 4.999)
    assert pace.own_s <= (1 + 0.25 * (MOST_OWN - 1)) * 0.009 * 1.01
    for _ in range(300):
        pace.add((1,), 0.02, 0.001, 0.019)
    assert pace.own_s == pytest.approx(0.019, rel=0.1)


SLOW_SCRIPT = """
import os, pathlib, time, torch, swell
data = torch.utils.data.TensorDataset(torch.zeros(4096, 4))
model = torch.nn.Linear(4, 1)
job = swell.elastic(model, torch.optim.SGD(model.parameters(), lr=0.01))
slow = pathlib.Path("slow")
for epoch in job.epochs(100):
    for (x,) in job.loader(data, batch_size=8, shuffle=True):
        time.sleep(0.15 if slow.exists() and slow.read_text() == str(os.getpid()) else 0.05)
        job.step(model(x).mean())
"""


def test_a_real_worker_that_becomes_slow_is_replaced_and_nothing_is_lost(stage: Any, tmp_path: Any) -> None:
    script = tmp_path / "train.py"
    script.write_text(SLOW_SCRIPT.replace('"slow"', f'"{tmp_path}/slow"'))
    job = stage.run(script, workers=2, maximum=2)
    status = job.members(2)
    (tmp_path / "slow").write_text(str(status["pids"][status["members"][1]]))
    job.wait_for(lambda s: len(s["members"]) == 2 and s["members"][1] != status["members"][1], 90)
    found = job.events("straggler")
    assert [e["worker"] for e in found] == [status["members"][1]] and found[0]["times"] > SLOWER
    assert not job.events("recovery"), "it left at the end of a step"
