"""Spectral norm: a buffer that every forward pass changes, in training only."""

import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(131)
x = torch.randn(300, 6)
y = torch.where(x[:, :1] * x[:, 1:2] > 0, 1.0, -1.0)
loader = DataLoader(TensorDataset(x, y), batch_size=30, shuffle=True)
model = nn.Sequential(spectral_norm(nn.Linear(6, 32)), nn.LeakyReLU(0.2), spectral_norm(nn.Linear(32, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=4e-3, betas=(0.0, 0.9))
for epoch in range(16):
    total = 0.0
    for a, b in loader:
        optimizer.zero_grad()
        loss = nn.functional.relu(1.0 - b * model(a)).mean()
        loss.backward()
        optimizer.step()
        total += loss.item()
    print(f"epoch {epoch} hinge {total / len(loader):.6f}")
torch.save(model.state_dict(), "model.pt")
