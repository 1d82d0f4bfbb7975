"""A job whose workers write down when they made which step, each into a file of its own."""

import argparse
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import swell

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=Path, required=True, help="a directory")
parser.add_argument("--until", type=Path, required=True, help="train until this file is there")
parser.add_argument("--ready-s", type=float, default=0.0, help="how long each worker takes to get ready")
args = parser.parse_args()

time.sleep(args.ready_s)
torch.manual_seed(0)
model = nn.Linear(16, 1)
job = swell.elastic(model, torch.optim.SGD(model.parameters(), lr=0.01))
loader = job.loader(TensorDataset(torch.randn(256, 16), torch.randn(256, 1)), batch_size=32)
own = args.steps / f"{os.environ.get('SWELL_WORKER', 'w0')}-{os.getpid()}"
for _ in job.epochs(100000):
    for x, y in loader:
        time.sleep(0.003 * len(x))
        if job.step(nn.functional.mse_loss(model(x), y)):
            with own.open("a") as file:
                file.write(f"{job.steps} {time.time():.3f} {job.world}\n")
    if job.agree(args.until.exists()):
        break
