"""Files of an unmodified script: only the leader changes them, and newcomers see what the job found."""

from __future__ import annotations

import io
import logging
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swell.train.auto.files import Files, LeaderOnly


class Role:
    def __init__(self) -> None:
        self.leads, self.behind = False, False


@contextmanager
def _worker(tmp_path: Path, role: Role, name: str = "w1") -> Iterator[Files]:
    own, keep = tmp_path / "job" / name, tmp_path / "job" / "files"
    files = Files(own, keep, [tmp_path / "job"], lambda: role.leads, lambda: role.behind)
    with files.installed():
        yield files


def test_what_others_write_goes_nowhere_and_they_read_it_back(tmp_path: Path) -> None:
    (tmp_path / "best.pt").write_bytes(b"the leader's")
    (tmp_path / "old.txt").write_text("old")
    with _worker(tmp_path, Role()):
        with open(tmp_path / "best.pt", "wb") as file:
            torch.save({"a": 1}, file)
        torch.save({"a": 2}, tmp_path / "last.pt")
        os.replace(tmp_path / "last.pt", tmp_path / "newest.pt")
        shutil.copyfile(tmp_path / "best.pt", tmp_path / "copy.pt")
        shutil.copy(tmp_path / "newest.pt", tmp_path / "copied.pt")
        os.makedirs(tmp_path / "run")
        os.makedirs(tmp_path / "run")  # a folder that an earlier worker made is no error
        os.remove(tmp_path / "old.txt")
        shutil.rmtree(tmp_path / "run")
        (tmp_path / "note.txt").write_text("mine")
        assert torch.load(tmp_path / "copy.pt") == {"a": 1} and torch.load(tmp_path / "newest.pt") == {"a": 2}
        assert (tmp_path / "note.txt").read_text() == "mine" and (tmp_path / "copied.pt").exists()
        assert not (tmp_path / "last.pt").exists()
    assert (tmp_path / "best.pt").read_bytes() == b"the leader's"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best.pt", "job", "old.txt"]
    assert not (tmp_path / "job" / "w1").exists(), "nothing private is left behind"


def test_a_log_goes_on_where_the_leader_left_it(tmp_path: Path) -> None:
    role = Role()
    with _worker(tmp_path, role):
        handler = logging.FileHandler(tmp_path / "train.log", mode="w")
        log = logging.Logger("of the script")
        log.addHandler(handler)
        log.info("not shown")
        (tmp_path / "job" / "x").mkdir(parents=True)
        role.leads = True
        with open(tmp_path / "train.log", "w") as file:
            file.write("epoch 0\n")
        log.info("epoch 1")
        handler.close()
    assert (tmp_path / "train.log").read_text() == "epoch 0\nepoch 1\n"


