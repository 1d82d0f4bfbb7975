"""Errors end with what to do next: those of the source as they are written, and some as they are met."""

from __future__ import annotations

import ast
import errno
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

import swell
from swell.cli import main

SOURCES = Path(swell.__file__).parent
ROOMS = ("api", "cli", "control", "domain", "engines", "policies", "report", "sim")
RAISED = ("SwellError", "InputError", "NotFound", "Forbidden", "NotAuthenticated", "Unreachable", "TooMany")
RAISED += ("StoreUnavailable", "ServerFailed", "ConnectionLost", "Silent")
NEXT = re.compile(
    r"swell |--[a-z]|\bmust\b|\bneeds?\b|such as|Did you mean|(: _|trace has _)$|"
    r"\b(give|try|check|install|ask|wait|set|use|name|see|start|stop|remove|send|add|take|raise|make|restore)\b|"
    r"\b(keep|leave|known|there are|allowed|lists)\b",
    re.IGNORECASE,
)
"""Words of a next step, or of what would be allowed."""


def messages() -> Iterator[tuple[str, str]]:
    """Where an error for people is raised, and its text; what is filled in stands as an underscore."""
    for room in ROOMS:
        for path in sorted((SOURCES / room).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                    name = node.exc.func.id if isinstance(node.exc.func, ast.Name) else ""
                    text = written(node.exc.args[0])
                    if name in RAISED and text is not None:
                        yield f"{path.relative_to(SOURCES)}:{node.lineno}", text


def written(node: ast.expr) -> str | None:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(written(part) or "_" for part in node.values)
    return None


def test_every_error_says_what_to_do_next_or_what_is_allowed() -> None:
    found = list(messages())
    assert len(found) > 80
    assert [(where, text) for where, text in found if not NEXT.search(text)] == []


def test_a_dead_end_would_be_found() -> None:
    assert not NEXT.search("'_' is not a job, and that is that")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["queue"], "'swell up'"),
        (["top"], "'swell up'"),
        (["dashboard"], "'swell up'"),
        (["report", "none.jsonl", "-o", "r.html"], "'swell events --json'"),
        (["report", "bad.jsonl", "-o", "no/where.html"], "give another file"),
        (["report", "bad.jsonl", "-o", "r.html"], "'swell simulate --events'"),
        (["replay", "--from", "none.jsonl"], "'swell events --json --admin'"),
        (
            ["simulate", "bad.jsonl", "--cluster", "1x2", "--policy", "elasticflo"],
            "Did you mean 'elasticflow'?",
        ),
        (["restore", "bad.jsonl"], "'swell backup FILE'"),
        (["resize", "nothing", "2"], "swell run"),
        (["sumbit"], "Did you mean 'submit'?"),
    ],
    ids=lambda value: "-".join(value[:2]) if isinstance(value, list) else "",
)
def test_what_to_type_next_is_in_the_error(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("SWELL_URL", "SWELL_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SWELL_HOME", str(tmp_path / "home"))
    Path("bad.jsonl").write_text("what is this\n")
    done = CliRunner().invoke(main, words)
    assert done.exit_code in (1, 2), done.output
    assert said in done.output and "Traceback" not in done.output


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "server.json"))

    monkeypatch.setattr("swell.cli._platform.serve", full)
    done = CliRunner().invoke(main, ["up", "--home", str(tmp_path), "--slots", "1"])
    assert done.exit_code == 1
    assert done.stderr == (
        f"swell: No space left on device: {tmp_path / 'server.json'}. Make room there, then try again.\n"
    )


@pytest.fixture
def unreadable(tmp_path: Path) -> Iterator[tuple[list[str], Path]]:
    """A home of another account, and what makes even root one that cannot read it."""
    home = tmp_path / "home"
    (home / "tokens").mkdir(parents=True)
    (home / "store.db").touch(mode=0o600)
    words = list[str]()
    if os.geteuid() == 0:
        os.chown(home, 12345, 12345)
        words = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
        if subprocess.run([*words, "true"], capture_output=True).returncode:
            pytest.skip("root cannot give up its rights to files here (setpriv)")
    home.chmod(0o700 if words else 0)
    yield words, home
    home.chmod(0o700)


def test_a_home_of_another_account_is_named_without_a_traceback(unreadable: tuple[list[str], Path]) -> None:
    words, home = unreadable
    script = (
        "import sys\nfrom click.testing import CliRunner\nfrom swell.cli import main\n"
        f"for one in {COMMANDS!r}:\n"
        f"    done = CliRunner().invoke(main, [*one, '--home', {str(home)!r}])\n"
        "    print(one[0], done.exit_code, 'Traceback' in done.output, done.output.replace('\\n', ' '))\n"
    )
    done = subprocess.run([*words, sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    lines = done.stdout.splitlines()
    assert len(lines) == len(COMMANDS), done.stderr
    for (name, *_), line in zip(COMMANDS, lines):
        assert line.startswith(f"{name} 1 False "), line
        assert str(home) in line and f"uid {os.geteuid()}" in line and "account that owns" in line, line


COMMANDS = (["queue"], ["doctor", "--json"], ["gc"], ["token", "list"], ["backup", "file.tar"], ["down"])


def test_an_account_without_a_home_directory_is_told_what_to_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("SWELL_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    done = CliRunner().invoke(main, ["queue"])
    assert done.exit_code == 2 and "--home" in done.output and "SWELL_HOME" in done.output
