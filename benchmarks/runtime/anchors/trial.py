"""A run of another system: its processes, its rows, and the waiting for what they show."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from benchmarks.children import end
from benchmarks.runtime.anchors.rows import Change, Failed, Row, change, read

ROOT = Path(__file__).parents[3]
WAIT_S = 30.0
"""How long another system may take to start, or to go on after a change."""
SETTLED = 30
"""A change is asked for once this many steps were made."""

Found = TypeVar("Found")


class Trial:
    """Processes of another system in a folder of their own. Leaving the context ends them all."""

    def __init__(self, packages: Path | None = None, wait_s: float = WAIT_S) -> None:
        """`packages`: a folder of further packages that the processes may import."""
        self._wait_s = wait_s
        self._temporary = tempfile.TemporaryDirectory(prefix="swell-anchor-", ignore_cleanup_errors=True)
        self.folder = Path(self._temporary.name)
        paths = [str(ROOT), *([str(packages)] if packages else [])]
        self.env = {**os.environ, "ANCHOR_FOLDER": str(self.folder), "PYTHONPATH": os.pathsep.join(paths)}
        self.processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Trial:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes:
            end(process)
        self._temporary.cleanup()

    def start(self, *arguments: str, **env: str) -> subprocess.Popen[bytes]:
        """Start `python ARGUMENTS`; its messages go to the log of this part, which says why one failed."""
        command = [sys.executable, *arguments]
        process = subprocess.Popen(
            command, env={**self.env, **env}, cwd=ROOT, stdout=sys.stderr, start_new_session=True
        )
        self.processes.append(process)
        return process

    def rows(self, name: str) -> list[Row]:
        """The steps of the worker (or of the rank) with this name."""
        return read(self.folder / f"{name}.rows")

    def wait(self, look: Callable[[], Found | None], what: str) -> Found:
        """What `look` finds; `Failed` if that takes too long or a process has ended first."""
        began = time.monotonic()
        while time.monotonic() < began + self._wait_s:
            if (found := look()) is not None:
                return found
            for process in self.processes:
                if process.poll() not in (None, -9):  # -9: killed by us
                    after_s = time.monotonic() - began
                    raise Failed(
                        f"no {what}: a process ended with code {process.poll()} after {after_s:.0f} s"
                    )
            time.sleep(0.02)
        raise Failed(f"no {what} within {self._wait_s:.0f} s")

    def settled(self, name: str, world: int) -> Row:
        """The newest step of `name`, once it has made enough of them in a row with `world` workers."""

        def look() -> Row | None:
            rows = self.rows(name)[-SETTLED:]
            same = {(row.pid, row.world) for row in rows}
            return rows[-1] if len(rows) == SETTLED and len(same) == 1 and rows[-1].world == world else None

        return self.wait(look, f"{SETTLED} steps of {world} workers")

    def change(self, name: str, asked_s: float, world: int, *, restart: bool) -> Change:
        """What a change cost that was asked for at `asked_s`, as the worker `name` saw it."""
        return self.wait(
            lambda: change(self.rows(name), asked_s, world, restart=restart),
            f"step of {world} workers after it",
        )


def attempt(measure: Callable[[], Change]) -> Change | Failed:
    """A failure of the other system is a finding, not an error of the benchmark."""
    try:
        return measure()
    except Failed as failed:
        return failed
