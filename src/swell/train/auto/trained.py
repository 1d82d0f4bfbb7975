"""What a script trains: its optimizers, and the model that they train."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from swell.train.auto import layout
from swell.train.auto.job import ScriptJob
from swell.train.optimizers import Several
from swell.train.sync.link import Link


class Trained:
    """The optimizers of a script."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._made: list[weakref.ref[torch.optim.Optimizer]] = []
        """All optimizers that the script has made."""
        self.optimizers: list[torch.optim.Optimizer] = []
        """The optimizers that have stepped, or were there when the first one did."""

    def made(self, optimizer: torch.optim.Optimizer) -> None:
        """The script has made an optimizer."""
        self._made.append(weakref.ref(optimizer))

    def by_hand(self) -> bool:
        """Whether the script has no optimizer: it changes its parameters by itself."""
        return not any(ref() is not None for ref in self._made)

    def begin(self, first: torch.optim.Optimizer) -> None:
        """`first` makes the script's first step."""
        alive = [made for ref in self._made if (made := ref()) is not None and _trains_any(made)]
        self.optimizers = alive if any(o is first for o in alive) else [first, *alive]

    def model(self) -> nn.Module:
        """The model that the optimizers train."""
        return find_model(self.optimizers)

    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, or all of several as one."""
        return self.optimizers[0] if len(self.optimizers) == 1 else Several(self.optimizers)

    def lay_out(self, job: ScriptJob) -> None:
        """Exchange the gradients of what the script trains now."""
        layout.lay_out(job, self.model(), self.optimizer(), self._link)


def _trains_any(optimizer: torch.optim.Optimizer) -> bool:
    return any(p.requires_grad for group in optimizer.param_groups for p in group["params"])


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
