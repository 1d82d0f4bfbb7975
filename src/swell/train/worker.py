"""One worker of a job: its parts, and what can be asked of its place in the job."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from swell.train.heartbeat import Reporter
from swell.train.learner import Learner
from swell.train.member import Member
from swell.train.options import DEFAULT_CHECKPOINT_S, CheckpointOptions
from swell.train.progress import Progress
from swell.train.saving import Saver
from swell.train.shares import Shares
from swell.train.state.keeper import Keeper
from swell.train.sync.control import Link
from swell.train.sync.generation import Crew
from swell.train.sync.mesh import Header
from swell.train.travelling import TrainingState


class Worker:
    """The parts of a worker, put together."""

    def __init__(
        self, learner: Learner, progress: Progress, state: TrainingState, keeper: Keeper, link: Link | None
    ) -> None:
        self._learner = learner
        self._progress = progress
        self._state = state
        self._link = link
        facts: Header = {"model": learner.flat.digest, "mode": learner.mode, "logical_ranks": learner.logical}
        self._crew = Crew(link, learner.flat, state, facts)
        logical = learner.logical if learner.ranks is not None else None
        self._shares = Shares(logical, learner.sums, learner.replica.size)
        self._saver = Saver(keeper, state, progress, self._crew, learner.replica, link)
        self._member = Member(link, self._crew, learner, progress, state, self._shares, self._saver)
        self._reporter = Reporter(learner, progress, self._crew, link)

    @property
    def model(self) -> nn.Module:
        """The model that is trained."""
        return self._learner.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, or all of several as one."""
        return self._learner.optimizer

    @property
    def scheduler(self) -> Any:
        """The learning-rate scheduler, if the script gave one."""
        return self._learner.updater.scheduler

    @property
    def mode(self) -> str:
        """The batch mode: 'fixed', 'adaptive' or 'consistent'."""
        return self._learner.mode

    @property
    def epoch(self) -> int:
        """The epoch that the job is in."""
        return self._progress.epoch

    @property
    def steps(self) -> int:
        """Committed optimizer steps."""
        return self._progress.steps

    @property
    def loss(self) -> float | None:
        """The loss of the whole job, averaged over some fifty steps: the same on every worker."""
        return self._progress.loss.value

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
    def rehearsing(self) -> bool:
        """Whether this worker prepares and is not yet part of the job."""
        return self._member.rehearsing

    @property
    def is_leader(self) -> bool:
        """True on exactly one worker: the one that prints and saves."""
        return self._crew.mesh.rank == 0 and not self._member.rehearsing

    def save(self, *, wait: bool = False) -> None:
        """Write a checkpoint now: call this on every worker. The leader, helped by its replica, writes it."""
        if not self._member.rehearsing:
            self._saver.save(wait=wait)

    def capture(self) -> dict[str, Any]:
        """Everything that makes up the training state; tensors are live ones, not copies."""
        return self._state.capture()

    def restore(self, state: dict[str, Any]) -> None:
        """Take over a captured state."""
        self._state.restore(state)


def keeper_of(options: CheckpointOptions, link: Link | None) -> Keeper:
    """Where and when a worker saves: as the script says, else as the job's settings do."""
    directory, every_s = options.checkpoint_dir, options.checkpoint_every_s
    if link is not None:
        directory = directory or link.config.get("checkpoints") or link.directory.path / "checkpoints"
        if every_s == DEFAULT_CHECKPOINT_S:  # the script left it to the job's settings
            every_s = link.config.get("checkpoint_s", every_s)
    return Keeper(directory, every_s, options.checkpoint_every_steps, options.keep_checkpoints)
