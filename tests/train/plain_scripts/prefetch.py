"""The next batch is drawn between forward and backward, from an endless sampler."""

import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

sys.path.insert(0, str(Path(__file__).parent))
from tools.pace import Pace

steps, pace = int(sys.argv[1]), Pace(sys.argv[2])
torch.manual_seed(3)
x = torch.randn(160, 4)
y = x @ torch.tensor([[1.0], [2.0], [3.0], [4.0]]) + 0.1 * torch.randn(160, 1)
body, head = nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Linear(8, 1)
optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.05, momentum=0.5)
data = TensorDataset(x, y)
loader = DataLoader(data, batch_size=20, sampler=RandomSampler(data, replacement=True, num_samples=10**10))
batches = iter(loader)
batch, step, losses = next(batches), 0, []
while step < steps:
    loss = nn.functional.mse_loss(head(body(batch[0])), batch[1])
    batch = next(batches)
    pace.pause()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
with torch.no_grad():
    print(json.dumps({"final": nn.functional.mse_loss(head(body(x)), y).item(), "steps": step}))
