"""Guides are read by people in a hurry: short sentences, short paragraphs, and no laboratory in between."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

GUIDES = sorted((Path(__file__).parents[2] / "docs" / "guides").glob("*.md"))
WORDS = 30
LINES, LINE = 5, 110


def paragraphs(text: str) -> Iterator[str]:
    """The paragraphs and list items of a page as a reader sees them, without code, tables and headings."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"!\[[^]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)
    block: list[str] = []
    for line in [*text.splitlines(), ""]:
        begins = re.match(r"\s*(- |\d+\. )", line)
        ends = not line.strip() or line.startswith(("#", "|")) or (line.startswith("    ") and not block)
        if block and (ends or begins):
            yield " ".join(block)
            block = []
        if not ends:
            block.append(re.sub(r"^\s*(- |\d+\. )", "", line).strip())


def sentences(paragraph: str) -> list[str]:
    """A paragraph's sentences; code within it counts as one word."""
    plain = re.sub(r"`[^`]*`", "code", paragraph)
    return re.split(r"(?<=[.?!])[)*]* ", plain)


def too_long(text: str) -> list[str]:
    """The sentences and paragraphs of a page that are over the limits."""
    found = []
    for paragraph in paragraphs(text):
        if len(paragraph) > LINES * LINE:
            found.append(f"a paragraph of {len(paragraph)} characters: {paragraph[:80]}...")
        for sentence in sentences(paragraph):
            words = [word for word in sentence.split() if re.search(r"\w", word)]
            if len(words) > WORDS:
                found.append(f"a sentence of {len(words)} words: {sentence}")
    return found


@pytest.mark.parametrize("guide", GUIDES, ids=[guide.name for guide in GUIDES])
def test_sentences_and_paragraphs_are_short(guide: Path) -> None:
    assert too_long(guide.read_text()) == []


@pytest.mark.parametrize("guide", GUIDES, ids=[guide.name for guide in GUIDES])
def test_no_guide_reports_a_benchmark(guide: Path) -> None:
    """What was measured is a note in docs/lab; a guide can be followed without it."""
    assert re.findall(r"benchmarks?\.\w+|make bench\S*|## Measured|## Figures", guide.read_text()) == []


OTHER_WORDS = {
    r"\bhand(s|ed)? (it |a job )?in\b": "submit",
    r"\bwhoever\b": "name the person or the process",
    r"`swell scale": "`swell resize`",
    r"\bpip install '?swell": "pip install '.[...]', from a clone",
    r"\bprofiled\b": "measured",
}
"""One word for one thing, in every guide."""


@pytest.mark.parametrize("guide", GUIDES, ids=[guide.name for guide in GUIDES])
def test_one_word_is_used_for_one_thing(guide: Path) -> None:
    text = guide.read_text()
    assert [better for other, better in OTHER_WORDS.items() if re.search(other, text)] == []


def test_long_ones_would_be_found() -> None:
    assert too_long("word " * 31 + "end.")
    assert too_long("- " + "word " * 31 + "end.")
    assert not too_long("word " * 29 + "end. " + "word " * 29 + "end.")
    assert too_long("One short sentence. " * 28)
    assert not too_long("    code " + "word " * 40 + "\n\n| " + "word " * 40 + "|")
    assert too_long("See [a page](somewhere.md) " + "word " * 28 + "end.")


def test_there_are_guides() -> None:
    assert len(GUIDES) > 15
