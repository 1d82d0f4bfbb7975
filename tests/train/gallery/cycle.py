"""A short loader repeated beside a long one by itertools.cycle (semi-supervised)."""

from itertools import cycle

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(71)
x = torch.randn(400, 8)
y = (x[:, 0] - x[:, 1] > 0).long()
labeled = DataLoader(TensorDataset(x[:60], y[:60]), batch_size=20, shuffle=True)
unlabeled = DataLoader(TensorDataset(x[60:]), batch_size=34, shuffle=True)
model = nn.Sequential(nn.Linear(8, 20), nn.ReLU(), nn.Linear(20, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for epoch in range(15):
    sup_total = uns_total = 0.0
    for (a, b), (u,) in zip(cycle(labeled), unlabeled, strict=False):
        sup = nn.functional.cross_entropy(model(a), b)
        p = model(u).softmax(1)
        uns = -(p * p.clamp(min=1e-6).log()).sum(1).mean()
        loss = sup + 0.1 * uns
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sup_total += sup.item()
        uns_total += uns.item()
    print(f"epoch {epoch} supervised {sup_total / 10:.5f} entropy {uns_total / 10:.5f}")
torch.save(model.state_dict(), "model.pt")
