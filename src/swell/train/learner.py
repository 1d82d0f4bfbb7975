"""What a worker trains: the model, its gradients as flat vectors, its optimizer, and the batch mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from swell.train.data.samples import key, seed_all
from swell.train.modes.ranks import LogicalRanks, PartialSums
from swell.train.options import Options
from swell.train.replicas.form import form_of
from swell.train.replicas.group import Replica
from swell.train.updating import Updater

if TYPE_CHECKING:
    from swell.train.modes.adaptation import Adaptation


class Learner:
    """The model and the optimizer of one worker, with all that the mode adds to them."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, options: Options, replica: Replica
    ) -> None:
        self.model = model
        self.updater = Updater(
            optimizer, options.scheduler, options.scaler, options.clip_norm, options.step_scheduler
        )
        self.mode = options.mode
        self.seed = options.seed
        self.logical = options.logical_ranks
        self.replica = replica
        self.form = form_of(model, optimizer, replica, options.mode, options.scaler)
        """How this worker holds the model: the whole of it, or its part."""
        consistent = options.mode == "consistent"
        self.ranks = LogicalRanks(model, self.logical, self.seed) if consistent else None
        self.flat = self.form.flat(model, self.ranks.named() if self.ranks else None)
        inputs = self.flat.grad_in if self.ranks else []
        self.sums = PartialSums(list(self.flat.parameters.values()), inputs)
        self.adaptive: Adaptation | None = None
        """Set when the training loader of an *adaptive* job is made."""
        self.rehearsed = False
        """True once a rehearsal has changed the weights, so that they are no beginning for a job."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, or all of several as one."""
        return self.updater.optimizer

    def update(self) -> None:
        """Change the parameters by the gradients that they have, with the mode's learning rate."""
        rate = None if self.adaptive is None else self.adaptive.scaled_learning_rate()
        self.updater.update(self.flat.parameters.values(), rate)

    def adopt(self, headers: Sequence[Mapping[str, Any]]) -> None:
        """Take over the summed gradients; a parameter that no member had a gradient of keeps none."""
        silent = [set(header.get("unused", ())) for header in headers if header["n"]]
        self.flat.adopt(set.intersection(*silent) if silent and self.ranks is None else set())

    def begin_random(self, steps: int, worker: str | None, generation: int) -> None:
        """Set the random numbers of a worker that begins to train in a generation."""
        if self.ranks is not None:
            self.ranks.between(steps)
        elif worker is not None:
            seed_all(key(self.seed, worker, generation))