def test_a_newcomer_sees_what_the_job_resumed_from_though_it_is_gone(tmp_path: Path) -> None:
    for number in (40, 50):
        (tmp_path / f"checkpoint-{number}").mkdir()
        (tmp_path / f"checkpoint-{number}" / "state.json").write_text(str(number))
    (tmp_path / "once.txt").write_text("read")
    leader, newcomer = Role(), Role()
    leader.leads = newcomer.behind = True
    with _worker(tmp_path, leader, "w0"):
        assert (tmp_path / "checkpoint-50" / "state.json").read_text() == "50"
        assert (tmp_path / "once.txt").read_text() == "read"
        with _worker(tmp_path, Role(), "w1"):
            (tmp_path / "checkpoint-60").mkdir()  # another member was here before the leader
        (tmp_path / "checkpoint-60").mkdir(exist_ok=True)
        (tmp_path / "checkpoint-60" / "state.json").write_text("60")
        shutil.rmtree(tmp_path / "checkpoint-40")
        shutil.rmtree(tmp_path / "checkpoint-50")
        os.remove(tmp_path / "once.txt")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-60", "job"]
    with _worker(tmp_path, newcomer):
        assert sorted(os.listdir(tmp_path)) == ["checkpoint-50", "job", "once.txt"]
        assert [p.name for p in tmp_path.glob("checkpoint-*")] == ["checkpoint-50"]
        assert os.path.isdir(tmp_path / "checkpoint-50") and not os.path.exists(tmp_path / "checkpoint-60")
        assert (tmp_path / "checkpoint-50" / "state.json").read_text() == "50"
        assert os.listdir(tmp_path / "checkpoint-50") == ["state.json"]
        assert (tmp_path / "once.txt").read_text() == "read"
        os.makedirs(tmp_path / "checkpoint-51")  # it counts one step for each pass that is over
        assert os.listdir(tmp_path / "checkpoint-51") == []
        (tmp_path / "checkpoint-51" / "state.json").write_text("51")
        assert os.listdir(tmp_path / "checkpoint-51") == ["state.json"]
        assert (tmp_path / "checkpoint-51" / "state.json").read_text() == "51"
        assert sorted(p.name for p in tmp_path.glob("checkpoint-*")) == ["checkpoint-50", "checkpoint-51"]
        with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
            (Path(folder) / "for.txt").write_text("another program")
            assert subprocess.check_output(["cat", f"{folder}/for.txt"]) == b"another program"
        newcomer.behind = False
        assert sorted(os.listdir(tmp_path)) == ["checkpoint-60", "job"], "it has come to the job's position"


def test_a_newcomer_sees_the_files_as_the_job_found_them(tmp_path: Path) -> None:
    (tmp_path / "resume.txt").write_text("10")
    leader, newcomer = Role(), Role()
    leader.leads = newcomer.behind = True
    with _worker(tmp_path, leader, "w0"):
        assert (tmp_path / "resume.txt").read_text() == "10"
        (tmp_path / "resume.txt").write_text("49")
        (tmp_path / "made.txt").write_text("49")
    with _worker(tmp_path, newcomer) as files:
        assert (tmp_path / "resume.txt").read_text() == "10"
        assert not os.path.exists(tmp_path / "made.txt") and "made.txt" not in os.listdir(tmp_path)
        with pytest.raises(FileNotFoundError):
            open(tmp_path / "made.txt")
        newcomer.behind = False
        assert (tmp_path / "made.txt").read_text() == "49", "it has come to the job's position"
        files.journal.begin_anew()
    newcomer.behind = True
    with _worker(tmp_path, newcomer):
        assert (tmp_path / "resume.txt").read_text() == "49", (
            "another run of the job begins with what is there"
        )


@contextmanager
def _pair(tmp_path: Path) -> Iterator[tuple[Role, Files, Role, Files]]:
    """A leader and another member; each call of the script is made through one of them."""
    roles = Role(), Role()
    roles[0].leads = True
    files = [
        Files(tmp_path / "job" / f"w{i}", tmp_path / "job" / "files", [tmp_path / "job"], *_asked(role))
        for i, role in enumerate(roles)
    ]
    yield roles[0], files[0], roles[1], files[1]


def _asked(role: Role) -> Any:
    return (lambda: role.leads), (lambda: role.behind)


def _row(*streams: Any, number: int) -> None:
    for stream in streams:
        stream.write(f"{number},{number / 7}\n")


