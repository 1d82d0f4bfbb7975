"""A script whose weights count samples: entry (epoch, i) says how much of sample i is in the model.

The gradient of a sample is 1 / (samples in the step) at its own entry, so after training every entry must be
exactly that of one use. What a checkpoint forgets, it forgets in the weights too.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
from torch import nn

import swell


class Numbers:
    """Sample i is the number i."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> int:
        return index


class Counter(nn.Module):
    """One weight for each sample of each epoch."""

    def __init__(self, epochs: int, samples: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(epochs, samples, dtype=torch.float64))

    def forward(self, epoch: int, index: torch.Tensor) -> torch.Tensor:
        """Minus the sum of the samples' weights, so that descent counts up."""
        return -self.weight[epoch, index]


def main() -> None:
    """Count until the epochs are over, then the leader writes what it counted."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=50)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--pace", type=float, default=0.005)
    parser.add_argument("--sample-pace", type=float, default=0.0, help="seconds that each sample takes too")
    parser.add_argument("--hurry", type=Path, help="no more pace once this file is there")
    parser.add_argument("--checkpoint-every", type=int, default=3)
    parser.add_argument("--mode", default="fixed")
    parser.add_argument("--loader-workers", type=int, default=0)
    parser.add_argument("--micro-batch", type=int, default=None)
    parser.add_argument("--timeline", type=Path, help="folder for a line for each step, a file per worker")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    model = Counter(options.epochs, options.samples)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    job = swell.elastic(model, optimizer, mode=options.mode, checkpoint_every_steps=options.checkpoint_every)
    loader = job.loader(
        Numbers(options.samples),
        batch_size=options.batch,
        num_workers=options.loader_workers,
        micro_batch=options.micro_batch,
    )
    for epoch in job.epochs(options.epochs):
        for index in loader:
            if options.hurry is None or not options.hurry.exists():
                time.sleep(options.pace + options.sample_pace * len(index))
            if job.step(model(epoch, index).mean()) and options.timeline is not None:
                with (options.timeline / os.environ["SWELL_WORKER"]).open("a") as file:
                    file.write(f"{job.steps} {job.world} {job.generation} {time.monotonic()}\n")
        job.reduce(done=1.0)
    if job.is_leader:
        temporary = options.out.with_suffix(".writing")
        temporary.write_text(json.dumps({"weight": model.weight.tolist(), "steps": job.steps}))
        temporary.replace(options.out)


if __name__ == "__main__":
    main()
