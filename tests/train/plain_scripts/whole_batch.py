"""Losses over a whole batch, in many forms: `whole_batch.py FORM STEPS PACE FOLDER [PLACE]`.

It knows nothing of swell; but worker w1 dies in its 60th step at PLACE, if one is given (or when its model
is tried without gradients for the first time).
"""

import json
import os
import signal
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

form, steps, pace, folder = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
place = sys.argv[5] if len(sys.argv) > 5 else ""
torch.set_default_dtype(torch.float64)
torch.manual_seed(5)


class Tower(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(wide, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x):
        if not torch.is_grad_enabled():
            die("in a trial")
        return F.normalize(self.layers(x), dim=-1)


class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = Tower(6), Tower(5)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, a, b):
        return self.image(a), self.text(b), self.scale.exp()


class WithLoss(nn.Module):
    """Returns its own loss, as the models of Hugging Face do."""

    def __init__(self):
        super().__init__()
        self.tower, self.head = Tower(6), nn.Linear(4, 3)

    def forward(self, x, labels):
        logits = self.head(self.tower(x))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


samples = 150
x = torch.randn(samples, 6)
y = torch.cat([x[:, :3].cos(), torch.randn(samples, 2)], 1)
label = (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()
loader = DataLoader(TensorDataset(x, y, label), batch_size=30, shuffle=True)
model = {"clip": Clip, "loss": WithLoss}.get(form, lambda: Tower(6))()
head = nn.Linear(4, 3)
optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1, momentum=0.5)


def compute(a, b, c):
    if form == "clip":
        image, text, scale = model(a, b)
        logits = scale * image @ text.T
        here = torch.arange(len(a))
        return (F.cross_entropy(logits, here) + F.cross_entropy(logits.T, here)) / 2
    if form == "loss":
        return model(a, labels=c)["loss"]
    z = model(a)
    if form == "supervised":  # contrastive
        near = (z @ z.T / 0.2).exp() * (1 - torch.eye(len(z)))
        same = (c[:, None] == c[None]).double() * (1 - torch.eye(len(z)))
        return -((near / near.sum(1, keepdim=True)).clamp_min(1e-9).log() * same).sum() / same.sum()
    if form == "penalized":
        penalty = sum((p**2).sum() for p in model.parameters()) + head.weight.abs().sum()
        return 0.02 * F.cross_entropy(head(z), c, reduction="sum") + 0.01 * penalty
    if form == "gradients":  # of the critic's output by its input
        a = a.clone().requires_grad_()
        out = head(model(a))
        (slope,) = torch.autograd.grad((out**2).sum(), a, create_graph=True)
        return F.cross_entropy(out, c) + 0.1 * ((slope.norm(dim=1) - 1) ** 2).mean()
    if form == "two":  # one model after another, and the first one's output besides
        return F.cross_entropy(head(z), c) + 0.1 * (z.std(0) - 0.5).pow(2).sum()
    distances = ((z[:, None] - z[None]) ** 2).sum(-1)  # triplets that are mined in the batch
    same = c[:, None] == c[None]
    furthest = (distances * same).max(1).values
    nearest = (distances + 9.0 * same).min(1).values
    return F.relu(furthest - nearest + 0.3).mean()


def die(here):
    if here == place and (done == 60 or here == "in a trial") and os.environ.get("SWELL_WORKER") == "w1":
        os.kill(os.getpid(), signal.SIGKILL)


lines, done = [], 0
head.weight.register_hook(lambda grad: die("in its part"))
while done < steps:
    for a, b, c in loader:
        time.sleep(pace)
        die("before the call")
        loss = compute(a, b, c)
        die("after the call")
        loss.register_hook(lambda grad: die("as backward begins"))
        optimizer.zero_grad()
        loss.backward()
        die("after backward")
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        done += 1
        lines.append(loss.item())
weights = torch.cat([p.detach().flatten() for p in [*model.parameters(), *head.parameters()]]).tolist()
path = f"{folder}/{os.environ.get('SWELL_WORKER', 'plain')}.json"
with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT), "w") as file:
    json.dump({"weights": weights, "losses": lines}, file)
