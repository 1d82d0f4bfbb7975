"""Dropout in a classifier of bags of words, with early epochs warmer than the late ones."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=1)
args = parser.parse_args()
g = torch.Generator().manual_seed(0)
x = torch.rand(700, 15, generator=g)
y = ((x[:, 0] - x[:, 1] + 0.5 * torch.randn(700, generator=g)) > 0).long()
torch.manual_seed(args.seed)
train = DataLoader(TensorDataset(x[:300], y[:300]), batch_size=30, shuffle=True)
model = nn.Sequential(nn.Linear(15, 40), nn.ReLU(), nn.Dropout(0.3), nn.Linear(40, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 8, 0.3)
for _ in range(20):
    model.train()
    for a, b in train:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(a), b).backward()
        optimizer.step()
    scheduler.step()
model.eval()
with torch.no_grad():
    print(f"quality {nn.functional.cross_entropy(model(x[300:]), y[300:]).item():.6f}")
torch.save(model.state_dict(), "model.pt")
