"""`swell.elastic`: how a script becomes a worker of its job."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from swell.train.agent.errors import UsageError
from swell.train.agent.jobdir import JobDirectory
from swell.train.job import Job
from swell.train.optimizers import Several
from swell.train.options import Options
from swell.train.sync.control import Link

taken: set[str] = set()
"""Directories of the jobs that this process is a worker of: one at most."""


def elastic(
    model: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    **options: Any,
) -> Job:
    """Make a training loop elastic: under `swell run` a member of a job, otherwise a job of one.

    Several models and optimizers are given as lists: `swell.elastic([maker, critic], [optimizer_m,
    optimizer_c])`. The options (scheduler, mode, clip_norm, ...) are those of `swell.train.options`.
    """
    if not isinstance(model, nn.Module):
        model = nn.ModuleList(model)
    if not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = Several(optimizer)
    directory, worker = os.environ.get("SWELL_JOB_DIR"), os.environ.get("SWELL_WORKER")
    if not directory or not worker:
        return Job(model, optimizer, Options.of(options))
    if directory in taken:
        raise UsageError(
            "swell.elastic: this script calls it twice, and one worker belongs to one elastic job; give all "
            "models and optimizers to one call: swell.elastic([maker, critic], [optimizer_m, optimizer_c])"
        )
    if JobDirectory(Path(directory)).config().get("auto"):
        raise UsageError("swell.elastic: this script is elastic by itself; start it without --auto")
    taken.add(directory)
    gc.collect()
    gc.freeze()  # later collections, in the middle of a step, leave alone what is here for good
    return Job(model, optimizer, Options.of(options), Link(JobDirectory(Path(directory)), worker))
