"""Checks of what a script passes to `swell.elastic`; what cannot work is refused, with the reason."""

from __future__ import annotations

import torch
from torch import nn

from swell.train.agent.errors import UsageError


def device(model: nn.Module, device: torch.device | str | None) -> None:
    """Refuse a model that is not on the device that the script names."""
    if device is None:
        return
    wanted = torch.device(device)
    for name, parameter in model.named_parameters():
        here = parameter.device
        if here.type != wanted.type or (wanted.index is not None and here.index != wanted.index):
            raise UsageError(
                f"model: {name} is on {here}, but the script says device={str(wanted)!r}; call "
                f"model.to({str(wanted)!r}) before building the optimizer"
            )


def optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that updates parameters of anything but the model."""
    own = {id(p) for p in model.parameters()}
    strangers = [p for g in optimizer.param_groups for p in g["params"] if id(p) not in own]
    if strangers:
        raise UsageError(
            f"optimizer: {len(strangers)} of its parameters are not the model's (the first has shape "
            f"{tuple(strangers[0].shape)}); build the optimizer from model.parameters(), after "
            "moving the model"
        )
