"""An endless generator around a loader, and a loop over a number of iterations."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def infinite(loader):
    while True:
        for batch in loader:
            yield batch


torch.manual_seed(61)
x = torch.randn(230, 6)
y = x.relu().sum(1, keepdim=True)
data = infinite(DataLoader(TensorDataset(x, y), batch_size=24, shuffle=True))
model = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
num_iters = 180
avg = None
for it in range(num_iters):
    a, b = next(data)
    loss = nn.functional.mse_loss(model(a), b)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    avg = loss.item() if avg is None else 0.95 * avg + 0.05 * loss.item()
    if (it + 1) % 20 == 0:
        print(f"iter {it + 1}/{num_iters} loss {loss.item():.5f} avg {avg:.5f}")
    if (it + 1) % 60 == 0:
        torch.save(model.state_dict(), f"iter_{it + 1}.pt")
