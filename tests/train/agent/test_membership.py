"""Membership as a pure state machine: what happens goes in, what is to be done comes out."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swell.train.agent.errors import FENCED, RESPAWN
from swell.train.agent.membership import (
    MAX_FRUITLESS_DEATHS,
    SETTLE_S,
    SPARE_AFTER_S,
    Announce,
    Candidate,
    Fence,
    Instruction,
    Membership,
    Rules,
    Say,
    Scale,
    Turn,
)
from swell.train.agent.membership_json import from_json, to_json
from swell.train.agent.protocol import Exited, Finish, Kill, Spawn, Status
from swell.train.agent.story import MOST_STORY


def spawned(instructions: list[Instruction]) -> list[str]:
    return [i.worker for i in instructions if isinstance(i, Spawn)]


def announced(instructions: list[Instruction]) -> Candidate | None:
    found = [i.candidate for i in instructions if isinstance(i, Announce)]
    return found[-1] if found else None


class Play:
    """A job driven by hand; time is a number we count up."""

    def __init__(
        self, target: int = 2, maximum: int = 4, slots: tuple[int, ...] | None = None, **rules: Any
    ) -> None:
        self.m = Membership(Scale(1, maximum, target, slots), Rules(**rules))
        self.now = 0.0

    def ready(self, *names: str) -> list[Instruction]:
        out: list[Instruction] = []
        for name in names:
            out += self.m.hello(name, ("127.0.0.1", 1), "starting", 0, [], self.now)
            out += self.m.ready(name, self.m.generation.epoch, self.now)
        return out

    def switch(self) -> list[Instruction]:
        assert self.m.candidate is not None
        return self.m.switched(self.m.candidate.number, list(self.m.candidate.members), self.now)

    @classmethod
    def training(cls, workers: int = 2, **options: Any) -> Play:
        play = cls(target=workers, **options)
        play.ready(*spawned(play.m.agent_connected([], 0.0)))
        play.switch()
        assert play.m.generation.members == [f"w{i}" for i in range(workers)]
        return play


def test_the_first_generation_waits_for_all_workers() -> None:
    play = Play(target=2)
    assert spawned(play.m.agent_connected([], 0.0)) == ["w0", "w1"]
    assert announced(play.ready("w0")) is None
    assert announced(play.ready("w1")) == Candidate(1, ("w0", "w1"))


def test_growing_prepares_first_and_announces_when_the_newcomer_is_ready() -> None:
    play = Play.training(2)
    assert play.m.resize(3, play.now) == [Spawn("w2")]
    assert announced(play.ready("w2")) == Candidate(2, ("w0", "w1", "w2"))
    play.switch()
    assert play.m.generation.members == ["w0", "w1", "w2"]


def test_a_spare_is_prepared_when_a_switch_is_over_and_not_beside_it() -> None:
    play = Play.training(2, spares=1)
    assert spawned(play.m.tick(SPARE_AFTER_S / 2)) == []
    play.now = SPARE_AFTER_S
    assert spawned(play.m.tick(play.now)) == ["w2"]
    assert announced(play.ready("w2")) is None, "a spare waits until it is wanted"
    assert spawned(play.m.resize(3, play.now)) == []
    assert spawned(play.switch()) == []
    assert spawned(play.m.tick(play.now + SPARE_AFTER_S)) == ["w3"]


def test_shrinking_drops_the_youngest_and_its_exit_is_no_failure() -> None:
    play = Play.training(3)
    assert announced(play.m.resize(2, play.now)) == Candidate(2, ("w0", "w1"))
    play.switch()
    assert play.m.workers["w2"].status is Status.LEAVING
    assert play.m.exited("w2", 0, play.now) == []


def test_a_newer_request_replaces_one_that_has_not_switched() -> None:
    play = Play.training(2)
    play.m.resize(4, play.now)
    play.ready("w2", "w3")
    first = play.m.candidate
    second = announced(play.m.resize(3, play.now))
    assert first is not None and second is not None
    assert second.members == ("w0", "w1", "w2") and second.number > first.number


def test_a_request_taken_back_withdraws_the_candidate() -> None:
    play = Play.training(2)
    play.m.resize(3, play.now)
    play.ready("w2")
    out = play.m.resize(2, play.now)
    assert Announce(None, ("w0", "w1", "w2")) in out
    assert Kill("w2") in out


def test_a_burst_of_requests_ends_in_one_candidate() -> None:
    play = Play.training(1)
    for target in (3, 2, 4, 3):
        play.m.resize(target, play.now)
    starting = [w.name for w in play.m.workers.values() if w.status is Status.STARTING]
    assert len(starting) == 2
    assert announced(play.ready(starting[0])) is None, "joins together with the one still starting"
    candidate = announced(play.ready(starting[1]))
    assert candidate is not None and candidate.members == ("w0", *starting)


def test_a_newcomer_does_not_wait_for_ever_for_the_others() -> None:
    play = Play.training(1, gather_s=1.0)
    play.m.resize(3, play.now)
    play.ready("w1")
    play.now += 2.0
    for name in ("w0", "w1"):
        play.m.beat(name, 1, play.now)
    candidate = announced(play.m.tick(play.now))
    assert candidate is not None and candidate.members == ("w0", "w1")


def test_a_death_is_answered_with_a_recovery_and_then_a_replacement() -> None:
    play = Play.training(3)
    out = play.m.exited("w1", -9, play.now)
    assert announced(out) == Candidate(2, ("w0", "w2"), recovery=True)
    assert spawned(out) == []
    assert spawned(play.switch()) == [], "survivors come first"
    play.now += SETTLE_S
    assert spawned(play.m.tick(play.now)) == ["w3"]


def test_two_deaths_in_a_row_end_in_the_last_recovery() -> None:
    play = Play.training(3)
    play.m.exited("w1", -9, play.now)
    assert announced(play.m.exited("w0", -9, play.now)) == Candidate(3, ("w2",), recovery=True)


@pytest.mark.parametrize("dies_last", [False, True])
def test_the_one_that_stays_dies_when_the_others_have_left_and_the_job_goes_on_from_its_checkpoint(
    dies_last: bool,
) -> None:
    play = Play.training(3)
    candidate = announced(play.m.resize(1, play.now))
    assert candidate is not None and candidate.members == ("w0",)
    out: list[Instruction] = []
    for name in ("w1", "w2"):
        out += play.m.left(name, candidate.number, play.now)
    if dies_last:
        for name in ("w1", "w2"):
            out += play.m.exited(name, 0, play.now)
        assert play.m.generation.live and not play.m.ending.over, "the switch of w0 may still come"
    out += play.m.exited("w0", -9, play.now)
    for _ in range(100):
        play.now += 0.1
        out += play.m.tick(play.now)
    for name in () if dies_last else ("w1", "w2"):
        out += play.m.exited(name, 0, play.now)
    assert spawned(out) == ["w3"] and not play.m.generation.live and not play.m.ending.over
    candidate = announced(play.ready("w3"))
    assert candidate is not None and candidate.members == ("w3",)


def test_a_survivor_that_reports_a_broken_mesh_gets_the_candidate_it_missed() -> None:
    play = Play.training(3)
    play.m.exited("w1", -9, play.now)
    assert play.m.broken("w2", 1, 5, play.now) == [Announce(play.m.candidate, ("w2",))]


def test_a_late_word_of_a_broken_generation_breaks_its_successor_not() -> None:
    play = Play.training(3)
    play.m.broken("w0", 1, 5, play.now, lost="w1", certain=True)
    play.switch()
    assert play.m.broken("w2", 1, 5, play.now, lost="w1", certain=True) == []
    assert play.m.candidate is None


def test_a_peer_and_a_closed_connection_together_are_proof_of_death() -> None:
    play = Play.training(3)
    assert play.m.disconnected("w1", play.now) == [], "a connection may break for other reasons"
    out = play.m.broken("w0", 1, 5, play.now, lost="w1")
    assert announced(out) == Candidate(2, ("w0", "w2"), recovery=True)
    assert Kill("w1") in out
    assert play.m.exited("w1", -9, play.now) == [], "its exit is no news"
    play = Play.training(3)
    assert announced(play.m.broken("w0", 1, 5, play.now, lost="w1")) == Candidate(
        2, ("w0", "w1", "w2"), recovery=True
    )
    assert announced(play.m.disconnected("w1", play.now)) == Candidate(3, ("w0", "w2"), recovery=True)
    play = Play.training(3)
    out = play.m.broken("w0", 1, 5, play.now, lost="w1", certain=True)
    assert announced(out) == Candidate(2, ("w0", "w2"), recovery=True)


def test_when_everybody_is_dead_prepared_newcomers_start_afresh_too() -> None:
    play = Play.training(1)
    play.m.resize(2, play.now)
    play.ready("w1")
    out = play.m.exited("w0", -9, play.now)
    assert Kill("w1") in out and len(spawned(out)) == 2
    assert not play.m.generation.live


def test_a_silent_member_is_fenced_killed_and_refused_when_it_wakes() -> None:
    play = Play.training(2, silent_after_s=3.0)
    play.m.beat("w0", 5, 2.0)
    out = play.m.tick(4.0)
    assert Fence("w1") in out and Kill("w1") in out
    assert announced(out) == Candidate(2, ("w0",), recovery=True)
    assert play.m.hello("w1", ("127.0.0.1", 1), "member", 1, ["w0", "w1"], 9.0) == [Fence("w1")]


def test_a_coordinator_that_slept_blames_nobody() -> None:
    play = Play.training(2, silent_after_s=3.0)
    play.m.tick(0.5)
    assert play.m.tick(100.0) == [], "the machine was suspended: nobody could be heard"
    for at in (100.9, 101.8):
        assert play.m.tick(at) == []
    play.m.beat("w0", 5, 101.8)
    assert Fence("w1") in play.m.tick(102.7), "but who stays silent afterwards is given up"


@pytest.mark.parametrize("target", [0, 5])
def test_a_resize_beyond_the_bounds_is_refused_with_the_bounds(target: int) -> None:
    play = Play.training(2)
    with pytest.raises(ValueError, match=rf"workers: got {target}, this job allows 1 to 4"):
        play.m.resize(target, play.now)


def test_a_waiting_newcomer_is_told_when_the_epoch_turns() -> None:
    play = Play.training(2)
    play.m.resize(3, play.now)
    play.ready("w2")
    out = play.m.at_epoch(1, play.now)
    assert Turn("w2", 1) in out
    assert play.m.candidate is None
    candidate = announced(play.m.ready("w2", 1, play.now))
    assert candidate is not None and "w2" in candidate.members and candidate.epoch == 1


def test_a_failed_script_ends_the_job_once_with_its_exit_code() -> None:
    play = Play.training(2)
    out = play.m.exited("w1", 7, play.now)
    assert [i for i in out if isinstance(i, Finish)] == [Finish(7, "worker w1 ended with exit code 7")]
    assert Kill("w0") in out
    assert play.m.exited("w0", -9, play.now) == []


def test_a_worker_of_an_earlier_run_of_the_job_ends_by_itself_and_another_comes_in_its_place() -> None:
    play = Play.training(1)
    play.m.resize(2, play.now)
    assert play.m.exited("w1", FENCED, play.now) == [Spawn("w2")]
    out = play.m.exited("w2", FENCED + 1, play.now)
    assert Finish(FENCED + 1, f"worker w2 ended with exit code {FENCED + 1}") in out, "any other is a failure"


def test_a_script_that_ends_before_the_others_is_an_error_that_says_what_to_do() -> None:
    play = Play.training(2)
    (finish,) = [i for i in play.m.exited("w1", 0, play.now) if isinstance(i, Finish)]
    assert finish.code == 1 and "job.agree" in finish.reason


def test_the_job_is_done_when_everybody_is() -> None:
    play = Play.training(2)
    play.m.done("w0", 9, play.now)
    play.m.done("w1", 9, play.now)
    assert play.m.exited("w0", 0, play.now) == []
    assert play.m.exited("w1", 0, play.now) == [Finish(0, "training is over")]


def test_a_leader_that_freezes_when_its_part_is_done_does_not_hold_the_job_for_ever() -> None:
    play = Play.training(1, silent_after_s=3.0)
    play.m.done("w0", 9, play.now)
    since_s = play.m.workers["w0"].seen_s
    early = [play.m.tick(since_s + 0.5 * tick) for tick in range(1, 36)]
    assert not any(early), "it may take its time to end"
    out = play.m.tick(since_s + 18.4)
    assert Kill("w0") in out and any(isinstance(one, Spawn) for one in out), "the job begins again"
    assert not play.m.ending.over


@pytest.mark.parametrize("heard", [("w0", "w1"), ("w1", "w0")])
def test_a_frozen_leader_is_found_whomever_a_new_coordinator_heard_first(heard: tuple[str, str]) -> None:
    play = Play(target=2, silent_after_s=3.0)
    for name in heard:
        play.m.hello(name, ("127.0.0.1", 1), "done", 1, ["w0", "w1"], 0.0)
    killed = [one for tick in range(1, 41) for one in play.m.tick(0.5 * tick) if isinstance(one, Kill)]
    assert killed[0] == Kill("w0"), "and not the one that waits for its end"


def test_before_the_first_step_of_a_job_a_member_may_be_silent_for_longer() -> None:
    play = Play(target=2, silent_after_s=1.0)
    play.ready(*spawned(play.m.agent_connected([], 0.0)))
    play.m.switched(1, ["w0", "w1"], 0.0, step=7)
    for tick in range(1, 5):
        assert play.m.tick(float(tick)) == []
        play.m.beat("w0", 7, float(tick))  # the other one initialises its device
    play.m.beat("w1", 7, 4.5)
    play.m.beat("w0", 8, 4.5)
    assert play.m.tick(5.0) == []
    play.m.beat("w0", 9, 5.6)
    assert announced(play.m.tick(5.9)) == Candidate(2, ("w0",), recovery=True)


def test_the_end_of_a_job_does_not_wait_for_a_worker_that_hangs_after_its_part() -> None:
    play = Play.training(2, silent_after_s=1.0)
    play.m.done("w0", 30, play.now)
    play.m.done("w1", 30, play.now)
    assert play.m.tick(0.9) == play.m.tick(1.5) == [], "the leader may take its time to end"
    assert play.m.exited("w0", 0, 1.6) == []
    assert play.m.tick(1.7) == [Kill("w1"), Finish(0, "training is over")]
    assert play.m.exited("w1", -9, 1.8) == []


def test_a_leader_killed_before_it_saved_its_result_means_another_run_from_the_checkpoint() -> None:
    play = Play.training(2)
    play.m.done("w0", 9, play.now)
    play.m.done("w1", 9, play.now)
    assert play.m.exited("w0", -9, play.now) == []
    assert len(spawned(play.m.exited("w1", 0, play.now))) == 2


def test_whoever_leaves_the_loop_while_others_go_on_is_named() -> None:
    play = Play.training(2)
    play.m.done("w1", 9, play.now)
    (finish,) = [i for i in play.m.broken("w0", 1, 9, play.now) if isinstance(i, Finish)]
    assert finish.code == 1 and "worker w1's script ended before training was over" in finish.reason
    play = Play.training(3)
    play.m.done("w1", 9, play.now)
    out = play.m.broken("w0", 1, 8, play.now)  # it was in the last operation when somebody else died
    assert announced(out) == Candidate(2, ("w0", "w2"), recovery=True)


@pytest.mark.parametrize("target", [1, 3])
def test_workers_that_keep_dying_without_a_step_are_not_restarted_for_ever(target: int) -> None:
    play = Play(target=target)
    waiting = spawned(play.m.agent_connected([], 0.0))
    deaths, ends = 0, list[Instruction]()
    while waiting and not ends:
        out = play.m.exited(waiting.pop(0), -11, play.now)
        deaths += 1
        waiting += spawned(out)
        ends = [i for i in out if isinstance(i, Finish)]
    assert deaths == MAX_FRUITLESS_DEATHS + target + 1, "each worker may die once more than the others"
    (finish,) = ends
    assert isinstance(finish, Finish)
    assert finish.code == 1 and "died without a single step" in finish.reason


def test_a_restarted_coordinator_adopts_the_generation_its_workers_report() -> None:
    play = Play.training(2)
    play.m.resize(3, play.now)
    play.ready("w2")
    saved = json.loads(json.dumps(to_json(play.m)))
    members = ["w0", "w1", "w2"]  # they switched while nobody listened
    again = from_json(saved, 0.0)
    for name in members:
        again.hello(name, ("127.0.0.1", 1), "member", 2, members, 0.0)
    assert (again.generation.number, again.generation.members, again.scale.target) == (2, members, 3)
    assert again.candidate is None
    assert again.generation.counter >= 2, "numbers are never used twice"


def test_a_launcher_that_never_heard_of_a_worker_is_asked_again() -> None:
    play = Play.training(1)
    play.m.resize(2, play.now)
    assert spawned(play.m.agent_connected(["w0"], play.now)) == ["w1"]


def test_a_resize_before_the_launcher_is_there_is_not_lost() -> None:
    play = Play(target=2)
    play.m.resize(4, 0.0)
    play.m.resize(1, 0.0)
    out = play.m.agent_connected([], 0.1)
    assert spawned(out) == ["w0"]
    gone = [one.event.worker for one in out if isinstance(one, Say) and isinstance(one.event, Exited)]
    assert gone == ["w1", "w2", "w3"], "who waits for their slots must hear that they are free"


def test_a_worker_that_vanished_while_the_coordinator_was_away_is_lost() -> None:
    play = Play.training(2)
    out = play.m.agent_connected(["w0"], play.now)
    assert announced(out) == Candidate(2, ("w0",), recovery=True)


EVENTS = st.one_of(
    st.tuples(st.just("resize"), st.integers(1, 4)),
    st.tuples(st.just("ready"), st.integers(0, 9)),
    st.tuples(st.just("switch"), st.just(0)),
    st.tuples(st.just("kill"), st.integers(0, 9)),
    st.tuples(st.just("respawn"), st.integers(0, 9)),
    st.tuples(st.just("epoch"), st.integers(0, 3)),
    st.tuples(st.just("silence"), st.integers(0, 9)),
    st.tuples(st.just("restart"), st.just(0)),
)


@settings(max_examples=300)
@given(st.lists(EVENTS, max_size=40))
def test_whatever_happens_the_invariants_hold(events: list[tuple[str, int]]) -> None:
    play = Play(target=2, silent_after_s=1e9)
    numbers: list[int] = []
    out = play.m.agent_connected([], 0.0)
    for kind, value in events:
        play.now += 1.0
        alive = sorted(play.m.workers)
        name = alive[value % len(alive)] if alive else "w0"
        if kind == "resize":
            out = play.m.resize(value, play.now) if not play.m.ending.over else []
        elif kind == "ready" and alive:
            out = play.ready(name)
        elif kind == "switch" and play.m.candidate is not None:
            out = play.switch()
        elif kind in ("kill", "respawn") and alive:
            out = play.m.exited(name, -9 if kind == "kill" else RESPAWN, play.now)
        elif kind == "epoch":
            out = play.m.at_epoch(value, play.now)
        elif kind == "restart":
            play.m = from_json(json.loads(json.dumps(to_json(play.m))), play.now)
        m = play.m
        m.validate()
        members = m.generation.members
        assert m.ending.over or all(name in m.workers for name in members)
        numbers += [i.candidate.number for i in out if isinstance(i, Announce) and i.candidate is not None]
        out = []
        if m.candidate is not None and not m.ending.over:  # a job that is over has no next generation
            assert all(name in m.workers for name in m.candidate.members)
            assert len(m.candidate.members) <= m.scale.maximum
        busy = [w for w in m.workers.values() if w.status is not Status.LEAVING]
        assert len(busy) <= m.scale.maximum + len(members)
    assert numbers == sorted(numbers)


def test_a_launcher_that_connects_after_the_job_was_stopped_is_told_so() -> None:
    play = Play(target=1)
    assert play.m.stop(0.0)[-1] == Finish(0, "stopped"), "no worker has state that is not on disk"
    assert play.m.agent_connected(["w7"], 0.1) == [Kill("w7"), Finish(0, "stopped")]


def test_a_coordinator_that_was_killed_as_the_job_ended_begins_again_without_members_that_are_gone() -> None:
    saved = to_json(Play.training(1).m) | {"workers": {}}
    again = from_json(json.loads(json.dumps(saved)), 1.0)
    assert isinstance(again, Membership) and again.generation.members == []
    assert any(isinstance(one, Spawn) for one in again.agent_connected([], 1.1))


def test_it_tells_how_it_came_to_be_where_it_is_and_notices_what_cannot_be() -> None:
    play = Play.training(2)
    play.now += 1.0
    play.m.tick(play.now)
    play.m.exited("w1", -9, play.now)
    *_, switched, exited = play.m.story()
    assert switched.startswith("switched(1, ['w0', 'w1'], ") and exited.startswith("exited('w1', -9, ")
    assert "Announce(candidate=Candidate(number=2, members=('w0',), recovery=True" in exited
    assert not any(line.startswith("tick") for line in play.m.story()), "nothing came of it"
    for number in range(200):
        play.m.done(f"w{number + 50}", 1, play.now)
    assert len(play.m.story()) == MOST_STORY
    play.m.validate()
    play.m.generation.members = ["w0", "w0"]
    with pytest.raises(AssertionError, match=r"in the generation twice\ndone\("):
        play.m.validate()
