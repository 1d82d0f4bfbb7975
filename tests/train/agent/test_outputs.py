"""A job's output: bounded on disk, offsets that stay, lines without an end, full disks."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from swell.train.agent import outputs
from swell.train.agent.outputs import OutputFile, Tail
from swell.train.agent.regular import open_regular, read_regular, remove_tree, used_bytes
from swell.train.start.bootstrap import ForgivingFile


def test_only_the_newest_output_is_kept_and_offsets_stay(tmp_path: Path) -> None:
    path = tmp_path / "output.log"
    file = OutputFile(path, most_bytes=2 << 20)
    line = "x" * 1023
    for n in range(8 << 10):
        file.say(f"{n:08d}{line[8:]}")
    file.close()
    assert path.stat().st_size == 8 << 20
    assert path.stat().st_blocks * 512 <= 4 << 20, "the rest was given back"
    data, after = outputs.read(path, 0, 1024)
    first = int(data[:8])
    assert 0 < first <= 6 << 10 and after == (first + 1) * 1024, (
        "reading from 0 goes on where there is output"
    )
    assert outputs.read(path, (8 << 20) - 1024, 4096) == (f"{8191:08d}{line[8:]}\n".encode(), 8 << 20)
    assert outputs.read(path, 1 << 62, 10) == (b"", 1 << 62)


def test_a_file_system_without_holes_keeps_the_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outputs, "give_back", lambda *_: False)
    file = OutputFile(tmp_path / "output.log", most_bytes=1 << 20)
    for _ in range(5000):
        file.say("x" * 1023)
    file.close()
    assert (tmp_path / "output.log").stat().st_size < 3 << 20
    assert (tmp_path / "output.log").read_bytes().endswith(b"the rest is not kept\n")


def test_a_line_without_an_end_is_shown_and_read_once(tmp_path: Path) -> None:
    path = tmp_path / "w0.log"
    path.write_bytes(b"done\n50%")
    tail = Tail(path)
    assert tail.lines() == ["done"]
    shown = [line for _ in range(outputs.SHOWN_AFTER_TURNS + 1) for line in tail.lines()]
    assert shown == ["50%"], "a progress bar appears, once"
    with path.open("ab") as worker:
        worker.write(b"y" * (40 << 10))
    pieces = tail.lines()
    assert sum(map(len, pieces)) == 40 << 10 and all(len(p) <= outputs.LONGEST_LINE for p in pieces)
    with path.open("ab") as worker:
        worker.write(b"z" * (5 << 20))
    assert len("".join(tail.lines())) == 1 << 20, "a bounded amount at a time"
    while tail.lines():
        pass
    assert path.stat().st_blocks * 512 <= 3 << 20, "what was copied is given back"
    tail.close()


def test_printing_on_a_full_disk_goes_on() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(OSError), io.FileIO(os.dup(full), "w") as plain:
        plain.write(b"x")
    stream = io.TextIOWrapper(io.BufferedWriter(ForgivingFile(full, "w")), line_buffering=True)
    print("lost, and nobody minds", file=stream)
    stream.close()


def test_what_is_no_plain_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", 1 << 31)
    for name in ("fifo", "link", "absent"):
        with pytest.raises(OSError):
            open_regular(tmp_path / name)
    with pytest.raises(OSError, match="more than 100 bytes"):
        read_regular(tmp_path / "large", 100)


def test_who_walks_through_many_files_gives_a_sign_of_life_with_the_first_and_every_thousand(
    tmp_path: Path,
) -> None:
    folder, beats = tmp_path / "many", []
    folder.mkdir()
    for number in range(1001):
        (folder / str(number)).touch()
    used_bytes(folder, beat=lambda: beats.append("counted"))
    remove_tree(folder, beat=lambda: beats.append("removed"))
    assert beats == ["counted"] * 2 + ["removed"] * 2 and not folder.exists()


def test_the_space_of_a_folder_is_that_of_each_file_once_however_deep(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b", tmp_path / "b" / "c"]
    for folder in folders:
        folder.mkdir()
        (folder / "file").write_bytes(b"x" * 100_000)
        (folder / "second name").hardlink_to(folder / "file")
    files = [folder / "file" for folder in folders]
    assert used_bytes(tmp_path) == sum(file.stat().st_blocks * 512 for file in files) >= 300_000
    assert used_bytes(files[0]) == used_bytes(tmp_path / "nothing") == 0, "neither is a folder"
