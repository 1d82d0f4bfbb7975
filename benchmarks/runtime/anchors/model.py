"""The model that the scripts of all anchors train, and the rows they write."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from benchmarks.runtime.overhead_script import BATCH, WIDTHS, build

CHECKPOINT_EVERY = 50
"""Steps between two checkpoints of the systems that restart."""
FOLDER = Path(os.environ.get("ANCHOR_FOLDER", "."))


def setup() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The small model and its optimizer, in a process with one thread."""
    torch.set_num_threads(1)
    model = build("0.4M")
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def train_batch(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Forward, backward and update on a third of a batch of random samples."""
    optimizer.zero_grad()
    x = torch.randn(BATCH // 3, WIDTHS["0.4M"][0])
    y = torch.randint(0, 10, (len(x),))
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()


def writer(name: str) -> Callable[[int, int], None]:
    """A function that writes a row for a step: `write(world, step)`."""
    out = (FOLDER / f"{name}.rows").open("a", buffering=1)

    def write(world: int, step: int) -> None:
        out.write(f"{os.getpid()} {world} {step} {time.monotonic():.6f}\n")

    return write
