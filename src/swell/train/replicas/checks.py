"""Refuses what cannot work with sharded models and replicas, with the reason."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from swell.train.agent.errors import UsageError
from swell.train.replicas.group import Replica


def check(
    model: nn.Module, optimizer: torch.optim.Optimizer, replica: Replica, mode: str, scaler: Any
) -> None:
    """Refuse a job that cannot train with a sharded model."""
    if mode != "fixed":
        raise UsageError(f"mode: got {mode!r}, but a sharded model needs mode='fixed'")
    if scaler is not None:
        raise UsageError(
            "scaler: a sharded model cannot have one, because its workers would scale differently; train in "
            "bfloat16 (fully_shard's mp_policy), which needs none"
        )
    if hasattr(optimizer, "parts"):
        raise UsageError("optimizer: a sharded model can have one optimizer only")
    _sharding(model, replica)


def _sharding(model: nn.Module, replica: Replica) -> None:
    """Refuse a model that is not wholly sharded over the workers of the replica."""
    hint = "call fully_shard(model, mesh=swell.replica_mesh()) before building the optimizer"
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            raise UsageError(
                f"model: {name} is not sharded, but {replica.size} workers share each replica; {hint}"
            )
        mesh, placements = parameter.device_mesh, parameter.placements
        if mesh.ndim != 1 or mesh.size() != replica.size or not isinstance(placements[0], Shard):
            raise UsageError(
                f"model: {name} is placed as {placements} on a mesh of {mesh.size()}, and must be sharded "
                f"over the {replica.size} workers of the replica; {hint}"
            )
