"""Replicas as members: events of workers go in, instructions for workers come out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from swell.train.agent.errors import RESPAWN
from swell.train.agent.membership import SETTLE_S, Announce, Candidate, Check, Instruction, Say, Turn
from swell.train.agent.membership_json import from_json, of_job, to_json
from swell.train.agent.protocol import Finish, JobFile, Kill, Parted, Spawn
from swell.train.agent.replicas import Replicas, replica_of, workers_of
from swell.train.data import plan
from swell.train.replicas import cutting


def spawned(instructions: list[Instruction]) -> list[tuple[str, int | None]]:
    return [(i.worker, i.slot) for i in instructions if isinstance(i, Spawn)]


def killed(instructions: list[Instruction]) -> list[str]:
    return [i.worker for i in instructions if isinstance(i, Kill)]


def announced(instructions: list[Instruction]) -> Candidate | None:
    found = [i.candidate for i in instructions if isinstance(i, Announce)]
    return found[-1] if found else None


class Play:
    """A job of replicas of two workers, driven by hand."""

    def __init__(self, workers: int = 2, **config: Any) -> None:
        base = {"minimum": 2, "maximum": 8, "target": workers, "workers_per_replica": 2, "gather_s": 0.0}
        made = of_job(JobFile(**{**base, **config}), None, 0.0)
        assert isinstance(made, Replicas)
        self.m = made
        self.now = 0.0

    def ready(self, *names: str) -> list[Instruction]:
        out: list[Instruction] = []
        for name in names:
            out += self.m.hello(name, ("127.0.0.1", 1), "starting", 0, [], self.now)
            out += self.m.ready(name, self.m.generation.epoch, self.now)
        return out

    def switch(self, candidate: Candidate | None) -> list[Instruction]:
        assert candidate is not None
        return self.m.switched(candidate.number, list(candidate.members), self.now)

    @classmethod
    def training(cls, workers: int = 2, **config: Any) -> Play:
        play = cls(workers, **config)
        names = [name for name, _ in spawned(play.m.agent_connected([], 0.0))]
        play.switch(announced(play.ready(*names)))
        assert play.m.generation.members == names
        return play


def test_a_worker_belongs_to_the_replica_that_its_name_says() -> None:
    assert [replica_of(f"w{n}", 3) for n in range(7)] == ["r0", "r0", "r0", "r1", "r1", "r1", "r2"]
    assert all(replica_of(w, 4) == "r5" for w in workers_of("r5", 4))


def test_a_replica_joins_once_all_its_workers_are_ready() -> None:
    play = Play.training()
    assert spawned(play.m.resize(4, play.now)) == [("w2", None), ("w3", None)]
    assert announced(play.ready("w3")) is None
    candidate = announced(play.ready("w2"))
    assert candidate is not None and candidate.members == ("w0", "w1", "w2", "w3")


def test_only_whole_replicas_can_be_asked_for() -> None:
    play = Play.training()
    with pytest.raises(ValueError, match="workers: got 3, must be a multiple of 2"):
        play.m.resize(3, play.now)
    with pytest.raises(ValueError, match="spares: got 1"):
        Play(spares=1)


def test_the_death_of_one_worker_ends_its_replica_and_the_others_go_on() -> None:
    play = Play.training(4)
    out = play.m.exited("w1", -9, play.now)
    candidate = announced(out)
    assert candidate is not None and candidate.recovery and candidate.members == ("w2", "w3")
    assert killed(out) == ["w0"]
    assert play.m.exited("w0", -9, play.now) == [], "its end is no second death"
    play.switch(candidate)
    play.now += 2 * SETTLE_S
    assert [name for name, _ in spawned(play.m.tick(play.now))] == ["w4", "w5"]


def test_a_worker_that_misses_its_mate_is_heard_before_the_mates_exit_is() -> None:
    play = Play.training(4)
    out = play.m.broken("w2", 1, 7, play.now, lost="w1", certain=True)
    candidate = announced(out)
    assert candidate is not None and candidate.members == ("w2", "w3")
    assert set(killed(out)) == {"w0", "w1"}
    assert announced(play.m.broken("w3", 1, 7, play.now, lost="w0", certain=True)) == candidate


def test_a_silent_worker_counts_although_its_mate_is_heard() -> None:
    play = Play.training(4, silent_after_s=5.0)
    out: list[Instruction] = []
    while not out and play.now < 10.0:
        play.now += 0.5
        for name in ("w0", "w2", "w3"):
            play.m.beat(name, 1, play.now)
        out = play.m.tick(play.now)
    assert 5.0 < play.now < 6.0
    candidate = announced(out)
    assert candidate is not None and candidate.members == ("w2", "w3")


def test_a_script_that_fails_in_one_worker_fails_the_job_once_its_replica_was_given_up() -> None:
    play = Play.training(4)
    play.m.exited("w0", RESPAWN, play.now)  # it lost its mate ...
    out = play.m.exited("w1", 1, play.now)  # ... whose script had raised
    assert [i for i in out if isinstance(i, Finish)] == [Finish(1, "worker w1 ended with exit code 1")]


def test_workers_of_one_replica_are_turned_to_the_epoch_that_the_job_is_in() -> None:
    play = Play.training()
    play.m.resize(4, play.now)
    play.ready("w2")
    out = play.m.at_epoch(1, play.now)
    assert [i for i in out if isinstance(i, Turn)] == [Turn("w2", 1)]
    play.m.hello("w3", ("127.0.0.1", 1), "starting", 0, [], play.now)
    assert play.m.ready("w3", 0, play.now) == [Turn("w3", 1)]
    assert announced(play.ready("w2", "w3")) is not None


def test_a_leaving_replica_frees_its_slots_when_all_its_workers_have_ended() -> None:
    play = Play.training(4, slots=[0, 1, 2, 3])
    play.switch(announced(play.m.resize(2, play.now, [0, 1])))
    assert play.m.left("w2", 2, play.now) == play.m.left("w3", 2, play.now) == []
    play.m.exited("w2", 0, play.now)
    assert "w3" in play.m.workers
    play.m.exited("w3", 0, play.now)
    assert list(play.m.workers) == ["w0", "w1"]


def test_slots_are_grouped_in_order_and_whole_groups_stay() -> None:
    play = Play.training(4, slots=[4, 5, 0, 1])
    assert {n: w.slot for n, w in play.m.workers.items()} == {"w0": 0, "w1": 1, "w2": 4, "w3": 5}
    out = play.m.resize(4, play.now, [4, 5, 8, 9])
    assert spawned(out) == [("w4", 8), ("w5", 9)]


def test_a_refused_resize_leaves_the_slots_as_they_were() -> None:
    play = Play.training(2, slots=[0, 1])
    play.m.resize(4, play.now, [0, 1, 2, 3])
    play.m.exited("w2", -9, play.now)
    with pytest.raises(ValueError, match="this job allows 1 to 4"):
        play.m.resize(10, play.now, list(range(4, 14)))
    assert play.m.scale.slots == (0, 1, 2, 3)


def test_a_job_ends_well_when_all_workers_of_its_leading_replica_have() -> None:
    play = Play.training(4)
    for name in play.m.generation.members:
        play.m.done(name, 30, play.now)
    out = [i for name in ("w3", "w1", "w2") for i in play.m.exited(name, 0, play.now)]
    assert not any(isinstance(i, Finish) for i in out)
    assert Finish(0, "training is over") in play.m.exited("w0", 0, play.now)


def test_a_restarted_coordinator_goes_on_with_the_same_replicas() -> None:
    play = Play.training(4, slots=[0, 1, 2, 3])
    saved = json.loads(json.dumps(to_json(play.m)))
    again = from_json(saved, 1.0)
    assert isinstance(again, Replicas) and again.generation.members == play.m.generation.members
    alive = ["w0", "w1", "w2"]  # w3 died meanwhile
    out = again.agent_connected(alive, 1.0)
    assert killed(out) == ["w2"]
    candidate = announced(out)
    assert candidate is not None and candidate.members == ("w0", "w1")


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize(("size", "limit", "replicas"), [(17, None, 2), (17, 3, 2), (1, None, 1), (5, 2, 3)])
def test_workers_of_a_replica_get_equally_many_batches_and_every_sample_once(
    workers: int, size: int, limit: int | None, replicas: int
) -> None:
    cuts = plan.divide([(0, size)], replicas)
    seen: list[int] = []
    for mine in cuts:
        each = [cutting.batches(mine, limit, workers, position) for position in range(workers)]
        assert len({len(batches) for batches in each}) == 1
        for low, high in (batch for batches in each for batch in batches):
            assert high - low <= (limit or size)
            seen += range(low, high)
    assert sorted(seen) == list(range(size))


@pytest.mark.parametrize(("size", "batch", "world"), [(200, 16, 4), (9, 1, 4), (7, 100, 2), (33, 8, 4)])
def test_evaluation_gives_every_worker_of_a_replica_as_many_batches(
    size: int, batch: int, world: int
) -> None:
    each = [cutting.evaluation(size, batch, rank, world, 2) for rank in range(world)]
    assert all(len(each[r]) == len(each[r + 1]) for r in range(0, world, 2))
    assert all(low < high <= low + batch + 1 for batches in each for low, high in batches)
    assert sorted(i for batches in each for b in batches for i in range(*b)) == list(range(size))
    with pytest.raises(ValueError, match="got 3 samples for 4 workers"):
        cutting.evaluation(3, 1, 0, 4, 2)


def test_a_worker_adds_the_shards_of_its_counterparts_in_replicas_that_had_samples() -> None:
    assert cutting.tree([3, 0, 2, 2, 0, 0], workers=2, rank=3) == (1, 3)
    assert cutting.tree([0, 0, 0, 0], workers=2, rank=3) == 1
    assert cutting.tree([1, 1, 1], workers=1, rank=2) == ((0, 1), 2)


def test_a_replica_one_of_whose_workers_cannot_be_started_gives_up_its_slots_and_the_job_goes_on() -> None:
    play = Play.training(2, slots=[0, 1])
    assert spawned(play.m.resize(4, play.now, [0, 1, 4, 5])) == [("w2", 4), ("w3", 5)]
    assert killed(play.m.unstartable("w3", "n1: no home", "home", play.now)) == ["w2"]
    assert play.m.exited("w2", -9, play.now) == [] and not play.m.ending.over
    assert spawned(play.m.tick(play.now + 1.0)) == []
    assert [s for _, s in spawned(play.m.resize(4, play.now + 2.0, [0, 1, 6, 7]))] == [6, 7]


def test_a_cut_inside_a_replica_is_named_as_one_and_none_of_its_workers_as_silent_or_dead() -> None:
    play = Play.training(4)
    out = play.m.suspect("w0", "w1", play.now)
    (number,) = {i.number for i in out if isinstance(i, Check)}
    play.m.checked("w0", number, ["w1"], play.now)
    out = play.m.checked("w1", number, ["w0"], play.now)
    assert Say(Parted(("w0", "w1"))) in out and {"w0", "w1"} <= set(killed(out))
    again = Play.training(4)
    assert again.m.exited("w2", RESPAWN, again.now)[0] == Say(Parted(("w2", "w3"), "w2"))
