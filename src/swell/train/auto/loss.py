"""The loss of the present batch: how its parts are added up, and what is reported of it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from swell.train.auto.dropout import Dropout
from swell.train.auto.passes import Drawn
from swell.train.auto.reduction import SUM, Reduction
from swell.train.sync.mesh import Header

_EVERY = 10
"""On a device the loss is read once in so many steps, because reading makes the script wait."""


class Loss:
    """The loss that the script computes gradients of, and what kind of loss it is."""

    def __init__(self) -> None:
        self.reduction = Reduction()
        self.dropout = Dropout()
        """Off while this worker tries what kind of loss the script has."""
        self._tensor: Tensor | None = None

    def take(self, roots: Any) -> bool:
        """The script computes gradients of `roots`; False if one of them is not a single number."""
        losses = (roots,) if isinstance(roots, Tensor) else tuple(roots)
        for loss in losses:
            if loss.numel() != 1:
                return False
        self._tensor = losses[0]
        return True

    def forget(self) -> None:
        """The gradients have been computed."""
        self._tensor = None

    def read(self, drawn: Drawn, steps: int) -> float | None:
        """This worker's loss of the batch; on a device only now and then."""
        loss = self._tensor
        if loss is None or (drawn.probe < 0 and steps % _EVERY and loss.device.type != "cpu"):
            return None
        return float(loss.item())

    def tell(self, drawn: Drawn, header: Header, steps: int) -> None:
        """Put this worker's part of the step's loss into the header, and judge a probe."""
        header["size"] = len(drawn.window)
        value = self.read(drawn, steps)
        if drawn.probe >= 0 and self.reduction.kind is None:
            self.reduction.tried(drawn.probe, value)
            if self.reduction.found:
                header["loss_is"] = self.reduction.found
        if value is not None and math.isfinite(value) and drawn.samples:
            header["loss"] = value * (1 if self.reduction.kind == SUM else drawn.samples)

    def of_all(self, headers: list[Header]) -> float | None:
        """The loss of the whole batch, if every worker that has a part of it told its own."""
        if not headers or not all("loss" in h for h in headers):
            return None
        total: float = sum(h["loss"] for h in headers)
        return total if self.reduction.kind == SUM else total / sum(h["n"] for h in headers)


def scaled(roots: Any, drawn: Drawn) -> Any:
    """Gradients to begin with, for losses that are sums.

    The sum over a worker's part is made as large as the sum over the whole batch would be, because the parts
    are averaged.
    """
    factor = len(drawn.window) / (drawn.part[1] - drawn.part[0])
    if isinstance(roots, Tensor):
        return torch.full_like(roots, factor)
    return [torch.full_like(loss, factor) for loss in roots]
