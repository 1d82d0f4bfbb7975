"""Two tasks with a loader each; which of them is next is drawn at random."""

import random

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

random.seed(0)
torch.manual_seed(0)
x1, x2 = torch.randn(240, 10), torch.randn(160, 10)
y1, y2 = x1[:, :1].sin() + x1[:, 1:2], (x2[:, 2] + x2[:, 3] > 0).long()
loaders = {
    "regress": DataLoader(TensorDataset(x1, y1), batch_size=20, shuffle=True),
    "classify": DataLoader(TensorDataset(x2, y2), batch_size=20, shuffle=True),
}
shared = nn.Sequential(nn.Linear(10, 20), nn.ReLU())
heads = nn.ModuleDict({"regress": nn.Linear(20, 1), "classify": nn.Linear(20, 2)})
criteria = {"regress": nn.MSELoss(), "classify": nn.CrossEntropyLoss()}
optimizer = torch.optim.Adam([*shared.parameters(), *heads.parameters()], lr=3e-3)
counts = {"regress": 0, "classify": 0}
for epoch in range(10):
    iterators = {name: iter(loader) for name, loader in loaders.items()}
    totals = {name: 0.0 for name in loaders}
    schedule = [name for name, loader in loaders.items() for _ in range(len(loader))]
    random.shuffle(schedule)
    for name in schedule:
        x, y = next(iterators[name])
        loss = criteria[name](heads[name](shared(x)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        counts[name] += 1
        totals[name] += loss.item()
    print(f"epoch {epoch} " + " ".join(f"{n} {totals[n] / len(loaders[n]):.4f}" for n in sorted(totals)))
print(counts)
torch.save({"shared": shared.state_dict(), "heads": heads.state_dict()}, "multi_task.pt")
