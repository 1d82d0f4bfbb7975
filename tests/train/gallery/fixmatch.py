"""Semi-supervised: labelled and unlabelled batches, each loader begun again whenever it is at its end."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(8)
points = torch.randn(330, 6)
classes = (points[:, 0] * points[:, 1] > 0).long() + (points[:, 2] > 0.5).long()
labelled = DataLoader(TensorDataset(points[:50], classes[:50]), batch_size=16, shuffle=True, drop_last=True)
unlabelled = DataLoader(TensorDataset(points[50:300]), batch_size=48, shuffle=True, drop_last=True)
model = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
labelled_iter, unlabelled_iter = iter(labelled), iter(unlabelled)
for epoch in range(6):
    total, used = 0.0, 0.0
    for step in range(20):
        try:
            x, y = next(labelled_iter)
        except StopIteration:
            labelled_iter = iter(labelled)
            x, y = next(labelled_iter)
        try:
            (u,) = next(unlabelled_iter)
        except StopIteration:
            unlabelled_iter = iter(unlabelled)
            (u,) = next(unlabelled_iter)
        weak, strong = u + 0.05 * torch.randn_like(u), u + 0.3 * torch.randn_like(u)
        logits = model(torch.cat([x, weak, strong]))
        logits_x, (logits_w, logits_s) = logits[:16], logits[16:].chunk(2)
        sure, pseudo = logits_w.detach().softmax(1).max(1)
        mask = (sure > 0.6).float()
        loss = F.cross_entropy(logits_x, y)
        loss = loss + (F.cross_entropy(logits_s, pseudo, reduction="none") * mask).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
        used += mask.mean().item()
    print(f"epoch {epoch} loss {total / 20:.5f} used {used / 20:.4f}")
torch.save(model.state_dict(), "fixmatch.pt")
