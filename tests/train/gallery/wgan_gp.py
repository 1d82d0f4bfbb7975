"""A Wasserstein GAN with a gradient penalty on interpolated samples, which needs gradients of gradients."""

import torch
import torch.nn as nn
from torch import autograd
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(6)
angle = torch.rand(320) * 6.283
data = torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(320, 2)
loader = DataLoader(TensorDataset(data), batch_size=32, shuffle=True)
G = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
D = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
opt_G = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.5, 0.9))
opt_D = torch.optim.Adam(D.parameters(), lr=1e-3, betas=(0.5, 0.9))


def compute_gradient_penalty(D, real, fake):
    alpha = torch.rand(real.size(0), 1)
    interpolates = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    d = D(interpolates)
    gradients = autograd.grad(d, interpolates, torch.ones_like(d), create_graph=True, retain_graph=True)[0]
    return ((gradients.norm(2, dim=1) - 1) ** 2).mean()


for epoch in range(12):
    for i, (real,) in enumerate(loader):
        opt_D.zero_grad()
        z = torch.randn(real.shape[0], 2)
        fake = G(z)
        penalty = compute_gradient_penalty(D, real.data, fake.data)
        d_loss = -torch.mean(D(real)) + torch.mean(D(fake)) + 10 * penalty
        d_loss.backward()
        opt_D.step()
        opt_G.zero_grad()
        if i % 2 == 0:
            g_loss = -torch.mean(D(G(z)))
            g_loss.backward()
            opt_G.step()
    print(f"epoch {epoch} d {d_loss.item():.5f} g {g_loss.item():.5f} penalty {penalty.item():.5f}")
torch.save([G.state_dict(), D.state_dict()], "gp.pt")
