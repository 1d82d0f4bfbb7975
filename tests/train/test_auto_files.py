"""Files of an unmodified script: only the leader changes them, and newcomers see what the job found."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from swell.train.auto.files import Files


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
