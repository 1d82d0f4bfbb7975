"""The tables of attacks and findings in docs/reference/attacks.md name tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "attacks.md").read_text()
LATER = "## Found later, and their answer"


def _rows(text: str) -> list[list[str]]:
    return [line.strip("| \n").split(" | ") for line in text.splitlines() if re.match(r"\| \d+ \|", line)]


def _check(rows: list[list[str]]) -> None:
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for row in rows:
        assert len(row) == 4, row
        names = re.findall(r"`(test_\w+)`", row[3])
        assert names, row
        assert [name for name in names if f"def {name}(" not in tests] == [], row


def test_every_attack_has_a_test() -> None:
    rows = _rows(PAGE.split(LATER)[0])
    assert {int(row[0]) for row in rows} == set(range(1, 19))
    _check(rows)


def test_every_later_finding_has_a_test() -> None:
    rows = _rows(PAGE.split(LATER)[1])
    assert {int(row[0]) for row in rows} == set(range(1, 37))
    _check(rows)
