"""docs/reference/auto.md: every row says what the gallery shows, and names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

from tests.train.auto.test_gallery import SCRIPTS, TODAY, Kind

ROOT = Path(__file__).parents[2]
KNOWN = {
    name
    for path in (ROOT / "tests").rglob("test_*.py")
    for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
}


def _rows() -> list[list[str]]:
    page = (ROOT / "docs/reference/auto.md").read_text()
    table = page.partition("|---|---|---|---|---|\n")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def test_every_style_works_or_is_on_one_worker_and_is_shown_by_something() -> None:
    assert len(_rows()) >= 25
    for style, cell, why, gallery, tests in _rows():
        assert cell in ("works", "one worker"), style
        assert gallery or tests, style
        assert why or cell == "works", f"{style}: why?"
        named = re.findall(r"`(test_\w+)`", tests)
        assert set(named) <= KNOWN, f"{style} names {set(named) - KNOWN}"


def test_the_gallery_shows_what_the_rows_say() -> None:
    said = {name: cell for _, cell, _, gallery, _ in _rows() for name in re.findall(r"`(\w+)`", gallery)}
    assert sorted(said) == sorted(script.name for script in SCRIPTS), "each script is in one row"
    for name, cell in said.items():
        kind = TODAY.get(name, (None, ""))[0]
        assert (kind is Kind.ONE_WORKER) == (cell == "one worker"), name
        assert kind is not Kind.FAILS, name
