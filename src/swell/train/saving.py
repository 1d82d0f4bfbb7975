"""A worker's place in its generation, and the checkpoints that the one in the first place writes."""

from __future__ import annotations

from typing import Any

from swell.train.replicas.group import Replica
from swell.train.state.keeper import Keeper
from swell.train.sync.crew import Crew
from swell.train.sync.link import Link
from swell.train.sync.mesh import Header


class Saving:
    """A worker that may have to save the job's state; `Job` sets the fields."""

    steps: int
    _link: Link | None
    _crew: Crew
    _replica: Replica
    _keeper: Keeper
    _rehearsing: bool
    """True while this worker prepares and is not yet part of the job."""

    def capture(self) -> dict[str, Any]:
        """Everything that makes up the training state; tensors that are sharded as this worker has them."""
        raise NotImplementedError

    def capture_whole(self) -> dict[str, Any]:
        """The same with whole tensors; all workers of a replica must call this, and the first one keeps."""
        raise NotImplementedError

    @property
    def rank(self) -> int:
        """This worker's place in the present generation (changes when membership does)."""
        return self._crew.mesh.rank

    @property
    def world(self) -> int:
        """Workers in the present generation."""
        return self._crew.mesh.size

    @property
    def generation(self) -> int:
        """The number of the present generation; grows with every change of membership."""
        return self._crew.mesh.number

    @property
    def is_leader(self) -> bool:
        """True on exactly one worker: the one that prints and saves."""
        return self._crew.mesh.rank == 0 and not self._rehearsing

    @property
    def rehearsing(self) -> bool:
        """Whether this worker prepares and is not yet part of the job."""
        return self._rehearsing

    def save(self, *, wait: bool = False) -> None:
        """Write a checkpoint now: call this on every worker. The leader, helped by its replica, writes it."""
        if self.rank < self._replica.size and not self._rehearsing:
            state = self.capture_whole()
            if self.is_leader:
                self._keeper.save(self.steps, state, wait=wait)
                self._tell_saved()

    def _save_if_due(self, headers: list[Header]) -> None:
        """Between two steps: save a checkpoint if it is time, and report one that was completed.

        In a job with replicas the leader said in the step's header that it is, because others help it.
        """
        alone = self._replica.size == 1
        if (self.rank == 0 and self._keeper.due(self.steps)) if alone else headers[0].get("save"):
            self.save()
        self._tell_saved()

    def _tell_saved(self) -> None:
        step = self._keeper.newly_saved()
        if step is not None and self._link is not None:
            self._link.event("checkpoint", step=step)
