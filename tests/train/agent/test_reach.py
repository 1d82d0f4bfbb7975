"""Cut links in the pure machine: who is left out, who waits, who comes back, and that the invariants hold."""

from __future__ import annotations

from itertools import chain, combinations
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.train.agent.test_membership import Play, announced, spawned

from swell.train.agent.membership import SETTLE_S, Announce, Candidate, Check, Fence, Instruction, Say
from swell.train.agent.protocol import Kill, Status, age, record
from swell.train.agent.reach import AGAIN_S, CHECK_S, HOLD_S, MOST_HOLD_S, Pair, connected, pair


def said(instructions: list[Instruction]) -> list[tuple[str, dict[str, Any]]]:
    lines = [record(i.event) for i in instructions if isinstance(i, Say)]
    return [(line.pop("event"), line) for line in lines]


def brute_force(names: list[str], cuts: set[Pair], keep: set[str]) -> list[str]:
    best: list[str] = []
    free = [name for name in names if name not in keep]
    for extra in chain.from_iterable(combinations(free, r) for r in range(len(free) + 1)):
        chosen = [name for name in names if name in keep or name in extra]
        torn = [p for p in map(frozenset, combinations(chosen, 2)) if p in cuts and not p <= keep]
        if torn:
            continue
        ages = sorted(map(age, chosen))
        if len(chosen) > len(best) or (len(chosen) == len(best) and ages < sorted(map(age, best))):
            best = chosen
    return best


@settings(max_examples=100)
@given(
    st.integers(1, 6), st.sets(st.tuples(st.integers(0, 6), st.integers(0, 6))), st.sets(st.integers(0, 6))
)
def test_the_largest_connected_set_is_found_and_of_several_the_oldest(
    size: int, raw: set[tuple[int, int]], kept: set[int]
) -> None:
    names = [f"w{i}" for i in range(size)]
    cuts = {pair(f"w{a}", f"w{b}") for a, b in raw if a != b}
    assert connected(names, cuts) == brute_force(names, cuts, set())
    keep = {f"w{i}" for i in kept if i < size}
    assert connected(names, cuts, keep) == brute_force(names, cuts, keep)


def test_many_members_and_many_cuts_take_no_time() -> None:
    names = [f"w{i}" for i in range(64)]
    halves = {pair(a, b) for a in names[:30] for b in names[30:]}
    assert connected(names, halves) == names[30:]
    pairs = {pair(names[i], names[i + 1]) for i in range(0, 64, 2)}
    assert connected(names, pairs) == names[::2]
    everybody = {pair(a, b) for a, b in combinations(names, 2)}
    assert connected(names, everybody) == ["w0"]


class Net(Play):
    """A job on hosts of which some do not reach each other; every worker is on a host of its own."""

    def __init__(self, target: int = 3, maximum: int = 5, **options: Any) -> None:
        super().__init__(target, maximum, host="head", **options)
        self.cuts: set[Pair] = set()

    def ready(self, *names: str) -> list[Instruction]:
        out: list[Instruction] = []
        for name in names:
            out += self.m.hello(name, (f"host-{name}", 1), "starting", 0, [], self.now)
            out += self.m.ready(name, self.m.generation.epoch, self.now)
        return out

    def cut(self, one: str, other: str) -> None:
        self.cuts.add(pair(one, other))

    def beats(self, *names: str) -> None:
        for name in names or tuple(self.m.workers):
            self.m.beat(name, self.m.step, self.now)

    def suspect(self, one: str, other: str) -> list[Instruction]:
        """One of the two notices, and everybody answers truthfully."""
        out = self.m.suspect(one, other, self.now)
        for check in [i for i in out if isinstance(i, Check)]:
            for name in check.to:
                missing = [o for o in check.to if pair(name, o) in self.cuts]
                out += self.m.checked(name, check.number, missing, self.now)
        return out


def test_of_two_that_lose_each_other_the_younger_is_left_out_and_the_others_go_on() -> None:
    net = Net.training(3)
    net.cut("w1", "w2")
    out = net.suspect("w2", "w1")
    assert announced(out) == Candidate(2, ("w0", "w1"), recovery=True)
    assert ("left_out", {"worker": "w2", "by": ["w1"]}) in said(out)
    assert Fence("w2") in out and Kill("w2") in out
    assert net.m.hello("w2", ("h", 1), "member", 1, ["w0", "w1", "w2"], net.now) == [Fence("w2")]
    assert net.m.exited("w2", 76, net.now) == []
    assert net.m.ending.fruitless == 0 and not net.m.ending.over


def test_the_oldest_is_left_out_if_nobody_reaches_it_whoever_speaks_first() -> None:
    net = Net.training(4)
    for other in ("w1", "w2", "w3"):
        net.cut("w0", other)
    out = net.suspect("w0", "w1")
    assert announced(out) == Candidate(2, ("w1", "w2", "w3"), recovery=True)
    assert ("left_out", {"worker": "w0", "by": ["w1", "w2", "w3"]}) in said(out)


