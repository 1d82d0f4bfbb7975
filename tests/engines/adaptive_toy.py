"""Adaptive training for tests: the same model and data, with as much gradient noise as `--label-noise` says.

Labels that are mostly noise make large batches worth while: the gradient noise scale is about 9 samples
without label noise and about 9 + label_noise^2 with it. Computing is a sleep of `--step-ms` for each gradient
and `--sample-ms` for each sample in it, whoever computes it, so that jobs scale on any machine.
"""

import argparse
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

import swell

parser = argparse.ArgumentParser()
parser.add_argument("--label-noise", type=float, default=0.0)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--by", choices=["progress", "data"], default="progress")
parser.add_argument("--mode", choices=["fixed", "adaptive", "consistent"], default="adaptive")
parser.add_argument("--max-batch", type=int, default=512)
parser.add_argument("--step-ms", type=float, default=20.0)
parser.add_argument("--sample-ms", type=float, default=0.5)
parser.add_argument("--until-loss", type=float)
parser.add_argument(
    "--lr", type=float, default=1e-5, help="so small that gradient and noise stay what they are"
)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

SAMPLES, FEATURES, TUNED = 8192, 8, 32
torch.manual_seed(args.seed)
inputs = torch.randn(SAMPLES, FEATURES)
targets = inputs.sum(1, keepdim=True) + args.label_noise * torch.randn(SAMPLES, 1)
model = nn.Linear(FEATURES, 1, bias=False)
nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
options = {"max_batch": args.max_batch} if args.mode == "adaptive" else {}
job = swell.elastic(model, optimizer, mode=args.mode, seed=args.seed, **options)
loader = job.loader(TensorDataset(inputs, targets), batch_size=TUNED)
by = args.by if args.mode == "adaptive" else None
for _ in job.epochs(args.epochs, by=by, until_loss=args.until_loss):
    for x, y in loader:
        time.sleep((args.step_ms + len(x) * args.sample_ms) / 1000)
        job.step(nn.functional.mse_loss(model(x), y))
if job.is_leader:
    print(f"steps {job.steps}", flush=True)
