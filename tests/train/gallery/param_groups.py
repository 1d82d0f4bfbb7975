"""Adam with three groups, each with its own rate, decay and schedule."""

import json

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(101)
tokens = torch.randint(0, 30, (300, 5))
y = (tokens.float().mean(1, keepdim=True) - 15) / 5
loader = DataLoader(TensorDataset(tokens, y), batch_size=30, shuffle=True)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.body, self.head = nn.Embedding(30, 8), nn.Linear(40, 16), nn.Linear(16, 1)

    def forward(self, t):
        return self.head(torch.tanh(self.body(self.emb(t).flatten(1))))


model = Model()
optimizer = torch.optim.Adam(
    [
        {"params": model.emb.parameters(), "lr": 1e-2},
        {"params": model.body.parameters(), "weight_decay": 1e-3},
        {"params": model.head.parameters(), "lr": 1e-3, "betas": (0.8, 0.99)},
    ],
    lr=3e-3,
    amsgrad=True,
)
schedules = [lambda e: 0.9**e, lambda e: 1.0 / (1 + e), lambda e: 1.0 if e < 8 else 0.5]
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_lambda=schedules)
lrs = []
for epoch in range(16):
    for a, b in loader:
        loss = nn.functional.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    scheduler.step()
    lrs.append(scheduler.get_last_lr())
    print(f"epoch {epoch} loss {loss.item():.5f} lrs {' '.join(f'{lr:.6f}' for lr in lrs[-1])}")
with open("lrs.json", "w") as f:
    json.dump(lrs, f, indent=2)
torch.save(model.state_dict(), "model.pt")