@pytest.mark.parametrize("flushed", [3, 5, 6])
@pytest.mark.parametrize("comes_late", [False, True])
def test_a_new_leader_goes_on_in_the_middle_of_a_file_that_the_script_keeps_open(
    tmp_path: Path, flushed: int, comes_late: bool
) -> None:
    """The leader wrote `flushed` rows of the five that the other member has written when it dies (or one
    more, because it was ahead); what is in its buffers is gone."""
    path = tmp_path / "metrics.csv"
    with _pair(tmp_path) as (_, leader, role, other):
        role.behind = comes_late
        theirs, mine = leader.open(path, "w"), other.open(path, "w")
        theirs.write("epoch,loss\n")
        mine.write("epoch,loss\n")
        if comes_late:
            mine.write("0,of another run\n")  # a newcomer makes one batch of a pass
        _row(theirs, number=0)
        if comes_late:
            role.behind = False
            other.arrive(leader.positions())
        else:
            _row(mine, number=0)
        for number in range(1, 5):
            _row(theirs, mine, number=number)
            if number + 1 == flushed:
                theirs.flush()
            leader.stepped()
            other.stepped()
        if flushed == 6:
            _row(theirs, number=5)
            theirs.flush()
        os.ftruncate(theirs.fileno(), os.path.getsize(path))  # the rest is in its buffers
        role.leads = True
        other.stepped()
        for number in range(5, 8):
            _row(mine, number=number)
        mine.close()
        rows = path.read_text().splitlines()
        os.dup2(os.open(os.devnull, os.O_WRONLY), theirs.fileno())  # what a dead process had in its buffers
    assert rows == ["epoch,loss", *(f"{n},{n / 7}" for n in range(8))], "no row is lost, and none is twice"


def test_what_was_saved_since_the_last_step_is_written_by_the_next_leader(tmp_path: Path) -> None:
    best, log, folder = tmp_path / "best.txt", tmp_path / "log.txt", tmp_path / "made"
    with _pair(tmp_path) as (_, leader, role, other):
        for files in (leader, other):
            for text in ("one", "two"):
                with files.open(best, "w") as file:
                    file.write(text)
                with files.open(log, "a") as file:
                    file.write(f"{text}\n")
            files.stepped()
        with other.open(best, "w") as file:
            file.write("three")
        for text in ("three\n", "four\n"):
            with other.open(log, "a") as file:
                file.write(text)
        other.mkdir(folder)
        with leader.open(log, "a") as file:
            file.write("three\n")  # and then it dies, before it has written the rest
        assert best.read_text() == "two"
        role.leads = True
        other.stepped()
        assert best.read_text() == "three" and folder.is_dir()
        assert log.read_text() == "one\ntwo\nthree\nfour\n"


def test_what_others_saved_before_the_last_step_does_not_replace_the_leaders(tmp_path: Path) -> None:
    best = tmp_path / "best.txt"
    with _pair(tmp_path) as (_, leader, role, other):
        for files, text in ((other, "mine"), (leader, "theirs")):
            with files.open(best, "w") as file:
                file.write(text)
        other.stepped()
        role.leads = True
        other.stepped()
        assert best.read_text() == "theirs"


def test_a_newcomer_that_has_come_to_the_jobs_position_sees_the_leaders_files(tmp_path: Path) -> None:
    best = tmp_path / "best.txt"
    with _pair(tmp_path) as (_, leader, role, other):
        role.behind = True
        for files, text in ((leader, "of fifty epochs"), (other, "of one batch")):
            with files.open(best, "w") as file:
                file.write(text)
        assert other.open(best).read() == "of one batch"
        role.behind = False
        other.arrive(leader.positions())
        assert other.open(best).read() == "of fifty epochs"


def test_others_than_the_leader_make_no_folders_beside_its_own(tmp_path: Path) -> None:
    with _worker(tmp_path, Role()):
        os.makedirs(tmp_path / "runs" / "at_12_03")
        assert os.path.isdir(tmp_path / "runs" / "at_12_03") and os.listdir(tmp_path / "runs") == ["at_12_03"]
    assert not (tmp_path / "runs").exists()


def _stream(tmp_path: Path, role: Role) -> tuple[io.StringIO, Any, LeaderOnly]:
    shown, worker = io.StringIO(), SimpleNamespace(steps=0, leads=lambda: role.leads, behind=False)
    return shown, worker, LeaderOnly(shown, worker, tmp_path / "mark")


