"""A generator and a critic with an optimizer each, in the order of the well-known examples."""

import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parent))
from tools.pace import WIDTH, Pace

epochs, pace = int(sys.argv[1]), Pace(sys.argv[2])
torch.manual_seed(1)
data = TensorDataset(0.3 * torch.randn(320, 2) + torch.tensor([1.0, -1.0]))
loader = DataLoader(data, batch_size=32, shuffle=True)
maker = nn.Sequential(nn.Linear(4, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, 2))
critic = nn.Sequential(nn.Linear(2, 2 * WIDTH), nn.LeakyReLU(0.2), nn.Linear(2 * WIDTH, 1))
optimizer_c = torch.optim.Adam(critic.parameters(), lr=5e-3, betas=(0.5, 0.9))
optimizer_m = torch.optim.Adam(maker.parameters(), lr=5e-3, betas=(0.5, 0.9))
criterion, count = nn.BCEWithLogitsLoss(), 0
for epoch in range(epochs):
    for (real,) in loader:
        pace.pause()
        critic.zero_grad()
        criterion(critic(real), torch.ones(len(real), 1)).backward()
        fake = maker(torch.randn(len(real), 4))
        criterion(critic(fake.detach()), torch.zeros(len(real), 1)).backward()
        optimizer_c.step()
        maker.zero_grad()
        criterion(critic(fake), torch.ones(len(real), 1)).backward()
        optimizer_m.step()
        count += 1
with torch.no_grad():
    middle = maker(torch.randn(2000, 4)).mean(0)
print(json.dumps({"off": (middle - torch.tensor([1.0, -1.0])).norm().item(), "count": count}))
