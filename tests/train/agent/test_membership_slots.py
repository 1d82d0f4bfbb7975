"""Membership of jobs whose workers have places of their own: who leaves is who is on the wrong slot."""

from __future__ import annotations

import json

import pytest

from swell.train.agent.membership import (
    AWAY_S,
    CUT_OFF_S,
    LEAVE_S,
    MAX_FRUITLESS_DEATHS,
    SHUT_S,
    Announce,
    Candidate,
    Fence,
    Instruction,
    Membership,
    Rules,
    Scale,
)
from swell.train.agent.membership_json import from_json, to_json
from swell.train.agent.protocol import Finish, Kill, Spawn


class Play:
    """A job on slots, driven by hand."""

    def __init__(self, *slots: int, minimum: int = 1) -> None:
        self.m = Membership(Scale(minimum, 8, len(slots), slots), Rules(gather_s=0.0))
        self.now = 0.0
        self.join(self.m.agent_connected([], self.now))

    def join(self, out: list[Instruction]) -> None:
        """Whoever is started gets ready, and every candidate is switched to until there is none."""
        for name in [i.worker for i in out if isinstance(i, Spawn)]:
            self.m.hello(name, ("127.0.0.1", 1), "starting", 0, [], self.now)
            self.m.ready(name, self.m.generation.epoch, self.now)
        self.settle()

    def settle(self) -> None:
        for _ in range(5):
            if self.m.candidate is None:
                return
            before = set(self.m.generation.members)
            self.m.switched(self.m.candidate.number, list(self.m.candidate.members), self.now)
            for name in before - set(self.m.generation.members):
                self.m.exited(name, 0, self.now)

    @property
    def on(self) -> list[int | None]:
        return [self.m.workers[name].slot for name in self.m.generation.members]


def candidates(out: list[Instruction]) -> list[Candidate]:
    return [i.candidate for i in out if isinstance(i, Announce) and i.candidate is not None]


def spawns(out: list[Instruction]) -> list[int | None]:
    return [i.slot for i in out if isinstance(i, Spawn)]


@pytest.mark.parametrize("told_first", ["by the leaver", "by the others"])
def test_a_leaver_that_does_not_end_is_killed_once_because_its_slot_is_meant_for_somebody_else(
    told_first: str,
) -> None:
    play = Play(0, 1)
    leaver = play.m.generation.members[1]
    play.m.resize(1, 0.0, [0])
    assert play.m.candidate is not None
    number, members = play.m.candidate.number, list(play.m.candidate.members)
    if told_first == "by the leaver":
        play.m.left(leaver, number, 1.0)
        play.m.switched(number, members, 1.2)
    else:
        play.m.switched(number, members, 1.0)
        play.m.left(leaver, number, 1.2)
    assert Kill(leaver) not in play.m.tick(1.0 + LEAVE_S)
    assert Kill(leaver) in play.m.tick(1.01 + LEAVE_S), "the time counts from the first word of it"
    assert Kill(leaver) not in play.m.tick(2.0 + LEAVE_S)
    assert play.m.exited(leaver, -9, 3.0) == [] and not play.m.ending.over, "that is no death"


def test_a_leaver_without_a_slot_may_take_its_time() -> None:
    m = Membership(Scale(1, 2, 2))
    for name in [i.worker for i in m.agent_connected([], 0.0) if isinstance(i, Spawn)]:
        m.hello(name, ("127.0.0.1", 1), "starting", 0, [], 0.0)
        m.ready(name, 0, 0.0)
    assert m.candidate is not None
    m.switched(m.candidate.number, list(m.candidate.members), 0.0)
    m.resize(1, 0.0)
    m.switched(m.candidate.number, list(m.candidate.members), 0.0)
    assert not any(isinstance(one, Kill) for s in range(1, 5) for one in m.tick(float(s)))


def test_first_workers_are_started_on_the_slots_given() -> None:
    assert sorted(Play(3, 5).on) == [3, 5]  # type: ignore[type-var]


