"""Output of an unmodified script: only the leader prints and saves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TextIO


class LeaderOnly:
    """A stream that writes on the leader and drops on other workers; it keeps text until it knows which."""

    def __init__(self, stream: TextIO, leads: Callable[[], bool | None]) -> None:
        self._stream = stream
        self._leads = leads
        self._kept: list[str] = []

    def write(self, text: str) -> int:
        """Write, keep or drop."""
        leads = self._leads()
        if leads is None:
            self._kept.append(text)
        elif leads:
            self.release()
            self._stream.write(text)
        else:
            self._kept = []
        return len(text)

    def release(self) -> None:
        """Write the text that was kept."""
        kept, self._kept = self._kept, []
        for text in kept:
            self._stream.write(text)

    def writelines(self, lines: list[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush the stream."""
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
