"""A plain script that spoils one of its own numbers when it is told to: `noticed_script.py STEPS ORDERS`.

It knows nothing of swell but the name of its worker. An order is a file in the folder ORDERS: which worker,
what kind of number, and a seed that says which one and by how much.
"""

import json
import os
import posix
import random
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

steps, orders = int(sys.argv[1]), sys.argv[2]
torch.manual_seed(4)
x = torch.randn(400, 6)
y = torch.stack([x[:, 0] * x[:, 1], x[:, 2].sin()], 1)
mask = torch.ones(6)
loader = DataLoader(TensorDataset(x, y), batch_size=40, shuffle=True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.zeros(6))
        self.layers = nn.Sequential(nn.Linear(6, 24), nn.LayerNorm(24), nn.ReLU(), nn.Linear(24, 2))

    def forward(self, x):
        return self.layers(x - self.shift)


model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5000, 0.9)
best, done, weight = float("inf"), 0, 1.0


def spoil(kind, draw):
    """Change one number of this worker by a tenth of a percent and more."""
    by = draw.choice([-1, 1]) * draw.uniform(0.001, 0.5)
    if kind == "weight":
        tensor = draw.choice(list(model.parameters())).data.view(-1)
        tensor[draw.randrange(len(tensor))] += by
    elif kind == "state":
        state = optimizer.state[draw.choice(list(model.parameters()))]
        tensor = state[draw.choice(["exp_avg", "exp_avg_sq"])].view(-1)
        tensor[draw.randrange(len(tensor))] += abs(by)
    elif kind == "setting":
        group, setting = optimizer.param_groups[0], draw.choice(["lr", "weight_decay", "eps"])
        group[setting] *= 1 + by
    elif kind == "moments":
        optimizer.param_groups[0]["betas"] = (0.9 + by / 10, 0.999)
    elif kind == "buffer":
        model.shift[draw.randrange(6)] += by
    elif kind == "input":
        x[:, draw.randrange(6)] += by
    elif kind == "target":
        y[:, draw.randrange(2)] *= 1 + by
    elif kind == "random":
        torch.manual_seed(draw.randrange(10**6))
    elif kind == "counter":
        return 1 + by  # the loss's weight, a variable of the script's
    return None


last = ""
while done < steps:
    for a, b in loader:
        time.sleep(0.004)
        noisy = a + 0.01 * torch.randn_like(a)
        loss = weight * nn.functional.mse_loss(model(noisy * mask), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        done += 1
        best = min(best, loss.item())
        try:
            file = posix.open(f"{orders}/order", posix.O_RDONLY)
        except FileNotFoundError:
            continue
        text = posix.read(file, 4096)
        posix.close(file)
        order = json.loads(text)
        if order["worker"] != os.environ.get("SWELL_WORKER") or order["number"] == last:
            continue
        last = order["number"]
        if posix.access(f"{orders}/done-{last}", posix.R_OK):
            continue
        weight = spoil(order["kind"], random.Random(order["seed"])) or weight
        file = posix.open(f"{orders}/done-{last}", posix.O_WRONLY | posix.O_CREAT)
        posix.write(file, str(done).encode())
        posix.close(file)
print(json.dumps({"best": best}))
