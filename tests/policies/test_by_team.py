"""Teams and classes: who may use which slots, under every policy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swell.domain import OTHERS, Cluster, Event, EventKind, InputError, Team, Teams, entitled
from swell.policies import Policy, make_policy
from swell.policies.base import gives_promises
from swell.policies.by_team import FIRST, by_team, share_slots
from swell.policies.by_type import ByType, by_type
from swell.policies.registry import policy_names

TWO = Teams.parse("red=4,blue=4")
FAST = [name for name in policy_names() if name not in ("pollux", "tide")] + ["pollux:generations=2"]


# -- the arithmetic ------------------------------------------------------------------------------------


@given(st.dictionaries(st.sampled_from("abcd"), st.integers(0, 20), max_size=4), st.integers(0, 60))
def test_entitlements_use_all_slots_and_no_team_has_more_than_its_quota(
    quotas: dict[str, int], capacity: int
) -> None:
    own = entitled(quotas, capacity)
    cut = Teams(tuple(Team(name=name, slots=slots) for name, slots in quotas.items())).within(capacity)
    assert cut.quotas == {name: own[name] for name in quotas}, "estimates would plan with other quotas"
    assert sum(own.values()) == capacity
    assert all(0 <= own[name] <= quota for name, quota in quotas.items())
    if sum(quotas.values()) <= capacity:
        assert {name: own[name] for name in quotas} == quotas


demands = st.lists(st.lists(st.integers(0, 30), min_size=3, max_size=3), min_size=1, max_size=4)


@given(demands, st.data())
def test_shares_give_every_team_its_own_and_lend_what_is_idle(wanted: list[list[int]], data: Any) -> None:
    own = np.array([data.draw(st.integers(0, 10)) for _ in wanted])
    capacity = int(own.sum()) + data.draw(st.integers(0, 10))
    demand = np.array(wanted)
    shares, total = share_slots(own, demand, capacity), demand.sum(axis=1)
    assert shares.sum() == min(capacity, total.sum()), "a slot is idle that a team could use"
    assert np.all(shares <= total)
    assert np.all(shares >= np.minimum(own, total)), "a team is below its quota while it has work"


def test_borrowed_slots_go_to_the_highest_class_first_and_inside_a_class_in_equal_parts() -> None:
    own = np.array([0, 0, 0])
    demand = np.array([[4, 0, 0], [0, 9, 0], [0, 9, 0]])
    assert share_slots(own, demand, 10).tolist() == [4, 3, 3]
    assert share_slots(own, demand, 3).tolist() == [3, 0, 0]


# -- under every policy --------------------------------------------------------------------------------


def _checked(policy: Policy, snapshot: Any, teams: Teams) -> dict[str, int]:
    """Ask a policy with teams and check what must hold at every moment; the slots of each team."""
    shared = by_team(policy, teams)
    decision = shared.allocate(snapshot)
    assert np.all(decision.gpus >= 0) and decision.gpus.sum() <= snapshot.capacity
    if decision.per_node is not None:
        assert np.all(decision.per_node.sum(axis=0) <= snapshot.cluster.node_gpus)
        assert np.array_equal(decision.per_node.sum(axis=1), decision.gpus)
    assert decision.order is None or sorted(decision.order.tolist()) == list(range(len(snapshot)))
    names = np.array(snapshot.team)
    used = {name: int(decision.gpus[names == name].sum()) for name in [*teams.quotas, OTHERS]}
    own = entitled(teams.quotas, snapshot.capacity)
    for name, use in shared.uses.items():
        assert use.used == used[name]
        assert use.offered >= min(own[name], use.demand), "a team is not offered its own"
        others = [other for other in shared.uses if other != name]
        idle = sum(max(own[other] - used[other], 0) for other in others)
        assert use.borrowed <= idle, "slots were borrowed that were not idle"
    return used


@pytest.mark.parametrize("name", FAST)
@settings(max_examples=12)
@given(data=st.data())
def test_no_team_is_below_its_quota_or_above_what_is_idle(name: str, data: Any, snapshots: Any) -> None:
    snapshot = data.draw(snapshots)
    jobs = len(snapshot.table)
    snapshot.table.team[:] = [data.draw(st.sampled_from(["red", "blue", OTHERS])) for _ in range(jobs)]
    snapshot.table.priority[:] = [data.draw(st.sampled_from([0, 1, 2])) for _ in range(jobs)]
    red = data.draw(st.integers(0, snapshot.capacity))
    blue = data.draw(st.integers(0, snapshot.capacity - red))
    policy = make_policy(name)
    if policy.knows == "fitted":
        return  # its beliefs are not part of these snapshots; test_a_day_of_two_teams runs it
    _checked(policy, snapshot, Teams.parse(f"red={red},blue={blue}"))


ELASTIC = ["max-min", "tide-fixed", "elasticflow", "afs-l", "optimus"]


@pytest.mark.parametrize("name", ELASTIC)
def test_idle_slots_are_borrowed_and_come_back_with_the_next_decision(name: str, make_snapshot: Any) -> None:
    alone = make_snapshot(1, cluster="2x4", team=["red"])
    shared = by_team(make_policy(name), TWO)
    assert shared.allocate(alone).gpus.tolist() == [8]
    assert shared.uses["red"].borrowed == 4
    both = make_snapshot(2, cluster="2x4", gpus=[8, 0], team=["red", "blue"])
    assert shared.allocate(both).gpus.tolist() == [4, 4]
    assert shared.uses["red"].borrowed == 0


def test_a_running_job_of_fifo_gives_borrowed_slots_back_too(make_snapshot: Any) -> None:
    shared = by_team(make_policy("fifo"), TWO)
    columns = {"requested": [4, 4, 4], "team": ["red", "red", "blue"]}
    assert shared.allocate(make_snapshot(2, requested=4, team=["red", "red"])).gpus.tolist() == [4, 4]
    assert shared.allocate(make_snapshot(3, gpus=[4, 4, 0], **columns)).gpus.tolist() == [4, 0, 4]


def test_users_in_no_team_have_what_no_quota_takes(make_snapshot: Any) -> None:
    shared = by_team(make_policy("max-min"), Teams.parse("red=2"))
    snapshot = make_snapshot(2, cluster="2x4", team=["red", OTHERS])
    assert shared.allocate(snapshot).gpus.tolist() == [2, 6]


@pytest.mark.parametrize("name", ["max-min", "tide-fixed", "elasticflow"])
def test_a_higher_class_goes_first_within_its_team_only(name: str, make_snapshot: Any) -> None:
    snapshot = make_snapshot(3, cluster="2x4", team=["red", "red", "blue"], priority=[1, 2, 0])
    assert by_team(make_policy(name), TWO).allocate(snapshot).gpus.tolist() == [0, 4, 4]
    bounded = make_snapshot(
        3, cluster="2x4", team=["red", "red", "blue"], priority=[1, 2, 0], max_gpus=[8, 2, 8]
    )
    assert by_team(make_policy(name), TWO).allocate(bounded).gpus.tolist() == [2, 2, 4]


@pytest.mark.parametrize("name", ["elasticflow", "tide-fixed", "edf-admission"])
def test_a_promise_counts_on_the_quota_and_never_on_borrowed_slots(name: str, make_snapshot: Any) -> None:
    # Alone on 8 slots the job needs 125 s, on the 4 of its team 250 s.
    for deadline_s, admitted in ((200.0, False), (300.0, True)):
        snapshot = make_snapshot(1, cluster="2x4", team=["red"], deadline_s=deadline_s)
        assert by_team(make_policy(name), TWO).admit(snapshot, 0).admitted is admitted
        assert make_policy(name).admit(snapshot, 0).admitted


def test_a_promised_job_of_a_low_class_is_not_starved_by_a_high_one(make_snapshot: Any) -> None:
    columns: dict[str, Any] = {"team": ["red", "red"], "priority": [0, 2], "deadline_s": [300.0, np.inf]}
    shared = by_team(make_policy("elasticflow"), TWO)
    first = make_snapshot(2, cluster="2x4", rows=[0], **columns)
    shared.accepted(first, 0, shared.admit(first, 0))
    gpus = shared.allocate(make_snapshot(2, cluster="2x4", **columns)).gpus
    assert gpus[0] >= 1 and not len(shared.endangered(make_snapshot(2, cluster="2x4", **columns)))


def test_without_teams_and_classes_the_policy_decides_as_ever(make_snapshot: Any) -> None:
    snapshot = make_snapshot(3, cluster="2x4", requested=[2, 4, 2])
    for name in ("max-min", "fifo", "elasticflow"):
        plain, wrapped = make_policy(name).allocate(snapshot), by_team(make_policy(name)).allocate(snapshot)
        assert np.array_equal(plain.gpus, wrapped.gpus) and wrapped.order is plain.order


# -- what is refused -----------------------------------------------------------------------------------


def test_a_promised_gpu_type_is_kept_by_teams_that_were_asked_and_by_those_that_were_not() -> None:
    policy = by_team(by_type(make_policy("edf-admission"), Cluster.parse("1x4:t4,1x4:a100")), TWO)
    asked = policy._policy_of("red", FIRST)
    policy.keep_promises({7: "a100"})
    for inner in (asked, policy._policy_of("blue", FIRST)):
        assert isinstance(inner, ByType) and inner._promised == {7: "a100"}


@pytest.mark.parametrize(("name", "promises"), [("max-min", False), ("edf-admission", True)])
def test_a_policy_gives_promises_as_the_one_inside_does(name: str, promises: bool) -> None:
    inner = make_policy(name)
    typed = by_type(inner, Cluster.parse("1x4:t4,1x4:a100"))
    assert [gives_promises(p) for p in (inner, typed, by_team(typed, TWO))] == [promises] * 3


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Teams.parse("red"), "teams"),
        (lambda: Teams.parse("red=4,red=2"), "name"),
        (lambda: Team(name="-red", slots=1), "name"),
        (lambda: Team(name="red", slots=-1), "slots"),
        (lambda: Teams.from_json([{"name": name, "slots": 1, "users": ["u"]} for name in "ab"]), "users"),
        (lambda: Teams.parse("red=4,blue=5").check_fits(8), "slots"),
    ],
)  # fmt: skip
def test_a_bad_team_is_refused_by_field(make: Any, field: str) -> None:
    with pytest.raises(InputError) as refused:
        make()
    assert refused.value.field == field


def test_a_team_without_a_name_is_refused() -> None:
    with pytest.raises(InputError, match="must have a name"):
        Teams.parse("=0")


def test_teams_come_back_from_json_as_they_were() -> None:
    teams = Teams((Team(name="red", slots=3, users=("ann", "ben")), Team(name="blue", slots=0)))
    assert Teams.from_json(teams.to_json()) == teams
    assert (teams.of("ben"), teams.of("eve")) == ("red", OTHERS)


# -- a whole day, in the simulator ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["max-min", "fifo", "elasticflow", "tide-fixed", "pollux:generations=2"])
def test_a_day_of_two_teams(name: str) -> None:
    from benchmarks.teams import Watch, watch_decisions

    from swell.domain import Cluster
    from swell.perf.profiles import ProfileSet
    from swell.sim import simulate
    from swell.sim.generate import generate_jobs

    profiles, cluster = ProfileSet.load(None), Cluster.parse("4x4:T4")
    jobs = generate_jobs(
        profiles, jobs=30, hours=1.5, seed=2, max_gpu_hours=5.0, max_gpus=8, gpu_type="T4", teams=("a", "b")
    )
    jobs = [replace(job, gpus=min(job.gpus, 8)) for job in jobs]
    teams, policy = Teams.parse("a=8,b=8"), make_policy(name)
    watch = Watch(jobs, teams.quotas, rigid=policy.rigid)
    watched = watch_decisions(by_team(policy, teams), watch)
    events: list[Event] = []

    def hear(event: Event) -> None:
        watch.hear(event)
        events.append(event)

    record = simulate(jobs, profiles, cluster, watched, resize_cost=10.0, teams=teams, on_event=hear).record()
    assert record["finished"] == len(jobs)
    assert watch.most_borrowed > 0, "nothing was borrowed, so nothing was tried here"
    assert max(watch.returns_s, default=0.0) <= (policy.interval_s or 0.0)
    told = next(event for event in events if event.kind is EventKind.SUBMITTED)
    assert told.data["team"] in ("a", "b")
