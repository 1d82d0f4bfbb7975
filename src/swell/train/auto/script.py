"""What `--auto` finds out about a script from outside: its model, and how its batches are cut."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from swell.train.data import plan
from swell.train.data.plan import Range


class Parts(nn.Module):
    """Several modules and loose parameters that one optimizer trains, as one model."""

    def __init__(self, modules: list[nn.Module], loose: list[nn.Parameter]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)
        self.loose = nn.ParameterList(loose)


def find_model(optimizers: Sequence[torch.optim.Optimizer]) -> nn.Module:
    """The module whose parameters the optimizers train; several modules are combined into one."""
    trained = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    place = {id(p): index for index, p in reversed(list(enumerate(trained)))}
    objects = gc.get_objects()  # hundreds of thousands, of some thousand types
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, nn.Module)}
    modules: list[nn.Module] = [o for o in objects if type(o) in kinds]
    del objects
    inner = {id(child) for module in modules for child in list(module.modules())[1:]}
    owners: list[tuple[int, nn.Module]] = []
    for module in modules:
        if id(module) in inner:
            continue
        own = [place[id(p)] for p in module.parameters() if id(p) in place]
        if own:
            owners.append((min(own), module))
    owners.sort(key=lambda owner: owner[0])  # the same order on every worker
    covered = {id(p) for _, module in owners for p in module.parameters()}
    loose = [p for p in trained if id(p) not in covered]
    if len(owners) == 1 and not loose:
        return owners[0][1]
    return Parts([module for _, module in owners], [_as_parameter(p) for p in loose])


def _as_parameter(tensor: Tensor) -> nn.Parameter:
    if isinstance(tensor, nn.Parameter):
        return tensor
    tensor.__class__ = nn.Parameter  # a bare tensor with requires_grad: as a parameter it can be registered
    return tensor  # type: ignore[return-value]


def part(size: int, rank: int, world: int) -> tuple[Range, bool]:
    """This worker's range of a batch, and whether its gradient counts.

    No worker gets a single sample of a larger batch, because batch norm refuses it. A worker for which
    nothing is left computes another worker's samples without effect, because its script expects a batch.
    """
    busy = max(1, min(world, size // 2))
    return plan.parts(size, busy)[rank % busy], rank < busy
