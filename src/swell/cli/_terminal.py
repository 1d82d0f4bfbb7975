"""Texts of jobs on a person's terminal: shown, never obeyed.

A job's reason, its arguments and its output are its owner's to choose, and a terminal obeys escape sequences:
it can be told to change its title, to move the cursor over what was printed, to answer as if a person had
typed.
"""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

_UNSEEN = "\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069"  # C1 controls, and marks that turn text around
_CONTROLS = re.compile(rf"[\x00-\x08\x0b-\x1f{_UNSEEN}]")
_NO_COLOURS = re.compile(rf"\x1b(?!\[[0-9;]{{0,30}}m)|[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f{_UNSEEN}]")


def clean(text: str) -> str:
    """The text with control characters written out; line ends and tabs stay."""
    return _CONTROLS.sub(_written_out, text)


def output(text: str) -> str:
    """A job's output: a terminal obeys only its colours and carriage returns; a file gets it unchanged."""
    return _NO_COLOURS.sub(_written_out, text) if sys.stdout.isatty() else text


def add_row(table: Table, *cells: Any) -> None:
    """Add a row to a table; texts are shown as they are, and are no markup."""
    from rich.text import Text

    table.add_row(*(Text(clean(cell)) if isinstance(cell, str) else cell for cell in cells))


def _written_out(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
