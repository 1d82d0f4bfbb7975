"""Scripts that freeze and unfreeze layers: what the workers exchange changes with what is trained."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from swell.train.sync.link import Link

if TYPE_CHECKING:
    from swell.train.auto.job import ScriptJob


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
