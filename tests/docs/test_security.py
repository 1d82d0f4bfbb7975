"""The table of attacks in docs/security.md names tests that exist, for every item of the list."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_attack_has_a_test() -> None:
    text = (ROOT / "docs" / "security.md").read_text()
    rows = [line.strip("| \n").split(" | ") for line in text.splitlines() if re.match(r"\| \d+ \|", line)]
    assert {int(row[0]) for row in rows} == set(range(1, 19))
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for row in rows:
        assert len(row) == 4, row
        names = re.findall(r"`(test_\w+)`", row[3])
        assert names, row
        assert [name for name in names if f"def {name}(" not in tests] == [], row
