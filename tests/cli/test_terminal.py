"""Texts of jobs on a terminal: shown, never obeyed."""

from __future__ import annotations

import sys

import pytest
from rich.console import Console

from swell.cli._common import new_table, one_line
from swell.cli._events import line
from swell.cli._terminal import add_row, clean, output


def test_markup_in_a_reason_is_text() -> None:
    table = new_table(["job", "why"])
    add_row(table, "a-1", one_line("ValueError: [/b] [red]x[/red] \x1b[2J"))
    console = Console(width=100)
    with console.capture() as shown:
        console.print(table)
    assert r"[/b] [red]x[/red] \x1b[2J" in shown.get()


def test_escapes_and_marks_that_turn_text_around_are_written_out() -> None:
    assert clean("a\x1b]0;title\x07b\x9b\u202ec\n\td") == "a\\x1b]0;title\\x07b\\x9b\\u202ec\n\td"
    assert "\x1b" not in line(0.0, "failed", "a-1", {"reason": "\x1b[31mred"})


def test_output_keeps_its_colours_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert output("\x1b[1;31mred\x1b[0m\r50%") == "\x1b[1;31mred\x1b[0m\r50%"
    assert output("\x1b]0;title\x07\x1b[2J\x1b[6n") == "\\x1b]0;title\\x07\\x1b[2J\\x1b[6n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False, raising=False)
    assert output("\x1b[2J") == "\x1b[2J", "a file gets what the job printed"
