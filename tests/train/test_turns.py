"""Jobs on one GPU: side by side where that pays, else in turns. The GPU here is a sleep (`neighbour.py`)."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.waiting import wait_until

from swell.train.turns import Turns, rules
from swell.train.turns.rules import Neighbour, Table

SCRIPT = Path(__file__).parent / "neighbour.py"


class Jobs:
    """Real processes on one file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, step_ms: float, crowded: float) -> None:
        number = len(self.processes)
        words = [sys.executable, str(SCRIPT), str(self.folder / "0"), str(step_ms), str(crowded)]
        with (self.folder / f"output{number}").open("wb") as output:
            self.processes.append(subprocess.Popen(words, stdout=output))

    def lines(self, number: int) -> list[list[str]]:
        text = (self.folder / f"output{number}").read_text()
        return [line.split() for line in text.splitlines()[: text.count("\n")]]

    def steps(self, number: int, since_s: float = 0.0) -> list[float]:
        return [float(w[0]) for w in self.lines(number) if w[0] != "verdict" and float(w[0]) > since_s]

    def verdicts(self) -> list[tuple[bool, float]]:
        found = [w for i in range(len(self.processes)) for w in self.lines(i) if w[0] == "verdict"]
        return [(w[1] == "True", float(w[2])) for w in found]

    def clear(self, number: int) -> None:
        """A killed job computes no more."""
        (self.folder / "computing" / str(self.processes[number].pid)).unlink(missing_ok=True)


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    made = Jobs(tmp_path)
    yield made
    for process in made.processes:
        process.kill()
        process.wait()


def test_jobs_that_slow_each_other_take_turns_through_freezes_and_deaths(jobs: Jobs) -> None:
    for _ in range(2):
        jobs.start(8, 0.3)  # side by side each has 0.3 of its speed, together 0.6
    wait_until(lambda: len(jobs.verdicts()) > 0, 30, "a verdict")
    in_turns, worth = jobs.verdicts()[0]
    assert in_turns
    assert worth < 0.9
    begin_s = time.monotonic()
    wait_until(lambda: time.monotonic() > begin_s + 2.0, 5, "two seconds")
    counts = [len(jobs.steps(i, begin_s)) for i in range(2)]
    assert min(counts) > 0.6 * max(counts), "the turns are of equal length"
    met = [w for i in range(2) for w in jobs.lines(i) if w[0] != "verdict" and float(w[0]) > begin_s]
    assert sum(int(w[1]) for w in met) < 0.1 * len(met), "hardly a step was beside the other's"
    assert sum(counts) > 0.65 * 2000 / 9, "together nearly as fast as one alone"

    jobs.processes[0].send_signal(signal.SIGSTOP)
    jobs.clear(0)
    stopped_s = time.monotonic()
    wait_until(lambda: len(jobs.steps(1, stopped_s + 0.5)) > 20, 10, "the other's steps")
    jobs.processes[0].send_signal(signal.SIGCONT)
    back_s = time.monotonic()
    wait_until(lambda: len(jobs.steps(0, back_s)) > 20, 10, "steps after the freeze")

    jobs.processes[1].kill()
    jobs.processes[1].wait()
    jobs.clear(1)
    killed_s = time.monotonic()
    wait_until(lambda: len(jobs.steps(0, killed_s + 0.5)) > 40, 10, "steps after the death")
    table = json.loads((jobs.folder / "0").read_text())
    assert (len(table["jobs"]), table["in_turns"]) == (1, False), "alone again, and without turns"


def test_jobs_that_do_not_slow_each_other_stay_side_by_side(jobs: Jobs) -> None:
    for _ in range(2):
        jobs.start(8, 1.0)
    wait_until(lambda: len(jobs.verdicts()) > 0, 30, "a verdict")
    in_turns, worth = jobs.verdicts()[0]
    assert not in_turns
    assert worth > 1.3
    begin_s = time.monotonic()
    wait_until(lambda: all(len(jobs.steps(i, begin_s)) > 30 for i in range(2)), 10, "steps of both")


