"""What a script trains: its optimizers, and the model that they train."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from swell.train.auto.job import ScriptJob
from swell.train.learner import Several
from swell.train.sync.control import Link

if TYPE_CHECKING:
    from swell.train.auto.job import ScriptJob


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
        lay_out(job, self.model(), self.optimizer(), self._link)


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


# ---------------------------------------------------------------------- which parameters are exchanged
# Scripts that freeze and unfreeze layers: what the workers exchange changes with what is trained.


def trains_others(job: ScriptJob, optimizer: torch.optim.Optimizer) -> bool:
    """Whether a parameter of `optimizer` that the job does not exchange has a gradient: it was unfrozen."""
    count = 0
    for group in optimizer.param_groups:
        count += len(group["params"])
    known, others = job.unexchanged.get(id(optimizer), (-1, []))
    if count != known:  # the optimizer's first step, or parameters were added to it
        exchanged = {id(p) for p in job.parameters()}
        others = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in exchanged]
        job.unexchanged[id(optimizer)] = count, others
    return bool(others) and any(p.grad is not None for p in others)


def is_stale(job: ScriptJob) -> bool:
    """Whether this worker's script has frozen or unfrozen layers since the layout was made."""
    known = {id(p) for p in job.parameters()}
    now = {id(p) for p in job.model.parameters() if p.requires_grad}
    groups = job.optimizer.param_groups
    return now != known or any(p.requires_grad and id(p) not in known for g in groups for p in g["params"])


def is_that_of_members(job: ScriptJob, link: Link) -> bool:
    """Whether this worker exchanges what the members exchange, if they have changed that."""
    try:
        return _note(link).read_text() == job.layout_digest
    except OSError:
        return True


def lay_out(job: ScriptJob, model: nn.Module, optimizer: torch.optim.Optimizer, link: Link) -> None:
    """Exchange the gradients of what is trained now; only for a worker that is in no generation of two.

    The layout is part of what all members must agree on, so the others join again with the new one.
    """
    job.lay_out(model, optimizer)
    if job.is_member:
        _note(link).parent.mkdir(parents=True, exist_ok=True)
        _note(link).write_text(job.layout_digest)


def _note(link: Link) -> Path:
    return link.directory.path / "private" / "layout"
