"""A CNN with everything that usually breaks bit-identity; the leader writes a hash of weights and optimizer.

Batch norm, dropout, momentum, clipping, augmentation in python, numpy and torch, an uneven last batch.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import swell


class Augmented:
    """Random pictures, randomly flipped, shifted and made noisy."""

    def __len__(self) -> int:
        return 230

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        picture = torch.randn(1, 8, 8, generator=torch.Generator().manual_seed(index))
        if random.random() < 0.5:
            picture = picture.flip(-1)
        picture = picture.roll(int(np.random.randint(-1, 2)), 1)  # noqa: NPY002 - as scripts do
        return picture + 0.1 * torch.randn(1, 8, 8), index % 10


def digest(*states: dict[str, Any]) -> str:
    """A hash of all tensors in some state dicts."""
    found = hashlib.sha256()

    def walk(value: Any) -> None:
        if isinstance(value, Tensor):
            found.update(value.detach().cpu().contiguous().numpy().tobytes())
        elif isinstance(value, dict):
            for item in value.values():
                walk(item)
        elif isinstance(value, list | tuple):
            for item in value:
                walk(item)

    for state in states:
        walk(state)
    return found.hexdigest()


def main() -> None:
    """Train a few epochs and write the hash."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--pace", type=float, default=0.0)
    parser.add_argument("--hurry", type=Path, help="no more pace once this file is there")
    parser.add_argument("--loader-workers", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Flatten(),
        nn.Linear(8 * 36, 2048),  # large enough for sums that begin during backward
        nn.ReLU(),
        nn.Linear(2048, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    job = swell.elastic(
        model,
        optimizer,
        scheduler=scheduler,
        mode="consistent",
        logical_ranks=4,
        clip_norm=1.0,
        seed=3,
        checkpoint_every_steps=7,
    )
    loader = job.loader(Augmented(), batch_size=32, num_workers=options.loader_workers)
    for _ in job.epochs(options.epochs):
        for x, y in loader:
            if options.hurry is None or not options.hurry.exists():
                time.sleep(options.pace)
            job.step(nn.functional.cross_entropy(model(x), y))
    if job.is_leader:
        out = {"hash": digest(model.state_dict(), optimizer.state_dict()), "steps": job.steps}
        temporary = options.out / "result.writing"
        temporary.write_text(json.dumps(out))
        temporary.rename(options.out / "result.json")


if __name__ == "__main__":
    main()
