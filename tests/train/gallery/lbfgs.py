"""LBFGS with a closure, on batches of a loader."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(2)
x = torch.rand(240, 3) * 4 - 2
y = (x[:, :1] * x[:, 1:2]).sin() + x[:, 2:]
loader = DataLoader(TensorDataset(x, y), batch_size=80, shuffle=True)
model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.2, max_iter=4, history_size=6)
criterion = nn.MSELoss()
for epoch in range(12):
    for a, b in loader:

        def closure():
            optimizer.zero_grad()
            loss = criterion(model(a), b)
            loss.backward()
            return loss

        loss = optimizer.step(closure)
    print(f"epoch {epoch} loss {loss.item():.6f}")
torch.save(model.state_dict(), "model.pt")
