"""The guides tell the truth: every command in them is run, in order, as a reader would."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.commands import Commands

pytest.importorskip("torch")
pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

DOCS = Path(__file__).resolve().parents[2] / "docs" / "guides"
README = "../../README.md"
API = "../reference/api.md"
ELSEWHERE = ("pip", "export")
"""Commands of a reader that a test cannot run."""


def commands_of(guide: str) -> list[list[str]]:
    """The lines of the indented blocks of a guide, without comments."""
    text = re.sub(r"```.*?```", "", (DOCS / guide).read_text(), flags=re.S)
    lines = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    words = [shlex.split(line, comments=True) for line in lines]
    return [line for line in words if line and line[0] in ("swell", "sqlite3", "openssl", *ELSEWHERE)]


def python_blocks(guide: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / guide).read_text(), flags=re.S)


class Reader:
    """Somebody who follows a guide in a directory of their own."""

    def __init__(self, path: Path, commands: Commands) -> None:
        self.path = path
        self._commands = commands
        left_out = ("SWELL_URL", "SWELL_TOKEN", "SWELL_CA", "SWELL_HOME")
        kept = {name: value for name, value in os.environ.items() if name not in left_out}
        self.environment = kept | {"HOME": str(path), "COLUMNS": "160"}

    def run(self, words: list[str]) -> subprocess.CompletedProcess[str]:
        if ">" in words:
            done = self.run(words[: words.index(">")])
            (self.path / words[-1]).write_text(done.stdout)
            return done
        if words[0] == "swell":
            return self._commands.run(words[1:], self.path, self.environment, timeout_s=150)
        return subprocess.run(
            words,
            cwd=self.path,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )

    def follow(self, guide: str, *only: str) -> None:
        """Run a guide's commands in order: all of them, or only some of swell's."""
        for words in commands_of(guide):
            if (only and words[1] not in only) or "ray" in words:
                continue
            if words[0] in ELSEWHERE or (words[0] == "sqlite3" and shutil.which("sqlite3") is None):
                continue
            if words[:2] == ["swell", "up"]:
                self.run(["swell", "down"])
            words = [word.replace("~", str(self.path)) for word in words]
            done = self.run(words)
            assert done.returncode == 0, f"{shlex.join(words)}: {done.stderr}"


@pytest.fixture
def reader(tmp_path: Path, commands: Commands) -> Iterator[Reader]:
    reader = Reader(tmp_path, commands)
    yield reader
    reader.run(["swell", "down"])


def test_the_quickstart_works_as_it_is_written(reader: Reader) -> None:
    train, client = python_blocks("quickstart.md")
    (reader.path / "train.py").write_text(train)
    reader.follow("quickstart.md")
    (reader.path / "client.py").write_text(client)
    done = reader.run([sys.executable, "client.py"])
    assert done.returncode == 0, done.stderr
    assert "finished" in done.stdout
    alone = reader.run([sys.executable, "train.py"])
    assert alone.returncode == 0, alone.stderr
    assert "epoch 4 done on 1 workers" in alone.stdout


def test_the_operations_guide_works_as_it_is_written(reader: Reader) -> None:
    train, _ = python_blocks("quickstart.md")
    (reader.path / "train.py").write_text(train)
    assert reader.run(["swell", "up", "-d", "--slots", "2"]).returncode == 0
    assert reader.run(["swell", "submit", "train.py"]).returncode == 0
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed here")
    reader.follow("operations.md")


def test_the_other_pages_work_as_they_are_written(reader: Reader) -> None:
    """README and the pages on dashboard, API, services, teams, security and simulator, on one platform."""
    train, _ = python_blocks("quickstart.md")
    (reader.path / "examples").mkdir()
    for name in ("train.py", "examples/digits_cnn.py"):
        (reader.path / name).write_text(train)
    reader.follow(README, "up", "submit", "queue")
    (reader.path / "client.py").write_text(python_blocks(API)[0])
    done = reader.run([sys.executable, "client.py"])
    assert done.returncode == 0 and "finished" in done.stdout, done.stderr
    reader.follow("simulator.md")  # writes the jobs.csv that dashboard.md begins with
    reader.follow("dashboard.md")
    assert "digits_cnn" in (reader.path / "week.html").read_text()
    assert (reader.path / "report.html").stat().st_size > 10_000
    by_hand = re.search(r"^```sh\n(TOKEN=.*?)^```", (DOCS / API).read_text(), flags=re.S | re.M)
    assert by_hand is not None
    if shutil.which("curl") and shutil.which("uuidgen"):
        address = json.loads(reader.run(["swell", "dashboard", "--json"]).stdout)["url"].rstrip("/")
        lines = by_hand[1].replace("http://127.0.0.1:7373", address).replace("curl -N", "timeout 2 curl -N")
        (reader.path / "by-hand.sh").write_text(lines)
        said = reader.run(["bash", "by-hand.sh"]).stdout
        assert '"phase"' in said and "event: submitted" in said
    reader.follow("services.md")
    reader.follow("teams.md")
    reader.follow(README, "down")
    reader.follow("security.md")
    reader.follow(README, "generate", "simulate", "policies")


def test_every_command_of_the_guides_is_seen_by_these_tests() -> None:
    for guide in ("quickstart.md", "operations.md"):
        text = re.sub(r"```.*?```", "", (DOCS / guide).read_text(), flags=re.S)
        shown = [line for line in text.splitlines() if re.match(r"    (swell|sqlite3|openssl) ", line)]
        assert len([words for words in commands_of(guide) if words[0] not in ELSEWHERE]) == len(shown) > 8
