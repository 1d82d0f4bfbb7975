"""docs/reference/papers.md names code: each module and name on the page exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "papers.md").read_text()
NAMES = sorted(set(re.findall(r"`(swell[\w.]*:[\w.]+)`", PAGE)))
SYSTEMS = ["ElasticFlow", "Pollux", "AFS", "CoDDL", "EDL", "ElasticDL", "EasyScale", "Gandiva", "Optimus"]
SYSTEMS += ["Tiresias", "Themis", "OASiS"]


@cache
def defined(module: str) -> frozenset[str]:
    """The qualified names that a module defines, read from its source: importing some would need torch."""
    path = ROOT / "src" / Path(*module.split("."))
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not source.is_file():
        return frozenset()

    def names(body: list[ast.stmt], prefix: str) -> list[str]:
        found = []
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.append(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                found += names(node.body, f"{prefix}{node.name}.")
            if isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found += [prefix + target.id for target in targets if isinstance(target, ast.Name)]
        return found

    return frozenset(names(ast.parse(source.read_text()).body, ""))


@pytest.mark.parametrize("name", NAMES)
def test_what_the_page_names_exists(name: str) -> None:
    module, _, attribute = name.partition(":")
    assert defined(module), f"there is no module {module}"
    assert attribute in defined(module), f"{module} does not define {attribute}"


def test_a_name_that_does_not_exist_is_found_out() -> None:
    assert "Pollux.allocate" in defined("swell.policies.pollux")
    assert "Pollux.gone" not in defined("swell.policies.pollux")
    assert not defined("swell.policies.gone")


def test_every_system_has_its_table() -> None:
    headings = " ".join(re.findall(r"^## (.+)$", PAGE, re.MULTILINE))
    assert [name for name in SYSTEMS if not re.search(rf"\b{name}\b", headings)] == []


def test_every_idea_says_where_it_is_or_why_it_is_not() -> None:
    rows = [line.split("|")[1:-1] for line in PAGE.splitlines() if line.startswith("|")]
    ideas = [row for row in rows if row[0].strip() not in ("idea", "---")]
    assert len(ideas) > 60
    for idea, _, where in ideas:
        assert re.search(r"`swell[\w.]*:[\w.]+`|not yet: \w+", where), idea
