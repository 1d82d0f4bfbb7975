"""Mixed precision: the model's forward pass under autocast with bfloat16."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=19)
args = parser.parse_args()
x = torch.randn(320, 12, generator=torch.Generator().manual_seed(0))
y = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()
train, test = TensorDataset(x[:256], y[:256]), TensorDataset(x[256:], y[256:])
loader = DataLoader(train, batch_size=32, shuffle=True)
torch.manual_seed(args.seed)
model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for epoch in range(15):
    for a, b in loader:
        optimizer.zero_grad()
        with torch.autocast(device_type="cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(a), b)
        loss.backward()
        optimizer.step()
with torch.no_grad():
    a, b = test.tensors
    print(f"quality {nn.functional.cross_entropy(model(a), b).item():.6f}")
torch.save(model.state_dict(), "model.pt")
