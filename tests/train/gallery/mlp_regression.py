"""Regression by a small network, data standardised, in double precision, learning rates written down."""

import json

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
X = torch.randn(500, 6) * torch.tensor([1.0, 5.0, 0.2, 1.0, 3.0, 1.0]) + 2
y = (torch.sin(X[:, 0]) + 0.3 * X[:, 1] - X[:, 2] ** 2).unsqueeze(1)
X = (X - X.mean(0)) / X.std(0)
train_set, val_set = random_split(TensorDataset(X, y), [420, 80])
train_loader = DataLoader(train_set, batch_size=32, shuffle=True)
val_loader = DataLoader(val_set, batch_size=80)

model = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 1))
criterion = nn.MSELoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)
lrs = []
for epoch in range(15):
    model.train()
    running = 0.0
    for xb, yb in train_loader:
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        optimizer.step()
        running += loss.item() * xb.size(0)
    scheduler.step()
    lrs.append(scheduler.get_last_lr()[0])
    model.eval()
    with torch.no_grad():
        val = sum(criterion(model(xb), yb).item() for xb, yb in val_loader)
    print(f"epoch {epoch}: train {running / len(train_set):.5f} val {val:.5f}")
torch.save(model.state_dict(), "model.pt")
with open("lrs.json", "w") as f:
    json.dump(lrs, f)
