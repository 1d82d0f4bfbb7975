"""What a script trains: its optimizers, and the model that they train."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from swell.train.auto import layout
from swell.train.auto import script as auto_script
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
        return auto_script.find_model(self.optimizers)

    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, or all of several as one."""
        return self.optimizers[0] if len(self.optimizers) == 1 else Several(self.optimizers)

    def lay_out(self, job: ScriptJob) -> None:
        """Exchange the gradients of what the script trains now."""
        layout.lay_out(job, self.model(), self.optimizer(), self._link)


def _trains_any(optimizer: torch.optim.Optimizer) -> bool:
    return any(p.requires_grad for group in optimizer.param_groups for p in group["params"])
