"""A Wasserstein GAN: five steps of the critic for one of the generator, weights clipped."""

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(4)
data = torch.cat([torch.randn(200, 2) * 0.2 + 1, torch.randn(200, 2) * 0.2 - 1])
loader = DataLoader(TensorDataset(data), batch_size=25, shuffle=True, drop_last=True)
generator = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 2))
critic = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
opt_g = torch.optim.RMSprop(generator.parameters(), lr=5e-4)
opt_c = torch.optim.RMSprop(critic.parameters(), lr=5e-4)
batches_done = 0
for epoch in range(12):
    for i, (real,) in enumerate(loader):
        opt_c.zero_grad()
        z = torch.randn(real.size(0), 3)
        fake = generator(z).detach()
        loss_c = -torch.mean(critic(real)) + torch.mean(critic(fake))
        loss_c.backward()
        opt_c.step()
        for p in critic.parameters():
            p.data.clamp_(-0.05, 0.05)
        if i % 5 == 0:
            opt_g.zero_grad()
            loss_g = -torch.mean(critic(generator(z)))
            loss_g.backward()
            opt_g.step()
            print(f"[Epoch {epoch}] [Batch {i}] [D loss: {loss_c.item():.5f}] [G loss: {loss_g.item():.5f}]")
        batches_done += 1
torch.save({"g": generator.state_dict(), "c": critic.state_dict(), "done": batches_done}, "wgan.pt")
