"""The linter of our words (scripts/words.py)."""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "words.py"


@pytest.fixture(scope="module")
def words() -> Any:
    spec = importlib.util.spec_from_file_location("words", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["words"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "line", "form"),
    [
        ('"""The coordinator tells each worker its rank."""', 1, "a process that speaks"),
        ('"""Wait.\n\nUntil a worker that\nhas not said anything is gone.\n"""', 3, "a process that speaks"),
        ("x = 1  # the engine does not know it", 1, "a process that speaks"),
        ("# Sent at once, and each member\n# hears of it.", 1, "a process that speaks"),
        ('"""Ask the launcher for a worker."""', 1, "a process that speaks"),
        ('"""Taken by whoever comes first."""', 1, '"whoever"'),
        ('def f():\n    """What a job may have."""', 2, '"What" or "Have" at the front'),
        ('"""\nHave it end.\n"""', 2, '"What" or "Have" at the front'),
        ('"""Of a job that ended, the checkpoint."""', 1, "a genitive at the front"),
        ('"""Ends. Of the jobs only one goes on."""', 1, "a genitive at the front"),
        ("def ask_again(x): ...", 1, "a name that speaks"),
        ("def send(told: int): ...", 1, "a name that speaks"),
        ("self.heardOf = 1", 1, "a name that speaks"),
        ("class JobAsked:\n    number: int", 1, "a name that speaks"),
    ],
)
def test_the_old_dialect_is_found_with_its_line(words: Any, text: str, line: int, form: str) -> None:
    assert [(find.line, find.form) for find in words.finds("a.py", text)] == [(line, form)]


@pytest.mark.parametrize(
    "text",
    [
        '"""Sends each worker its rank; a person who asks gets an answer."""',
        '"""The time at which its length is known."""',
        'TEXT = """\nWhat a worker says.\n"""\nx = 1',
        'print("# the worker says so")',
        "known, unknown, essay = 1, 2, 3",
        "x = 1  # the engine does not know it  # words: ok",
        '"""A checkpoint of the job. Half of all jobs have one. What it costs is in the docs."""',
    ],
)
def test_plain_english_and_other_strings_pass(words: Any, text: str) -> None:
    assert list(words.finds("a.py", text)) == []


@pytest.fixture
def tree(words: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one committed file that has one use, and as many are allowed."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "old.py").write_text('"""What it was."""\n')
    monkeypatch.setattr(words, "ROOT", tmp_path)
    monkeypatch.setattr(words, "ALLOWED", tmp_path / "words.toml")
    for command in (("init", "-q"), ("add", "."), ("commit", "-qm", "one")):
        words._git("-c", "user.name=a", "-c", "user.email=a@b", *command)
    assert words.update(words.everything()) is None
    return tmp_path / "src"


def test_a_file_may_have_what_it_had_and_a_new_file_none(words: Any, tree: Path) -> None:
    assert words.allowed() == {"src/old.py": 1}
    assert words.over(words.everything(), words.allowed()) == []
    (tree / "new.py").write_text('"""Have it."""\n')
    lines = words.over(words.everything(), words.allowed())
    assert lines[-1] == "src/new.py: 1 uses, 0 are allowed"


def test_what_is_allowed_goes_down_and_moves_but_never_grows(words: Any, tree: Path) -> None:
    (tree / "old.py").rename(tree / "moved.py")
    assert words.update(words.everything()) is None
    assert words.allowed() == {"src/moved.py": 1}
    (tree / "more.py").write_text('"""Have it."""\n')
    assert words.update(words.everything()) == "2 uses, 1 are allowed: rewrite the new ones first"
    assert words.allowed() == {"src/moved.py": 1}


def test_only_new_lines_are_looked_at(words: Any, tree: Path) -> None:
    assert words.new("HEAD") == []
    with (tree / "old.py").open("a") as file:
        file.write("\n\ndef tell() -> None: ...\n")
    (tree / "untracked.py").write_text("# whoever\n")
    assert [(f.file, f.line, f.text) for f in words.new("HEAD")] == [
        ("src/old.py", 4, "tell"),
        ("src/untracked.py", 1, "whoever"),
    ]


def test_looking_at_everything_is_fast(words: Any) -> None:
    begin_s = time.process_time()
    words.everything()
    assert time.process_time() - begin_s < 2.0
