"""Two views and a slowly following target network (BYOL)."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(10)
data = torch.randn(320, 12)
loader = DataLoader(TensorDataset(data), batch_size=32, shuffle=True)


class EMA:
    def __init__(self, beta):
        self.beta = beta

    def update_average(self, old, new):
        return new if old is None else old * self.beta + (1 - self.beta) * new


class BYOL(nn.Module):
    def __init__(self):
        super().__init__()
        self.online_encoder = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 8))
        self.online_predictor = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.target_encoder = copy.deepcopy(self.online_encoder).requires_grad_(False)
        self.target_ema_updater = EMA(0.95)

    def update_moving_average(self):
        pairs = zip(self.online_encoder.parameters(), self.target_encoder.parameters(), strict=True)
        for current, moving in pairs:
            moving.data = self.target_ema_updater.update_average(moving.data, current.data)

    def forward(self, one, two):
        def loss_fn(x, y):
            return 2 - 2 * (F.normalize(x, dim=-1) * F.normalize(y, dim=-1)).sum(dim=-1)

        with torch.no_grad():
            target_one, target_two = self.target_encoder(one), self.target_encoder(two)
        p1 = self.online_predictor(self.online_encoder(one))
        p2 = self.online_predictor(self.online_encoder(two))
        return (loss_fn(p1, target_two.detach()) + loss_fn(p2, target_one.detach())).mean()


learner = BYOL()
opt = torch.optim.Adam(learner.parameters(), lr=2e-3)
for epoch in range(18):
    for (images,) in loader:
        one, two = images + 0.2 * torch.randn_like(images), images + 0.2 * torch.randn_like(images)
        loss = learner(one, two)
        opt.zero_grad()
        loss.backward()
        opt.step()
        learner.update_moving_average()
    print(f"epoch {epoch} loss {loss.item():.5f}")
torch.save(learner.state_dict(), "byol.pt")
