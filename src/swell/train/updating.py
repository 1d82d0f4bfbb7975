"""What a step does with losses and the optimizer: backward, update, learning-rate schedule.

Nothing here knows of other workers: gradients come in as they were summed, and every worker makes the same
update.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from swell.train.agent.errors import UsageError
from swell.train.optimizers import Several

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