def _table(*speeds: tuple[float, float], now_s: float = 100.0) -> Table:
    """A table in the second half of a trial: for each job its speed alone and side by side."""
    jobs = {i + 1: Neighbour(now_s, 0.01, alone, beside) for i, (alone, beside) in enumerate(speeds)}
    return Table(jobs, in_turns=False, trial=True, since_s=now_s - 2.0)


@pytest.mark.parametrize(
    ("speeds", "in_turns"),
    [
        (((100, 60), (10, 6)), False),  # 1.2 together
        (((100, 50), (10, 5)), True),  # no faster than in turns
        (((100, 100), (10, 3)), True),  # 1.3 together, but the second would have 5 in turns
        (((100, 30), (100, 30), (100, 30), (100, 30)), False),
        (((100, 90), (0, 6)), False),  # of the second nothing is known: there is no reason to wait
    ],
)
def test_the_verdict(speeds: tuple[tuple[float, float], ...], in_turns: bool) -> None:
    table = _table(*speeds)
    if not all(alone for alone, _ in speeds):
        table.since_s -= rules.TRIAL_S
    rules.judge(table, 100.0)
    assert (table.in_turns, table.trial) == (in_turns, False)


def test_a_job_with_more_workers_on_the_gpu_has_longer_turns_and_must_have_more_side_by_side() -> None:
    table = _table((100, 40), (100, 70))
    table.jobs[1].workers = 2  # in turns it has two thirds of the time
    rules.judge(table, 100.0)
    assert table.in_turns, "1.1 together, but the first would have 67 in turns"
    table = _table((100, 62), (100, 45))
    table.jobs[1].workers = 2
    rules.judge(table, 100.0)
    assert not table.in_turns


def test_another_number_of_workers_on_a_gpu_begins_a_trial(tmp_path: Path) -> None:
    turns = Turns(tmp_path / "1", lambda: None, lambda verdict: None)
    for gpus in (["1", "1", "0"], ["1"]):
        turns.after_step([{"gpu": gpu} for gpu in gpus], 8, leads=True)
        turns.before_step()
        table = Table.from_json(json.loads((tmp_path / "1").read_text()), time.monotonic())
        (me,) = table.jobs.values()
        assert (me.workers, me.alone) == (gpus.count("1"), 0.0)
        assert turns._slice_s == rules.SLICE_S * gpus.count("1")
        me.alone = 50.0
        table.since_s = 0.0
        (tmp_path / "1").write_text(json.dumps(table.to_json()))


def test_who_does_not_train_at_the_moment_holds_up_no_trial() -> None:
    table = _table((100, 60), (100, 60), (100, 0))
    rules.judge(table, 100.0)
    assert table.trial, "the third has not shown its speed"
    table.jobs[3].seen_s = 90.0
    rules.judge(table, 100.0)
    assert not table.trial


def test_turns_go_round_and_pass_over_who_does_not_ask() -> None:
    table = _table((1, 1), (1, 1), (1, 1))
    table.in_turns, table.trial = True, False
    now_s, had = 100.0, []
    for turn in range(9):
        for pid in (3, 2, 1):
            if turn < 6 or pid != 2:
                rules.may_go(table, pid, now_s)
        had.append(table.holder)
        now_s += 0.3
        for other in (1, 2, 3):  # the others have waited meanwhile
            if other != table.holder and (turn < 6 or other != 2):
                rules.may_go(table, other, now_s)
        now_s += 0.3
        rules.end_turn(table, table.holder, now_s)
        if turn == 5:
            now_s += rules.ASKS_S
    assert had[:6] == [3, 1, 2, 3, 1, 2]
    assert set(had[6:]) == {1, 3}
    assert had[6] != had[7] != had[8]


