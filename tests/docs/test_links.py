"""Every link and picture in the documentation leads to a file, and every page is linked to."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")


def links(page: Path) -> list[str]:
    """Targets of the page's links that are not addresses; code is left out."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    return [
        target for target in LINK.findall(text) if "://" not in target and not target.startswith("mailto:")
    ]


def anchors(page: Path) -> set[str]:
    """The names of a page's headings, as they are linked to."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_lead_somewhere(page: Path) -> None:
    for target in links(page):
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), target
        if anchor and found.suffix == ".md":
            assert anchor in anchors(found), target


def test_no_page_is_out_of_reach() -> None:
    named = {(page.parent / target.partition("#")[0]).resolve() for page in PAGES for target in links(page)}
    pages = {page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "decisions"}
    assert {page for page in pages if page.resolve() not in named} == set()


SOURCES = [
    path
    for folder in ("src", "tests", "benchmarks", "scripts", "deploy", "examples")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".toml", ".yaml", ".yml", ".sh", ".ts", ".sbatch")
]
OTHERS = ("RAY_", "MLFLOW_", "WANDB_", "TOKENIZERS_")
"""Beginnings of variables that only other programs read."""


def test_names_in_capitals_are_names_that_something_reads() -> None:
    """They show where a search-and-replace went too far."""
    known = {word for path in SOURCES for word in re.findall(r"\w*_\w+", path.read_text(errors="replace"))}
    named = {
        (page.name, word)
        for page in PAGES
        for word in re.findall(r"\b\w*[A-Z]{2,}_[A-Z]\w*\b", page.read_text())
        if not word.startswith(OTHERS)
    }
    assert len(named) > 20 and {one for one in named if one[1] not in known} == set()
