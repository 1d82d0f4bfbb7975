"""The glossary names things that exist: files of the package, and words that its code uses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src" / "swell"
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs" / "glossary.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| word")
]
CODE = "\n".join(path.read_text() for path in sorted(SOURCES.rglob("*.py")))


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_the_names_of_a_word_are_in_the_code(row: list[str]) -> None:
    word, meaning, where = row
    names = re.findall(r"`([^`]+)`", where)
    assert word and meaning.endswith(".") and names
    for name in names:
        if name.endswith(".py"):
            assert list(SOURCES.rglob(name)), name
        else:
            for part in name.split("."):
                assert re.search(rf"\b{re.escape(part)}\b", CODE), name


def test_no_word_is_explained_twice() -> None:
    words = [row[0] for row in ROWS]
    assert sorted(set(words)) == sorted(words)


def test_no_two_classes_have_one_name() -> None:
    """A name that stands for two things sends its reader to the wrong file."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "src").rglob("*.py")):
        for name in re.findall(r"^class (\w+)", path.read_text(), re.M):
            found.setdefault(name, []).append(str(path.relative_to(ROOT)))
    assert {name: files for name, files in found.items() if len(files) > 1} == {}
