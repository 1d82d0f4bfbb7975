"""A csv file that is open for the whole training, a row per batch and flushes per epoch."""

import csv

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(161)
x = torch.randn(240, 6)
y = (x.sum(1) > 0).float().unsqueeze(1)
loader = DataLoader(TensorDataset(x, y), batch_size=24, shuffle=True)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
csvfile = open("metrics.csv", "w", newline="")
writer = csv.writer(csvfile)
writer.writerow(["epoch", "batch", "loss", "accuracy"])
metrics = []
for epoch in range(16):
    for i, (a, b) in enumerate(loader):
        out = model(a)
        loss = nn.functional.binary_cross_entropy_with_logits(out, b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        accuracy = ((out > 0).float() == b).float().mean().item()
        metrics.append((loss.item(), accuracy))
        writer.writerow([epoch, i, f"{loss.item():.5f}", f"{accuracy:.4f}"])
    csvfile.flush()
    recent = metrics[-len(loader) :]
    print(f"epoch {epoch} loss {sum(m[0] for m in recent) / len(recent):.5f} rows {len(metrics)}")
csvfile.close()
torch.save(model.state_dict(), "model.pt")