def test_a_suspicion_that_nobody_confirms_changes_nothing() -> None:
    net = Net.training(3)
    out = net.suspect("w1", "w2")
    assert [type(i) for i in out] == [Check]
    assert net.suspect("w2", "w1") == [], "not again at once"
    net.now += AGAIN_S
    assert [type(i) for i in net.suspect("w2", "w1")] == [Check]


def test_a_check_that_somebody_does_not_answer_is_decided_without_it() -> None:
    net = Net.training(3)
    (check,) = net.m.suspect("w0", "w2", net.now)
    assert isinstance(check, Check)
    assert net.m.checked("w0", check.number, ["w2"], net.now) == []
    assert net.m.checked("w1", check.number, [], net.now) == []
    net.now += CHECK_S
    net.beats()
    assert announced(net.m.tick(net.now)) == Candidate(2, ("w0", "w1"), recovery=True)


def test_whoever_neither_answers_nor_is_reached_is_left_out_however_old() -> None:
    net = Net.training(2)
    (check,) = net.m.suspect("w1", "w0", net.now)
    assert isinstance(check, Check)
    assert net.m.checked("w1", check.number, ["w0"], net.now) == []
    net.now += CHECK_S
    net.beats("w1")
    assert announced(net.m.tick(net.now)) == Candidate(2, ("w1",), recovery=True)
    net = Net.training(3)
    (check,) = net.m.suspect("w1", "w0", net.now)
    assert isinstance(check, Check)
    net.m.checked("w1", check.number, ["w0"], net.now)
    out = net.m.checked("w2", check.number, ["w0"], net.now)
    assert announced(out) == Candidate(2, ("w1", "w2"), recovery=True), "the others need not wait for it"


def test_a_recovery_that_cannot_be_connected_is_replaced_by_one_that_can() -> None:
    net = Net.training(4)
    first = announced(net.m.exited("w3", -9, net.now))
    assert first is not None and first.members == ("w0", "w1", "w2")
    net.cut("w0", "w2")
    assert announced(net.suspect("w2", "w0")) == Candidate(3, ("w0", "w1"), recovery=True)


def test_a_newcomer_that_cannot_be_reached_waits_and_joins_when_it_can() -> None:
    net = Net.training(2)
    net.m.resize(3, net.now)
    net.ready("w2")
    net.cut("w1", "w2")
    out = net.suspect("w2", "w1")
    assert said(out) == [("unreachable", {"worker": "w2", "by": ["w1"]})]
    assert Announce(None, ("w0", "w1", "w2")) in out and net.m.generation.members == ["w0", "w1"]
    waits = HOLD_S
    for _ in range(5):
        net.now += waits - 0.1
        net.beats()
        assert announced(net.m.tick(net.now)) is None
        net.now += 0.2
        net.beats()
        assert announced(net.m.tick(net.now)) is not None, "it is tried again"
        assert said(net.suspect("w1", "w2")) == [], "and the event comes once"
        waits = min(2 * waits, MOST_HOLD_S)
    net.cuts.clear()
    net.now += waits
    net.beats()
    net.m.tick(net.now)
    net.switch()
    assert net.m.generation.members == ["w0", "w1", "w2"]


def test_whoever_comes_in_the_place_of_one_that_was_left_out_is_back() -> None:
    net = Net.training(3)
    net.cut("w0", "w2")
    net.suspect("w0", "w2")
    net.switch()
    net.now += SETTLE_S
    net.beats()
    (name,) = spawned(net.m.tick(net.now))
    net.ready(name)
    assert said(net.switch()) == [("back", {"worker": name, "instead_of": "w2"})]


def test_a_first_generation_begins_without_those_that_cannot_be_reached() -> None:
    net = Net(target=3)
    net.ready(*spawned(net.m.agent_connected([], 0.0)))
    net.cut("w0", "w2")
    out = net.suspect("w2", "w0")
    assert announced(out) == Candidate(2, ("w0", "w1"))


def test_a_coordinator_that_hears_nobody_waits_because_its_own_link_may_be_down() -> None:
    net = Net.training(3, silent_after_s=5.0, away_s=60.0)
    for name in net.m.generation.members:
        net.m.disconnected(name, net.now)
    for _ in range(50):
        net.now += 1.0
        assert net.m.tick(net.now) == []
    net.m.hello("w1", ("host-w1", 1), "member", 1, net.m.generation.members, net.now)
    net.now += 1.0
    assert net.m.tick(net.now) == [], "the others get the time to speak again"
    for _ in range(6):
        net.now += 1.0
        net.m.beat("w1", 9, net.now)
        out = net.m.tick(net.now)
        if out:
            break
    assert announced(out) == Candidate(3, ("w1",), recovery=True), "and are given up if they do not"
    net = Net.training(3, silent_after_s=5.0, away_s=60.0)
    for name in net.m.generation.members:
        net.m.disconnected(name, net.now)
    out = []
    for _ in range(62):
        net.now += 1.0
        out += net.m.tick(net.now)
    assert spawned(out), "in the end it begins again from the checkpoint"


