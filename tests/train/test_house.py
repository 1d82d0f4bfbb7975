"""How large the rooms of `swell.train` may be: 400 lines in a file, 20 methods in a class."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

import swell.train

ROOT = Path(swell.train.__file__).parent
MOST_LINES, MOST_METHODS = 400, 20
LARGER_FILES: dict[str, int] = {}
"""Files that are still larger, with the size that they may not exceed: cut them, and take them out here."""
LARGER_CLASSES = {"Adaptation": 23, "ElasticLoader": 24, "ScriptJob": 22}
"""Likewise."""
FILES = sorted(str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py"))


@functools.cache
def methods(name: str) -> dict[str, int]:
    """By class in a file: its number of methods."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = [c for c in ast.walk(ast.parse((ROOT / name).read_text())) if isinstance(c, ast.ClassDef)]
    return {c.name: sum(isinstance(part, kinds) for part in c.body) for c in found}


def lines(name: str) -> int:
    return len((ROOT / name).read_text().splitlines())


def test_no_file_and_no_class_is_too_large() -> None:
    assert len(FILES) > 50
    long = {name: lines(name) for name in FILES if lines(name) > LARGER_FILES.get(name, MOST_LINES)}
    many = {
        f"{name}: {kind}": count
        for name in FILES
        for kind, count in methods(name).items()
        if count > LARGER_CLASSES.get(kind, MOST_METHODS)
    }
    assert not long and not many


@pytest.mark.parametrize("name", LARGER_FILES)
def test_exceptions_are_still_needed(name: str) -> None:
    assert lines(name) > MOST_LINES, f"{name} is small enough: take it out of LARGER_FILES"


def test_exceptions_of_classes_are_still_needed() -> None:
    found = {kind: count for name in FILES for kind, count in methods(name).items()}
    assert not [kind for kind in LARGER_CLASSES if found.get(kind, 0) <= MOST_METHODS]
