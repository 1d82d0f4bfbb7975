"""A job that trains honestly and tries what it can to outlive, to see and to block: for tests."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import swell

directory, told = Path(os.environ["SWELL_JOB_DIR"]).parent.parent, Path(sys.argv[1])
many = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]  # every later descriptor is above 1,023
survivor = subprocess.Popen(["env", "-i", "setsid", "sleep", "300"], close_fds=True)
model = torch.nn.Linear(2, 1)
job = swell.elastic(model, torch.optim.SGD(model.parameters(), lr=0.01))
loader = job.loader(TensorDataset(torch.randn(64, 2), torch.randn(64, 1)), batch_size=8)
for _ in job.epochs(1):
    for x, y in loader:
        job.step(torch.nn.functional.mse_loss(model(x), y))
told.write_text(json.dumps({"pid": survivor.pid, "env": dict(os.environ), "descriptors": many[-1]}))
(directory / "output.log").unlink()
os.mkfifo(directory / "output.log")
