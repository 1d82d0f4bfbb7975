"""The trained parts of a worker: model, gradients as flat vectors, optimizer, and batch mode."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from swell.train.agent.errors import UsageError
from swell.train.data.samples import key, seed_all
from swell.train.modes.ranks import LogicalRanks, PartialSums
from swell.train.options import Options
from swell.train.replicas.group import Replica
from swell.train.replicas.sharded import form_of
from swell.train.sync.memory import load_optimizer

if TYPE_CHECKING:
    from swell.train.modes.adaptive import Adaptation


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


# ---------------------------------------------------------------------- losses and updates
# What a step does with losses and the optimizer: backward, update, learning-rate schedule.
#
# Nothing here knows of other workers: gradients come in as they were summed, and every worker makes the
# same update.


Loss = Tensor | Sequence[Tensor] | Callable[[], Tensor]
"""A loss, one for each of several optimizers, or a function that computes it."""


class Updater:
    """The optimizer with its scheduler and gradient scaler."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: Any = None,
        scaler: Any = None,
        clip_norm: float | None = None,
        step_scheduler: str = "epoch",
    ) -> None:
        if step_scheduler not in ("epoch", "step", "never"):
            raise UsageError(f"step_scheduler: got {step_scheduler!r}, must be epoch, step or never")
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.scaler = scaler
        self.step_scheduler = step_scheduler
        self._clip_norm = clip_norm
        self._ticks = 0
        """Steps of the scheduler so far."""

    @property
    def scale(self) -> float:
        """By how much the gradients are too large, because the loss was scaled."""
        return float(self.scaler.get_scale()) if self.scaler is not None else 1.0

    def weighted(self, loss: Loss, weight: float) -> list[Tensor]:
        """`weight` times the loss, or times each of several losses, which belong to one optimizer each."""
        given = loss() if callable(loss) else loss
        if isinstance(given, Tensor):
            return [given * weight]
        count = len(self.optimizer.parts) if isinstance(self.optimizer, Several) else 1
        if len(given) != count:
            raise UsageError(f"job.step: got {len(given)} losses, but the job has {count} optimizers")
        return [one * weight for one in given]

    def descend(self, losses: list[Tensor]) -> None:
        """Compute the gradients of a loss; of several losses each for the parameters of its own optimizer."""
        if len(losses) == 1:
            self._scaled(losses[0]).backward()  # type: ignore[no-untyped-call]
            return
        assert isinstance(self.optimizer, Several)
        for index, (one, part) in enumerate(zip(losses, self.optimizer.parts)):
            own = [p for group in part.param_groups for p in group["params"] if p.requires_grad]
            torch.autograd.backward(self._scaled(one), inputs=own, retain_graph=index < len(losses) - 1)

    def update(
        self, parameters: Iterable[Tensor], rate: contextlib.AbstractContextManager[Any] | None = None
    ) -> None:
        """Change the parameters by their gradients; within `rate`, which may change the learning rate."""
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if self._clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, self._clip_norm)
        with rate or contextlib.nullcontext():
            if self.scaler is not None:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            else:
                self.optimizer.step()

    def tick(self, due: float) -> None:
        """Step the scheduler until it has made `due` steps."""
        while self.scheduler is not None and self._ticks + 1 <= due + 1e-6:
            self.scheduler.step()
            self._ticks += 1

    def state(self) -> dict[str, Any]:
        """The state of scheduler and scaler; the optimizer's own is the caller's business."""
        return {
            "scheduler": self.scheduler.state_dict() if self.scheduler is not None else None,
            "scaler": self.scaler.state_dict() if self.scaler is not None else None,
            "ticks": self._ticks,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Take over what `state` gave."""
        if self.scheduler is not None and state["scheduler"] is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        if self.scaler is not None and state["scaler"] is not None:
            self.scaler.load_state_dict(state["scaler"])
        self._ticks = int(state["ticks"])

    def _scaled(self, loss: Tensor) -> Tensor:
        scaled: Tensor = self.scaler.scale(loss) if self.scaler is not None else loss
        return scaled


# ---------------------------------------------------------------------- several optimizers as one
# Several optimizers of one job, as one.


class Several(torch.optim.Optimizer):
    """Optimizers that belong to one job: a generator's and a critic's, say. Each keeps its own state."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        # Deliberately without Optimizer.__init__: the groups and states are those of the parts.
        self.parts = list(optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of all of them."""
        return [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        """The states of all of them, by parameter."""
        return {p: s for part in self.parts for p, s in part.state.items()}

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step all of them that have gradients."""
        loss = None if closure is None else closure()
        for part in self.parts:
            if any(p.grad is not None for group in part.param_groups for p in group["params"]):
                part.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all of them."""
        for part in self.parts:
            part.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The states of all of them."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave."""
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            load_optimizer(part, state)

    def __repr__(self) -> str:
        return f"Several({self.parts!r})"
