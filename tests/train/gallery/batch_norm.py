"""Batch norm, whose statistics are of the whole batch in a plain run."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(111)
x = torch.randn(320, 8) * 3 + 1
y = (x[:, 0] > x[:, 1]).long()
train = DataLoader(TensorDataset(x[:256], y[:256]), batch_size=32, shuffle=True)
test = DataLoader(TensorDataset(x[256:], y[256:]), batch_size=64)
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for epoch in range(20):
    model.train()
    for a, b in train:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(a), b)
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        val = sum(nn.functional.cross_entropy(model(a), b).item() for a, b in test)
    print(f"epoch {epoch} train {loss.item():.5f} val {val:.5f}")
torch.save(model.state_dict(), "model.pt")