@pytest.mark.parametrize("written", [0, 1, 2])
def test_a_line_at_a_leaders_death_is_neither_lost_nor_doubled(tmp_path: Path, written: int) -> None:
    """Of two lines between two steps the leader has written `written` when it dies."""
    roles = Role(), Role()
    roles[0].leads = True
    (shown, leader, out), (late, other, mine) = (_stream(tmp_path, role) for role in roles)
    for step in (1, 2, 3):
        leader.steps = other.steps = step
        for stream in (out, mine):
            stream.stepped()
            stream.write(f"step {step}\n")
            if step < 3:
                stream.write(f"again {step}\n")
    out.write("again 3\n" if written == 2 else "")
    mine.write("again 3\n")
    assert late.getvalue() == ""
    before = shown.getvalue()
    if written == 0:  # it died before the line
        before = before.removesuffix("step 3\n")
        (tmp_path / "mark").write_bytes(struct.pack("<qq", 2, len("step 2\nagain 2\n")))
    roles[1].leads, other.steps = True, 4
    mine.stepped()
    mine.write("step 4\n")
    expected = "".join(f"step {n}\nagain {n}\n" for n in (1, 2, 3)) + "step 4\n"
    assert before + late.getvalue() == expected


def test_what_a_job_prints_again_after_a_restart_from_a_checkpoint_is_not_shown_twice(tmp_path: Path) -> None:
    role = Role()
    role.leads = True
    shown, worker, out = _stream(tmp_path, role)
    for worker.steps in range(5):
        out.write(f"{worker.steps} ")
    again, worker, out = _stream(tmp_path, role)
    for worker.steps in range(2, 8):
        out.write(f"{worker.steps} ")
    assert shown.getvalue() + again.getvalue() == "0 1 2 3 4 5 6 7 "
    out.begin_anew()
    anew, worker, out = _stream(tmp_path, role)
    out.write("0 ")
    assert anew.getvalue() == "0 "


KEPT_OPEN = """
    import csv, os, sys, time
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    from torch.utils.tensorboard import SummaryWriter

    epochs, folder = int(sys.argv[1]), sys.argv[2]
    torch.manual_seed(0)
    x = torch.randn(60, 4)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 10)
    writer = SummaryWriter(f"{folder}/runs/{time.time()}")
    with open(f"{folder}/metrics.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["epoch", "seen"])
        seen = 0
        for epoch in range(epochs):
            for a, b in loader:
                time.sleep(0.005)
                optimizer.zero_grad()
                nn.functional.mse_loss(model(a), b).backward()
                optimizer.step()
                seen += 1
            rows.writerow([epoch, seen])
            print("epoch", epoch)
            writer.add_scalar("seen", seen, epoch)
    writer.close()
"""


def test_rows_lines_and_events_of_a_script_though_its_leaders_die(stage: Any, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    job = stage.run(KEPT_OPEN, "60", str(tmp_path), workers=1, minimum=1, settings={"auto": True})
    job.wait_for(lambda s: s["epoch"] >= 5)
    for epoch in (15, 30):
        job.resize(2)
        status = job.members(2)
        job.wait_for(lambda s, e=epoch, before=status["epoch"]: s["epoch"] >= max(e, before + 3))
        job.kill(0)
        job.members(2)
    assert job.wait(120) == 0, job.output()
    assert "could not follow" not in job.output()
    rows = [line.split(",") for line in (tmp_path / "metrics.csv").read_text().splitlines()]
    assert rows[0] == ["epoch", "seen"]
    assert [int(epoch) for epoch, _ in rows[1:]] == list(range(60)), "also those in a dead leader's buffers"
    assert all(360 <= int(seen) + 6 * (59 - int(epoch)) <= 362 for epoch, seen in rows[1:])
    shown = [line.split()[-1] for line in job.output().splitlines() if "epoch" in line]
    assert [int(epoch) for epoch in shown] == list(range(60))
    folders = list((tmp_path / "runs").iterdir())
    assert len(folders) == 1, "the first leader's"
    events = EventAccumulator(str(folders[0]))
    events.Reload()
    steps = [event.step for event in events.Scalars("seen")]
    assert steps == sorted(set(steps)) and len(steps) >= 56, "a second of events dies with each leader"
