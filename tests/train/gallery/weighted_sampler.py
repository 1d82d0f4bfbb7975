"""Rare classes drawn more often by a WeightedRandomSampler; how often each was seen is printed."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

torch.manual_seed(23)
y = (torch.rand(360) < 0.15).long()
x = torch.randn(360, 6) + 1.2 * y.unsqueeze(1)
counts = torch.bincount(y)
weights = 1.0 / counts[y].double()
sampler = WeightedRandomSampler(weights, num_samples=len(weights), replacement=True)
loader = DataLoader(TensorDataset(x, y), batch_size=30, sampler=sampler)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
seen = torch.zeros(2, dtype=torch.long)
for epoch in range(14):
    for a, b in loader:
        seen += torch.bincount(b, minlength=2)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(a), b)
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.4f} seen {seen.tolist()}")
torch.save({"model": model.state_dict(), "seen": seen}, "model.pt")
