"""Jobs that are resized by save and restart, as a state machine: events in, instructions out."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swell.train.agent.lines import Pace, said
from swell.train.agent.membership import MAX_FRUITLESS_DEATHS, Begin, Instruction, Save, Say, Scale
from swell.train.agent.membership_json import from_json, to_json
from swell.train.agent.protocol import Exited, Finish, Kill, Recovery, Spawn, Switch
from swell.train.agent.restarts import FAULT_S, FINISH_S, MISSING_S, SAVE_S, SAVED, SILENT_S, Restarts


def begun(target: int = 2, slots: tuple[int, ...] | None = None) -> Restarts:
    """A job whose first generation runs."""
    made = Restarts(Scale(1, 4, target, slots))
    made.agent_connected([], 0.0)
    assert made.generation.number == 1
    return made


def test_a_job_begins_with_all_workers_and_writes_down_who_they_are_first() -> None:
    made = Restarts(Scale(1, 4, 2, (5, 7)))
    assert made.agent_connected([], 0.0) == [Begin(1, ("w0", "w1")), Spawn("w0", 5), Spawn("w1", 7)]


def test_a_resize_saves_and_begins_again_once_every_worker_has_ended() -> None:
    job = begun()
    assert job.resize(3, 10.0) == [Save(1)]
    assert job.resize(4, 10.5) == [], "asked once; the newest target counts"
    assert job.exited("w0", SAVED, 11.0) == []
    out = job.exited("w1", SAVED, 11.2)
    assert out[0] == Begin(2, ("w2", "w3", "w4", "w5")) and len(out) == 5
    assert job.said(7.0, 13.0) == [Say(Switch(3.0, 4))]
    assert job.said(8.0, 14.0) == []


def test_a_resize_to_what_is_there_changes_nothing_and_other_slots_do() -> None:
    job = begun(2, (0, 1))
    assert job.resize(2, 1.0, [1, 0]) == []
    assert job.resize(2, 1.0, [1, 2]) == [Save(1)]
    with pytest.raises(ValueError, match="allows 1 to 4"):
        job.resize(5, 1.0, [0, 1, 2, 3, 4])


def test_workers_that_do_not_save_in_time_are_killed() -> None:
    job = begun()
    job.resize(1, 0.0)
    assert job.tick(SAVE_S - 1) == []
    assert set(job.tick(SAVE_S)) == {Kill("w0"), Kill("w1")}
    job.exited("w0", -9, SAVE_S)
    assert job.exited("w1", -9, SAVE_S)[0] == Begin(2, ("w2",))
    assert job.ending.fruitless == 0, "they were killed by us"


def test_a_death_ends_the_others_and_the_job_begins_again() -> None:
    job = begun(3)
    job.said(1.0, 1.0)
    assert set(job.exited("w1", -9, 2.0)) == {Kill("w0"), Kill("w2")}
    assert job.said(1.5, 2.05) == [], "what rank 0 had said before it was ended is not the end of the pause"
    job.exited("w0", -9, 2.1)
    assert job.exited("w2", 1, 2.2)[0] == Begin(2, ("w3", "w4", "w5"))
    assert job.said(2.0, 4.0) == [Say(Recovery(2.0, 3))]


@pytest.mark.parametrize("first", ["w0", "w1"])
def test_a_failure_that_a_death_explains_does_not_end_the_job(first: str) -> None:
    """Rank 0 loses its peer and fails; which of the two ends is heard first is chance."""
    job = begun()
    codes = {"w0": 1, "w1": 137}  # a shell in between reports the signal so
    job.exited(first, codes.pop(first), 1.0)
    ((other, code),) = codes.items()
    assert job.exited(other, code, 1.0 + FAULT_S / 2)[0] == Begin(2, ("w2", "w3"))


def test_a_failure_without_a_death_ends_the_job_with_its_code() -> None:
    job = begun()
    assert job.exited("w1", 3, 1.0, "it said why") == []
    assert job.tick(1.0 + FAULT_S) == [Kill("w0"), Finish(3, "it said why")]


def test_the_end_of_rank_0_is_the_end_of_the_job_even_while_it_is_asked_to_save() -> None:
    job = begun()
    assert job.exited("w1", 0, 1.0) == [], "other ranks may end before"
    job.resize(3, 1.0)
    assert job.exited("w0", 0, 2.0) == [Finish(0, "training is over")]
    job = begun()
    assert job.exited("w0", 0, 2.0) == []
    assert job.tick(2.0 + FINISH_S) == [Kill("w1")]
    assert job.exited("w1", -9, 12.1) == [Finish(0, "training is over")]


def test_a_stop_saves_and_is_over_when_all_have_ended() -> None:
    job = begun(1)
    assert job.stop(1.0) == [Save(1)]
    assert job.exited("w0", SAVED, 2.0) == [Finish(0, "stopped")]


def test_deaths_without_progress_end_the_job_sooner_or_later_and_lost_slots_do_not() -> None:
    job = begun(1)
    for i in range(20):
        job.vanished(f"w{i}", float(i))
    assert not job.ending.over
    for i in range(20, 20 + MAX_FRUITLESS_DEATHS + 1):
        job.exited(f"w{i}", -11, float(i))
    assert job.ending.result is not None and "without any progress" in job.ending.result.reason


def test_a_silent_program_has_its_pause_told_too() -> None:
    job = begun(1)
    job.resize(2, 10.0)
    job.exited("w0", SAVED, 12.0)
    assert job.tick(12.0 + SILENT_S) == [Say(Switch(2.0, 2))]


def test_a_restarted_coordinator_goes_on_where_it_was() -> None:
    job = begun(2, (0, 1))
    job.resize(3, 5.0, [0, 1, 2])
    again = from_json(json.loads(json.dumps(to_json(job))), 6.0)
    assert Save(1) in again.agent_connected(["w0"], 6.0)
    assert again.tick(6.0) == [], "the exit code of w1 may be on its way"
    again.exited("w1", SAVED, 6.1)
    assert again.exited("w0", SAVED, 6.2)[0] == Begin(2, ("w2", "w3", "w4"))
    lost = from_json(json.loads(json.dumps(to_json(begun(1)))), 6.0)
    lost.agent_connected([], 6.0)
    gone, begin, *_ = lost.tick(6.0 + MISSING_S)
    assert (gone, begin) == (Say(Exited("w0", -9)), Begin(2, ("w1",)))


@settings(max_examples=60)
@given(st.data())
def test_whatever_happens_generations_never_overlap_and_the_job_ends(data: Any) -> None:
    """The launcher's part is played here: processes exist between their spawn and their exit."""
    job, now_s = Restarts(Scale(1, 4, data.draw(st.integers(1, 4)))), 0.0
    alive: dict[str, int] = {}
    killed: set[str] = set()

    def carry_out(out: list[Instruction]) -> None:
        for one in out:
            match one:
                case Begin(number, _):
                    assert not alive, "workers of two generations at once"
                    assert number == job.generation.number
                case Spawn(worker, _):
                    alive[worker] = job.generation.number
                case Kill(worker):
                    killed.add(worker)
        assert not job.wrong()

    carry_out(job.agent_connected([], now_s))
    for _ in range(data.draw(st.integers(1, 25))):
        now_s += data.draw(st.sampled_from([0.1, 2.0, 60.0]))
        what = data.draw(st.sampled_from(["resize", "exit", "vanish", "said", "tick", "stop"]))
        if job.ending.over:
            break
        if what == "resize":
            carry_out(job.resize(data.draw(st.integers(1, 4)), now_s))
        elif what in ("exit", "vanish") and alive:
            worker = data.draw(st.sampled_from(sorted(alive)))
            del alive[worker]
            code = -9 if worker in killed else data.draw(st.sampled_from([0, 1, SAVED, -9, 137]))
            carry_out(job.exited(worker, code, now_s) if what == "exit" else job.vanished(worker, now_s))
        elif what == "said":
            carry_out(job.said(now_s, now_s))
        elif what == "tick":
            carry_out(job.tick(now_s))
        elif what == "stop":
            carry_out(job.stop(now_s))
    carry_out(job.stop(now_s))
    for _ in range(20):
        now_s += SAVE_S
        carry_out(job.tick(now_s))
        for worker in [w for w in alive if w in killed]:
            del alive[worker]
            carry_out(job.exited(worker, -9, now_s))
    assert job.ending.over, "a stop is over in the end, whatever the workers do"


