"""An additive angular margin on a classifier of normalised features (ArcFace)."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class ArcMarginProduct(nn.Module):
    def __init__(self, in_features, out_features, s=12.0, m=0.3):
        super().__init__()
        self.s, self.weight = s, nn.Parameter(torch.empty(out_features, in_features))
        nn.init.xavier_uniform_(self.weight)
        self.cos_m, self.sin_m = math.cos(m), math.sin(m)
        self.th, self.mm = math.cos(math.pi - m), math.sin(math.pi - m) * m

    def forward(self, input, label):
        cosine = F.linear(F.normalize(input), F.normalize(self.weight))
        sine = torch.sqrt((1.0 - cosine.pow(2)).clamp(1e-6, 1))
        phi = torch.where(cosine > self.th, cosine * self.cos_m - sine * self.sin_m, cosine - self.mm)
        one_hot = torch.zeros_like(cosine).scatter_(1, label.view(-1, 1), 1)
        return (one_hot * phi + (1.0 - one_hot) * cosine) * self.s


torch.manual_seed(141)
y = torch.randint(0, 6, (360,))
x = torch.randn(6, 12)[y] + 0.8 * torch.randn(360, 12)
loader = DataLoader(TensorDataset(x, y), batch_size=36, shuffle=True)
model, metric_fc = nn.Sequential(nn.Linear(12, 24), nn.PReLU(), nn.Linear(24, 8)), ArcMarginProduct(8, 6)
optimizer = torch.optim.SGD(
    [{"params": model.parameters()}, {"params": metric_fc.parameters()}],
    lr=0.05,
    momentum=0.9,
    weight_decay=5e-4,
)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
for epoch in range(15):
    for data, label in loader:
        output = metric_fc(model(data), label)
        loss = F.cross_entropy(output, label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    acc = (output.argmax(1) == label).float().mean().item()
    scheduler.step()
    print(f"epoch {epoch} loss {loss.item():.4f} acc {acc:.3f}")
torch.save({"model": model.state_dict(), "head": metric_fc.state_dict()}, "arcface.pt")
