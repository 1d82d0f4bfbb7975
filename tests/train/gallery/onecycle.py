"""OneCycleLR stepped with each batch; the learning rates and momenta are written down."""

import json

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(17)
x = torch.rand(256, 4) * 2 - 1
y = torch.sin(3 * x).sum(1, keepdim=True)
dl = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
model = nn.Sequential(nn.Linear(4, 32), nn.SiLU(), nn.Linear(32, 1))
epochs = 12
opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.1, steps_per_epoch=len(dl), epochs=epochs)
history = {"lr": [], "momentum": [], "loss": []}
for epoch in range(epochs):
    for xb, yb in dl:
        loss = ((model(xb) - yb) ** 2).mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        sched.step()
        history["lr"].append(opt.param_groups[0]["lr"])
        history["momentum"].append(opt.param_groups[0]["momentum"])
    history["loss"].append(loss.item())
    print(f"{epoch:2d} {loss.item():.4f} {sched.get_last_lr()[0]:.5f}")
json.dump(history, open("history.json", "w"))
torch.save(model.state_dict(), "model.pt")