def test_whoever_is_on_a_slot_that_is_withdrawn_leaves_however_old() -> None:
    play = Play(0, 1, 2)
    out = play.m.resize(2, 0.0, [1, 2])
    assert [play.m.workers[n].slot for n in candidates(out)[-1].members] == [1, 2]
    play.settle()
    assert play.on == [1, 2]


def test_a_move_of_one_worker_at_equal_size_starts_a_newcomer_and_drops_the_other_at_once() -> None:
    play = Play(0, 1)
    out = play.m.resize(2, 0.0, [1, 4])
    assert spawns(out) == [4]
    assert [play.m.workers[n].slot for n in candidates(out)[-1].members] == [1]
    play.join(out)
    assert play.on == [1, 4]


def test_a_move_of_everybody_keeps_one_until_the_newcomers_have_its_state() -> None:
    play = Play(0, 1)
    out = play.m.resize(2, 0.0, [6, 7])
    assert sorted(spawns(out)) == [6, 7]  # type: ignore[type-var]
    assert not candidates(out), "nobody leaves before somebody can take over"
    for name in [i.worker for i in out if isinstance(i, Spawn)]:
        play.m.hello(name, ("127.0.0.1", 1), "starting", 0, [], 0.0)
        out = play.m.ready(name, 0, 0.0)
    first = candidates(out)[-1]
    assert play.m.workers[first.members[0]].slot == 0 and len(first.members) == 3
    play.settle()
    assert play.on == [6, 7]


def test_a_newcomer_on_a_slot_that_is_withdrawn_again_is_ended() -> None:
    play = Play(0)
    (newcomer,) = [i for i in play.m.resize(2, 0.0, [0, 3]) if isinstance(i, Spawn)]
    assert newcomer.slot == 3
    out = play.m.resize(2, 0.0, [0, 2])
    assert Kill(newcomer.worker) in out
    assert spawns(out) == [2]


def test_a_dead_worker_is_replaced_where_it_was() -> None:
    play = Play(2, 5)
    name = next(n for n in play.m.generation.members if play.m.workers[n].slot == 5)
    play.m.exited(name, -9, 0.0)
    play.settle()
    assert spawns(play.m.tick(1.0)) == [5]


def test_a_worker_that_cannot_be_reached_is_fenced_and_its_place_left_alone_for_a_while() -> None:
    play = Play(0, 1)
    name = play.m.generation.members[1]
    out = play.m.vanished(name, 1.0)
    assert Fence(name) in out and not spawns(out)
    assert [c.recovery for c in candidates(out)] == [True]
    play.settle()
    assert spawns(play.m.tick(1.0 + AWAY_S / 2)) == []
    assert spawns(play.m.resize(2, 1.0 + AWAY_S, [0, 2])) == [2]
    late = play.m.hello(name, ("127.0.0.1", 1), "member", 1, list(play.m.generation.members), 3.0)
    assert late == [Fence(name)], "when it comes back it is told that it was given up"


def test_places_that_cannot_be_reached_do_not_make_a_job_fail() -> None:
    play = Play(0)
    now = 0.0
    for _ in range(3 * MAX_FRUITLESS_DEATHS):
        now += 2 * AWAY_S
        for name in list(play.m.workers):
            play.m.vanished(name, now)
        play.m.tick(now + 1.5 * AWAY_S)
    assert not play.m.ending.over


def test_slots_survive_a_restart_of_the_coordinator() -> None:
    play = Play(3, 4)
    again = from_json(json.loads(json.dumps(to_json(play.m))), 1.0)
    assert again.scale.slots == (3, 4)
    assert {w.slot for w in again.workers.values()} == {3, 4}


@pytest.mark.parametrize("slots", [[1], [1, 1], [1, 2, 3]])
def test_as_many_different_slots_as_workers_are_needed(slots: list[int]) -> None:
    with pytest.raises(ValueError, match="need 2 different slots"):
        Play(0).m.resize(2, 0.0, slots)