def test_a_member_that_hangs_or_is_cut_off_alone_is_given_up_soon() -> None:
    for connected_ in (True, False):
        net = Net.training(3, silent_after_s=5.0, away_s=60.0)
        if not connected_:
            net.m.disconnected("w2", net.now)
        for _ in range(6):
            net.now += 1.0
            net.beats("w0", "w1")
            out = net.m.tick(net.now)
        assert announced(out) == Candidate(2, ("w0", "w1"), recovery=True)
        assert said(out)[0][0] == "left_out"


def test_a_standstill_is_told_once_for_each_step() -> None:
    net = Net.training(3)
    assert said(net.m.waiting(7, ["w2"], net.now)) == [("standstill", {"step": 7, "workers": ["w2"]})]
    assert net.m.waiting(7, ["w1", "w2"], net.now) == []
    assert net.m.waiting(8, ["gone"], net.now) == []
    assert said(net.m.waiting(8, ["w1"], net.now))


def test_a_newcomer_that_never_reached_the_coordinator_does_not_count_as_a_failure() -> None:
    net = Net.training(1, maximum=2)
    net.m.resize(2, net.now)
    name = next(n for n, w in net.m.workers.items() if w.status is Status.STARTING)
    for _ in range(20):
        (name,) = spawned(net.m.exited(name, 75, net.now))
    assert not net.m.ending.over


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("cut"), st.integers(0, 5), st.integers(0, 5)),
        st.tuples(st.just("heal"), st.just(0), st.just(0)),
        st.tuples(st.just("suspect"), st.integers(0, 5), st.integers(0, 5)),
        st.tuples(st.just("resize"), st.integers(1, 4), st.just(0)),
        st.tuples(st.just("kill"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("switch"), st.just(0), st.just(0)),
        st.tuples(st.just("silence"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("pass"), st.integers(1, 20), st.just(0)),
    ),
    min_size=5,
    max_size=40,
)


@settings(max_examples=200)
@given(EVENTS)
def test_with_links_cut_at_random_members_always_reach_each_other_in_the_end(
    events: list[tuple[str, int, int]],
) -> None:
    """200 random schedules: nobody commits twice, nobody fails, and when links are healed all are back."""
    net = Net(target=3, silent_after_s=5.0, maximum=4)
    out = net.m.agent_connected([], 0.0)

    def settle(rounds: int = 30) -> None:
        """Newcomers prepare, cut pairs are noticed, and whoever can switches."""
        nonlocal out
        for _ in range(rounds):
            net.now += 1.0
            for worker in [w for w in net.m.workers.values() if w.address and not w.connected]:
                address, status = worker.address, worker.status.value  # it finds the coordinator again
                net.m.hello(
                    worker.name, address, status, net.m.generation.number, net.m.generation.members, net.now
                )
            net.beats()
            net.ready(*(n for n, w in list(net.m.workers.items()) if w.status is Status.STARTING))
            net.m.tick(net.now)
            candidate = net.m.candidate
            together = [*net.m.generation.members, *(candidate.members if candidate is not None else ())]
            torn = [p for p in combinations(dict.fromkeys(together), 2) if pair(*p) in net.cuts]
            if torn:
                out = net.suspect(*torn[0])
            elif candidate is not None:
                # All are connected: it is entered (a recovery), or agreed on at the next step.
                net.switch()
            elif len(net.m.generation.members) == net.m.scale.target and net.now > net.m.quiet.calm_s:
                return

    numbers: list[int] = []
    for kind, a, b in events:
        net.now += 0.1
        names = sorted(net.m.workers, key=age)
        one = names[a % len(names)] if names else "w0"
        other = names[b % len(names)] if names else "w0"
        if kind == "cut" and one != other:
            net.cut(one, other)
        elif kind == "heal":
            net.cuts.clear()
        elif kind == "suspect" and one != other:
            out = net.suspect(one, other)
        elif kind == "resize":
            out = net.m.resize(a, net.now)
        elif kind == "kill" and one in net.m.workers:
            net.m.step += 1
            net.m.ending.fruitless = 0
            out = net.m.exited(one, -9, net.now)
        elif kind == "switch":
            settle(1)
        elif kind == "silence" and one in net.m.workers:
            net.m.disconnected(one, net.now)
        elif kind == "pass":
            for _ in range(a):
                net.now += 0.5
                net.beats(*(n for n, w in net.m.workers.items() if w.connected))
                net.m.tick(net.now)
        assert not net.m.ending.over, net.m.ending.result
        net.m.validate()
        assert all(member in net.m.workers for member in net.m.generation.members)
        numbers += [i.candidate.number for i in out if isinstance(i, Announce) and i.candidate is not None]
        assert numbers == sorted(numbers), "a number is never used twice"
        out = []
    settle()
    assert net.m.generation.members, "somebody trains"
    assert not [p for p in combinations(net.m.generation.members, 2) if pair(*p) in net.cuts], (
        "and all reach each other"
    )
    net.cuts.clear()
    settle(60)
    assert len(net.m.generation.members) == net.m.scale.target, "everybody is back"