def test_a_line_of_output_is_a_report() -> None:
    line = "swell: progress=3 of=10 loss=0.5 lr=1e-3 epoch=2 accuracy=0.9"
    assert said(line) == {
        "done": 3.0, "of": 10.0, "loss": 0.5, "lr": 0.001, "epoch": 2, "metrics": {"accuracy": 0.9}
    }  # fmt: skip
    assert said("swell: progress=40%") == {"done": 40.0, "of": 100.0}
    assert said("swell: saved=12") == {"saved": 12}
    assert said("swell: progress=3 loss=nan") == {"done": 3.0}
    for other in (
        "swell: hello",
        "progress=3",
        "swell: progress=three",
        "swell: =3",
        "swell: " + "a=1 " * 600,
    ):
        assert said(other) is None


def test_speed_is_measured_within_a_generation_and_after_its_first_report() -> None:
    pace = Pace()
    assert "step_s" not in pace.report({"done": 5.0}, 1, 1, 100.0)
    assert pace.report({"done": 9.0}, 1, 1, 102.0)["step_s"] == 0.5
    assert "step_s" not in pace.report({"done": 9.0}, 2, 2, 110.0)
    report = pace.report({"done": 13.0}, 2, 2, 111.0)
    assert (report["step_s"], report["workers"], report["local_batch"]) == (0.25, 2, 2048)
    assert "step_s" not in pace.report({"done": 2.0}, 2, 2, 112.0), "it went back: begin again"


def test_a_program_goes_on_without_a_slot_on_which_it_cannot_be_started_and_fails_if_it_never_ran() -> None:
    job = begun(2, (0, 1))
    assert job.unstartable("w1", "n1: no home", "home", 1.0) == [Kill("w0")]
    assert job.exited("w0", -9, 1.1) == [Begin(2, ("w2",)), Spawn("w2", 0)]
    assert job.unstartable("w2", "n0: no home", "home", 2.0) == [] and not job.ending.over
    assert job.tick(3.0) == [], "no slot is left; it waits for others"
    job.resize(1, 4.0, [2])
    assert job.tick(4.1) == [Begin(3, ("w3",)), Spawn("w3", 2)]
    first = begun(1, (0,))
    (end,) = [
        i for i in first.unstartable("w0", "n0: no such program", "process", 1.0) if isinstance(i, Finish)
    ]
    assert end.code == 1 and "no such program" in end.reason
