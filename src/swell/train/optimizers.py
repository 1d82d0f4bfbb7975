"""Several optimizers of one job, as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from swell.train.sync.memory import load_optimizer


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
