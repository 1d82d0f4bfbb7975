"""Checkpoints: the worker in the first place writes them, helped by the others of its replica."""

from __future__ import annotations

from swell.train.progress import Progress
from swell.train.replicas.group import Replica
from swell.train.state.keeper import Keeper
from swell.train.sync.control import Link
from swell.train.sync.generation import Crew
from swell.train.sync.mesh import Header
from swell.train.travelling import TrainingState


class Saver:
    """Saves the state of a job from one of its members."""

    def __init__(
        self,
        keeper: Keeper,
        state: TrainingState,
        progress: Progress,
        crew: Crew,
        replica: Replica,
        link: Link | None,
    ) -> None:
        self._keeper = keeper
        self._state = state
        self._progress = progress
        self._crew = crew
        self._replica = replica
        self._link = link

    def save(self, *, wait: bool = False) -> None:
        """Write a checkpoint now; every member calls this."""
        if self._crew.rank >= self._replica.size:
            return
        state = self._state.gathered(keep=self._crew.rank == 0)
        if self._crew.rank == 0:
            state = {"operation": self._crew.operation} | state
            self._keeper.save(self._progress.steps, state, wait=wait)
            self._tell()

    def due_with(self, header: Header) -> None:
        """As the leader of a job with replicas, say in a step's header that the step is to be saved."""
        if self._replica.size > 1 and self._crew.rank == 0 and self._keeper.due(self._progress.steps + 1):
            header["save"] = True

    def save_if_due(self, headers: list[Header]) -> None:
        """Between two steps: save a checkpoint if it is time, and report one that was completed.

        In a job with replicas the leader said in the step's header that it is, because others help it.
        """
        steps, alone = self._progress.steps, self._replica.size == 1
        if (self._crew.rank == 0 and self._keeper.due(steps)) if alone else headers[0].get("save"):
            self.save()
        self._tell()

    def wait(self) -> None:
        """As the leader, wait until the last checkpoint is on disk."""
        if self._crew.rank == 0:
            self._keeper.wait()

    def _tell(self) -> None:
        step = self._keeper.newly_saved()
        if step is not None and self._link is not None:
            self._link.event("checkpoint", step=step)
