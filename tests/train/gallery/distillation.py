"""A small network learns the answers of a trained large one, and the labels."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(2)
x = torch.randn(420, 8)
y = (x[:, 0] * x[:, 1] > 0).long() + (x[:, 2] > 0.5).long()
loader = DataLoader(TensorDataset(x, y), batch_size=42, shuffle=True)
teacher = nn.Sequential(nn.Linear(8, 48), nn.ReLU(), nn.Linear(48, 3))
student = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 3))

opt = torch.optim.Adam(teacher.parameters(), lr=0.01)
for epoch in range(8):
    for xb, yb in loader:
        opt.zero_grad()
        loss = F.cross_entropy(teacher(xb), yb)
        loss.backward()
        opt.step()
    print(f"teacher epoch {epoch} loss {loss.item():.4f}")
teacher.eval()

T, alpha = 3.0, 0.7
opt = torch.optim.Adam(student.parameters(), lr=0.01)
for epoch in range(10):
    student.train()
    for xb, yb in loader:
        with torch.no_grad():
            soft = F.softmax(teacher(xb) / T, dim=1)
        logits = student(xb)
        kd = F.kl_div(F.log_softmax(logits / T, dim=1), soft, reduction="batchmean") * T * T
        loss = alpha * kd + (1 - alpha) * F.cross_entropy(logits, yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(f"student epoch {epoch} loss {loss.item():.4f} kd {kd.item():.4f}")
torch.save({"teacher": teacher.state_dict(), "student": student.state_dict()}, "distilled.pt")
