"""Batches by next(), the iterator made anew at StopIteration, and a batch looked at before training."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(81)
x = torch.randn(250, 5)
y = (x**2).sum(1, keepdim=True).sqrt()
train_loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
sample, target = next(iter(train_loader))
print("batch", tuple(sample.shape), tuple(target.shape))
model = nn.Sequential(nn.Linear(5, 20), nn.ReLU(), nn.Linear(20, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
train_iter, epochs = iter(train_loader), 0
for step in range(1, 181):
    try:
        a, b = next(train_iter)
    except StopIteration:
        epochs += 1
        train_iter = iter(train_loader)
        a, b = next(train_iter)
    loss = nn.functional.mse_loss(model(a), b)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    if step % 15 == 0:
        print(f"step {step} epoch {epochs} loss {loss.item():.5f}")
torch.save(model.state_dict(), "model.pt")
