"""A small elastic training script for tests: computing is a sleep, so that it scales on any machine.

Each sample takes `--sample-ms`, whoever computes it, so two workers are nearly twice as fast as one even
where there are fewer cores than workers. Once the file `--hurry` exists, samples take no time any more: a
test can give a job plenty of work, do what it has to do, and let the job end. While the file `--slower`
exists, samples take four times as long. The leader prints a line as it completes each step, and the loss at
the end. With `--linger` a worker that leaves does not end by itself.
"""

import argparse
import atexit
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import swell

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--sample-ms", type=float, default=1.0)
parser.add_argument("--hurry", type=Path)
parser.add_argument("--slower", type=Path)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--fail-at", type=int, default=-1)
parser.add_argument("--hoard-mb", type=int, default=0)
parser.add_argument("--linger", action="store_true")
args = parser.parse_args()

torch.manual_seed(args.seed)
inputs = torch.randn(512, 16)
targets = inputs @ torch.randn(16, 1) + 0.5 * torch.randn(512, 1)
model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
job = swell.elastic(model, optimizer, seed=args.seed)
loader = job.loader(TensorDataset(inputs, targets), batch_size=32)
hoard = bytearray(0)
if args.linger:

    def linger() -> None:
        if job.steps < args.epochs * len(loader):
            print("lingers", flush=True)
            time.sleep(900)

    atexit.register(linger)

gpu, sharing = os.environ.get("CUDA_VISIBLE_DEVICES", "-"), os.environ.get("SWELL_PER_GPU", "-")
print(f"device {gpu} per_gpu {sharing} pid {os.getpid()}", flush=True)
for _ in job.epochs(args.epochs):
    for x, y in loader:
        if args.hurry is None or not args.hurry.exists():
            times = 4 if args.slower is not None and args.slower.exists() else 1
            time.sleep(len(x) * args.sample_ms * times / 1000)
        if job.steps == args.fail_at and not job.rehearsing:
            raise RuntimeError("the toy broke")
        if args.hoard_mb and not job.rehearsing and not hoard:
            hoard = bytearray(args.hoard_mb << 20)
        if job.is_leader:
            print(f"step {job.steps + 1} at {time.time():.3f} pid {os.getpid()} of {job.world}", flush=True)
        job.step(nn.functional.mse_loss(model(x), y))
if job.is_leader:
    with torch.no_grad():
        print(f"final loss {float(nn.functional.mse_loss(model(inputs), targets)):.6f}", flush=True)
sys.exit(0)