def test_a_turn_that_nobody_asks_for_goes_on_and_one_that_never_ends_is_taken() -> None:
    table = _table((1, 1), (1, 1))
    table.in_turns, table.trial = True, False
    assert rules.may_go(table, 1, 100.0)
    assert not rules.end_turn(table, 1, 100.3), "nobody waits"
    assert not rules.may_go(table, 2, 100.4)
    assert rules.may_go(table, 2, 110.0), "the holder has not come back"


def test_what_was_learned_alone_spares_the_turns_of_the_trial() -> None:
    table = Table()
    rules.enter(table, 1, lambda pid: True, 10.0)
    rules.measured(table, 1, 50.0)
    rules.enter(table, 2, lambda pid: True, 20.0)
    assert (table.trial, table.in_turns) == (True, True), "of the second nothing is known"
    rules.measured(table, 2, 40.0)
    rules.judge(table, 21.0)
    rules.enter(table, 3, lambda pid: pid != 3, 30.0)
    rules.leave(table, 3, 30.5)
    assert (table.trial, table.in_turns) == (True, False), "both are known"
    rules.enter(table, 1, lambda pid: pid == 1, 31.0)
    assert (list(table.jobs), table.trial) == ([1], False)


def test_a_verdict_is_reviewed_after_a_while() -> None:
    table = _table((100, 60), (100, 60))
    rules.judge(table, 100.0)
    rules.enter(table, 1, lambda pid: True, 100.0 + rules.REVIEW_S - 1)
    assert not table.trial
    rules.enter(table, 1, lambda pid: True, 100.0 + rules.REVIEW_S + 1)
    assert (table.trial, table.in_turns) == (True, True), "with new measurements"


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[",
        "[]",
        '{"jobs": 3}',
        '{"jobs": {"-1": {}}}',
        '{"jobs": {"x": {}}}',
        json.dumps(Table({-1: Neighbour()}).to_json()),
        json.dumps(Table({2: Neighbour(alone=-1.0)}).to_json()),
        json.dumps(Table({2: Neighbour(seen_s=1e12)}).to_json()),
        json.dumps(Table({2: Neighbour(step_s=float("nan"))}).to_json()),
        json.dumps(Table({2: Neighbour(workers=0)}).to_json()),
        json.dumps(Table({2: Neighbour(workers=1000)}).to_json()),
        json.dumps(Table({1 << 40: Neighbour()}).to_json()),
        json.dumps(Table({i + 1: Neighbour() for i in range(300)}).to_json()),
    ],
)
def test_a_spoilt_file_holds_up_nobody(tmp_path: Path, content: str) -> None:
    (tmp_path / "0").write_text(content)
    turns = Turns(tmp_path / "0", lambda: None, lambda verdict: None)
    turns.after_step([], 8, leads=True)
    begin_s = time.monotonic()
    turns.before_step()
    assert time.monotonic() - begin_s < 0.5
    table = json.loads((tmp_path / "0").read_text())
    assert len(table["jobs"]) == 1, "the file is made anew"
    turns.leave()
    assert json.loads((tmp_path / "0").read_text())["jobs"] == {}


def test_a_job_on_several_gpus_is_in_the_file_of_each_and_leaves_those_it_gives_back(tmp_path: Path) -> None:
    turns = Turns(tmp_path / "1", lambda: None, lambda verdict: None)

    def present() -> list[str]:
        return sorted(p.name for p in tmp_path.iterdir() if json.loads(p.read_text())["jobs"])

    turns.after_step([{"gpu": "1"}, {"gpu": "0"}, {"gpu": "../x"}], 8, leads=True)
    turns.before_step()
    assert present() == ["0", "1"]
    turns.after_step([{"gpu": "1"}], 8, leads=True)
    turns.before_step()
    assert present() == ["1"]
    turns.after_step([{"gpu": "1"}], 8, leads=False)
    assert present() == [], "another worker leads the job now"
