"""Numbers in sentences for people."""

from __future__ import annotations


def many(count: int, what: str) -> str:
    """A number of things in words: '1 slot', '2 slots'."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
