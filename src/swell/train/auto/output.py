"""Output of an unmodified script: only the leader's is shown, and people are told what its numbers cover."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TextIO

from swell.train.agent.saying import first_to_say

PARTS = (
    "--auto: several workers share each training batch from now on, so numbers that the script computes of a "
    "batch (loss.item(), correct += ...) cover one worker's part of it. Divide them by the samples that were "
    "counted (seen += len(batch)) and not by len(loader.dataset), or take them from an evaluation pass; the "
    "loss that swell shows is that of the whole batch (docs/frameworks.md, 'What differs from a plain run')"
)


def tell_of_parts(directory: Path) -> None:
    """Say once in a run of the job what the script's own numbers cover, although leaders may change."""
    if first_to_say(directory, PARTS):
        sys.__stderr__.write(f"{PARTS}\n")  # type: ignore[union-attr]


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
