"""The script the runtime benchmarks run: two models, random data, a line for every committed step.

swell run --workers 2:3 benchmarks/runtime/workload.py --model large --seconds 60 --out DIRECTORY
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import swell

SIZES = {
    "small": (256, 512, 512),
    "large": (512, 2048, 2048, 1800),
    "huge": (2048, 4096, 4096, 4096, 4096),
    "tiny": (16, 32),
}
"""Layer widths: about 0.4, 9 and 59 million and a thousand parameters."""


def build(name: str) -> nn.Module:
    """The benchmark's model of that size."""
    torch.manual_seed(0)
    widths = SIZES[name]
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 10))


def data(name: str, samples: int) -> TensorDataset:
    """Random samples that fit the model."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, SIZES[name][0], generator=generator)
    return TensorDataset(x, torch.randint(0, 10, (samples,), generator=generator))


def main() -> None:
    """Train until the time is over, writing `step world generation commit_s` for every step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=list(SIZES), default="small")
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--mode", default="fixed")
    parser.add_argument("--pace", type=float, default=0.0, help="seconds to sleep in each step")
    parser.add_argument("--hosts", help="the network whose hosts the workers move to")
    parser.add_argument("--host-count", type=int, default=4)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.hosts:
        sys.path.insert(0, str(Path(__file__).parents[2]))
        from benchmarks.runtime import network

        network.move(options.hosts, options.host_count)
    model = build(options.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    job = swell.elastic(model, optimizer, mode=options.mode, checkpoint_every_s=None)
    loader = job.loader(data(options.model, 9_600), batch_size=options.batch)
    loss = nn.CrossEntropyLoss()
    worker = os.environ.get("SWELL_WORKER", "solo")
    logged = 0
    with (options.out / f"{worker}.steps").open("a", buffering=1) as out:
        for _ in job.epochs(1_000_000):
            for x, y in loader:
                if options.pace:
                    time.sleep(options.pace)
                job.step(loss(model(x), y))
                if job.steps > logged:  # a step may also be committed while the next batch is drawn
                    logged = job.steps
                    out.write(f"{job.steps} {job.world} {job.generation} {time.monotonic():.6f}\n")
                    if job.steps >= options.steps:
                        return


if __name__ == "__main__":
    main()
