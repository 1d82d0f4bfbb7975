"""docs/how/change-something.md leads to files and names that exist, and so do the pages that sources name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how" / "change-something.md").read_text()
FILES = sorted(set(re.findall(r"`((?:src|tests|deploy)/[\w./-]+)`", PAGE)))
SOURCES = sorted((ROOT / "src").rglob("*.py"))


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_the_page_names_exists(name: str) -> None:
    assert (ROOT / name).exists()


def test_the_four_things_are_there_and_each_has_a_test() -> None:
    rows = [line.split("|") for line in PAGE.splitlines() if line.startswith("| [")]
    assert len(rows) == 4
    for _, what, write, test, _ in rows:
        assert "`src/swell/" in write, what
        assert "`tests/" in test, what


@pytest.mark.parametrize(
    ("file", "names"),
    [
        ("src/swell/policies/registry.py", ["BUILT_IN"]),
        ("tests/policies/test_properties.py", ["ELASTIC", "RIGID"]),
        ("src/swell/domain/request.py", ["JobRequest", "JobOptions", "_about", "for_runtime"]),
        ("src/swell/train/agent/protocol.py", ["Waiting", "FromWorker", "ToWorker"]),
        ("src/swell/train/agent/coordinator.py", ["_from_worker", "protocol.Waiting"]),
        ("src/swell/train/sync/control.py", ["Send", "protocol.Waiting"]),
        ("src/swell/control/views.py", ["def stats"]),
        ("src/swell/control/conductor.py", ["def stats"]),
    ],
)
def test_what_the_page_says_is_in_the_files_is_there(file: str, names: list[str]) -> None:
    assert f"`{file}`" in PAGE
    text = (ROOT / file).read_text()
    assert [name for name in names if name not in text] == []


def test_every_page_that_a_source_names_exists() -> None:
    """An error message that sends people to a page must not send them nowhere."""
    named = {(path, page) for path in SOURCES for page in re.findall(r"docs/[\w/-]+\.md", path.read_text())}
    assert len(named) > 20
    assert [(path.name, page) for path, page in sorted(named) if not (ROOT / page).exists()] == []