def test_a_job_on_slots_grows_only_with_slots_named_and_shrinks_without() -> None:
    play = Play(0, 1)
    with pytest.raises(ValueError, match="slots"):
        play.m.resize(3, 0.0)
    play.m.resize(1, 0.0)
    play.settle()
    assert play.on == [0]


def test_a_worker_that_cannot_be_started_gives_up_its_slot_and_the_job_goes_on_and_tries_again() -> None:
    play = Play(0, 1)
    members = list(play.m.generation.members)
    (spawn,) = [i for i in play.m.resize(3, play.now, [0, 1, 5]) if isinstance(i, Spawn)]
    out = play.m.unstartable(spawn.worker, "n1: no home", "home", play.now)
    assert out == [] and not play.m.ending.over and play.m.generation.members == members
    for at_s in (1.0, SHUT_S - 1.0):
        assert play.m.tick(play.now + at_s) == []
    assert spawns(play.m.tick(play.now + SHUT_S)) == [5], "it is tried again now and then"
    (again,) = [name for name in play.m.workers if name not in members]
    play.m.unstartable(again, "n1: no home", "home", play.now + SHUT_S)
    assert spawns(play.m.resize(3, play.now + SHUT_S + 1.0, [0, 1, 6])) == [6], "other slots are used at once"
    assert from_json(json.loads(json.dumps(to_json(play.m))), 0.0).scale.slots == (0, 1, 6)


def test_a_job_does_not_end_however_often_a_worker_cannot_be_started_and_a_cut_link_is_tried_soon() -> None:
    play = Play(0, 1)
    out = play.m.resize(3, play.now, [0, 1, 5])
    for _ in range(3 * MAX_FRUITLESS_DEATHS):
        (spawn,) = [i for i in out if isinstance(i, Spawn)]
        assert play.m.unstartable(spawn.worker, "n1: TimeoutError", "link", play.now) == []
        play.now += CUT_OFF_S
        for member in play.m.generation.members:
            play.m.beat(member, 1, play.now)
        out = play.m.tick(play.now)
    assert not play.m.ending.over


def test_a_job_fails_if_no_process_of_it_ever_ran_the_script_and_goes_on_if_others_run_it() -> None:
    fresh = Membership(Scale(1, 8, 1, (3,)), Rules(gather_s=0.0))
    fresh.agent_connected([], 0.0)
    (end,) = [i for i in fresh.unstartable("w0", "n1: no torch", "process", 0.0) if isinstance(i, Finish)]
    assert end.code == 1 and "n1: no torch" in end.reason
    play = Play(0, 1)
    (spawn,) = [i for i in play.m.resize(3, play.now, [0, 1, 5]) if isinstance(i, Spawn)]
    assert play.m.unstartable(spawn.worker, "n1: no torch", "process", play.now) == []


def test_that_a_worker_cannot_be_started_means_nothing_once_it_is_forgotten_or_the_job_is_over() -> None:
    play = Play(0, 1)
    assert play.m.unstartable("w99", "n1: no home", "home", play.now) == []
    (spawn,) = [i for i in play.m.resize(3, play.now, [0, 1, 5]) if isinstance(i, Spawn)]
    play.m.finish(1, "the script failed")
    fruitless = play.m.ending.fruitless
    assert spawns(play.m.unstartable(spawn.worker, "n1: no home", "home", play.now)) == []
    assert spawn.worker not in play.m.workers and play.m.ending.fruitless == fruitless


def test_a_job_whose_first_slots_are_all_useless_waits_and_begins_on_others() -> None:
    fresh = Membership(Scale(1, 8, 1, (3,)), Rules(gather_s=0.0))
    fresh.agent_connected([], 0.0)
    assert fresh.unstartable("w0", "n1: no home", "home", 0.0) == [] and not fresh.ending.over
    assert spawns(fresh.resize(1, 5.0, [0])) == [0]
