"""The errors that swell raises on purpose. Their messages tell a person what to do next.

SwellError              everything swell raises on purpose
+-- InputError          something given from outside is not acceptable (exit code 2 on the command line)
"""

from __future__ import annotations


class SwellError(Exception):
    """Base of every error that swell raises on purpose."""


class InputError(SwellError):
    """An input is refused; the message names the field, what was given and what is allowed."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


def nearest(name: str, allowed: list[str]) -> str:
    """The text ' Did you mean ...?' for a mistyped name; empty if no allowed name is similar."""
    from difflib import get_close_matches

    near = get_close_matches(name, allowed, n=1, cutoff=0.5)
    return f" Did you mean '{near[0]}'?" if near else ""
