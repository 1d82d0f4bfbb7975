"""When to save a checkpoint, and which one to begin from. Only the leader uses this."""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING, Any

from swell.train.agent.errors import UsageError

if TYPE_CHECKING:
    from swell.train.state.checkpoint import Allocate, Checkpointer

log = logging.getLogger(__name__)


class Keeper:
    """Checkpoints of one job, written and read only by the leader."""

    def __init__(
        self,
        directory: str | os.PathLike[str] | None,
        every_s: float | None,
        every_steps: int | None,
        keep: int,
    ) -> None:
        for name, value in (("checkpoint_every_s", every_s), ("checkpoint_every_steps", every_steps)):
            if value is not None and value <= 0:
                raise UsageError(f"{name}: got {value}, must be positive, or None for never")
        self._directory = directory
        self._every_s, self._every_steps, self._keep = every_s, every_steps, keep
        self._made: Checkpointer | None = None
        self._last_step, self._last_s = 0, time.monotonic()
        self._writing = False
        self._on_disk: int | None = None
        self._lead_steps, self._lead_s = 0, 0.0
        """How long it took until the last save was on disk; until then the one before it counts."""

    def load(self, where: Allocate | None = None) -> dict[str, Any] | None:
        """The newest undamaged state, or None; `where` gives the memory for its tensors."""
        checkpointer = self._checkpointer()
        loaded = checkpointer.load_newest(where) if checkpointer is not None else None
        if loaded is None:
            return None
        log.warning("resumed from %s", loaded.path)
        self._last_step = loaded.step
        state: dict[str, Any] = loaded.state
        return state

    def due(self, step: int) -> bool:
        """Whether it is time to save: early enough to be on disk when the interval is over."""
        if self._directory is None:
            return False
        now = time.monotonic()
        if self._writing and self._made is not None and not self._made.saving:
            self._writing = False
            self._on_disk = self._last_step
            self._lead_steps, self._lead_s = step - self._last_step, now - self._last_s
        if self._every_steps is not None:
            lead = min(self._lead_steps, self._every_steps // 2)
            return step - self._last_step >= self._every_steps - lead
        if self._every_s is None:
            return False
        return now - self._last_s >= self._every_s - min(self._lead_s, self._every_s / 2)

    def newly_saved(self) -> int | None:
        """The step of a checkpoint that was completed since the last call, or None."""
        step, self._on_disk = self._on_disk, None
        return step

    def save(self, step: int, state: dict[str, Any], *, wait: bool = False) -> None:
        """Save `state` in the background."""
        checkpointer = self._checkpointer()
        if checkpointer is not None and checkpointer.save(step, state, wait=wait):
            self._last_step, self._last_s = step, time.monotonic()
            self._writing = not wait
            if wait:
                self._on_disk = step

    def wait(self) -> None:
        """Wait until the save in progress is on disk."""
        if self._made is not None:
            self._made.wait()

    def _checkpointer(self) -> Checkpointer | None:
        if self._made is None and self._directory is not None:
            from swell.train.state.checkpoint import Checkpointer

            self._made = Checkpointer(self._directory, keep=self._keep)
        return self._made
