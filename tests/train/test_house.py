"""How large the rooms of `swell.train` may be: 400 lines in a file, 20 methods in a class."""

from __future__ import annotations

import ast
from pathlib import Path

import swell.train

ROOT = Path(swell.train.__file__).parent
MOST_LINES, MOST_METHODS = 400, 20
FILES = sorted(str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py"))


def methods(name: str) -> dict[str, int]:
    """By class in a file: its number of methods."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = [c for c in ast.walk(ast.parse((ROOT / name).read_text())) if isinstance(c, ast.ClassDef)]
    return {c.name: sum(isinstance(part, kinds) for part in c.body) for c in found}


def lines(name: str) -> int:
    return len((ROOT / name).read_text().splitlines())


def test_no_file_and_no_class_is_too_large() -> None:
    assert len(FILES) > 50
    long = {name: lines(name) for name in FILES if lines(name) > MOST_LINES}
    many = {
        f"{name}: {kind}": count
        for name in FILES
        for kind, count in methods(name).items()
        if count > MOST_METHODS
    }
    assert not long and not many
