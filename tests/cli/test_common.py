"""Texts of jobs on a terminal: shown, never obeyed."""

from __future__ import annotations

import sys

import pytest
from rich.console import Console

from swell.cli._common import add_row, clean, figure, line, new_table, one_line, output, sparkline


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


def test_a_constant_is_a_level_line_and_figures_are_plain_numbers() -> None:
    assert set(sparkline([0.1 + 0.2, 0.3, 0.3])) == {"▄"}
    assert sparkline([1.0, 2.0]) == "▁█" and sparkline([float("nan")]) == ""
    shown = [figure(value) for value in (3690.0, 12345678.0, 0.00025, 0.00002, 0.5, 128.0, 0.0)]
    assert shown == ["3,690", "1.23e+07", "0.00025", "2e-05", "0.5", "128", "0"]
