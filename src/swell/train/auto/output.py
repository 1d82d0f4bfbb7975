"""Output of an unmodified script: only the leader's is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TextIO


class LeaderOnly:
    """A stream that writes on the leader and drops on other workers."""

    def __init__(self, stream: TextIO, leads: Callable[[], bool]) -> None:
        self._stream = stream
        self._leads = leads

    def write(self, text: str) -> int:
        """Write or drop."""
        return self._stream.write(text) if self._leads() else len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush the stream."""
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
