"""A LambdaLR with warm-up and cosine per step, and the rates in a text file."""

import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(21)
x = torch.randn(330, 8)
y = x.prod(1, keepdim=True).sign() * x.abs().mean(1, keepdim=True)
loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True, drop_last=False)
model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.05)
num_epochs, warmup_steps = 15, 30
total_steps = num_epochs * len(loader)


def lr_lambda(step):
    if step < warmup_steps:
        return step / max(1, warmup_steps)
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))


scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_lambda)
with open("lr.txt", "w") as log:
    for epoch in range(num_epochs):
        for batch_x, batch_y in loader:
            loss = nn.functional.smooth_l1_loss(model(batch_x), batch_y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            log.write(f"{scheduler.get_last_lr()[0]:.9f}\n")
        print(f"epoch {epoch} loss {loss.item():.5f} lr {scheduler.get_last_lr()[0]:.7f}")
torch.save(model.state_dict(), "model.pt")
