"""How a worker holds the model: the whole of it, or its part of a sharded one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from swell.train.replicas.group import Replica
from swell.train.sync.memory import FlatModel

if TYPE_CHECKING:
    from swell.train.state.checkpoint import Allocate


class Whole:
    """Every worker has the whole model."""

    sharded = False
    targets: Allocate | None = None
    """Memory for the tensors of a checkpoint; None for the usual."""

    def flat(self, model: nn.Module, rank_buffers: dict[str, Tensor] | None) -> FlatModel:
        """The model's gradients as flat vectors."""
        return FlatModel(model, rank_buffers)

    def local(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state with the parts of its tensors that this worker has."""
        return state

    def gathered(self, state: dict[str, Any], keep: bool) -> dict[str, Any]:
        """A state with whole tensors, where `keep`; all workers of a replica must call this together."""
        return state

    def for_optimizer(self, values: dict[str, Any]) -> dict[str, Any]:
        """The optimizer's part of a local state, as the optimizer takes it."""
        return values


def form_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, replica: Replica, mode: str, scaler: Any
) -> Whole:
    """How this model is held; UsageError if it cannot be trained so."""
    if replica.size == 1 and not any(hasattr(p, "to_local") for p in model.parameters()):
        return Whole()
    from swell.train.replicas import checks, sharded  # only now: torch takes a while to import FSDP

    checks.check(model, optimizer, replica, mode, scaler)
    return sharded.Sharded(model, optimizer, replica)
