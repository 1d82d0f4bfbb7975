"""The last, smaller batch is dropped; the number of samples seen is counted."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(43)
x = torch.randn(333, 5)
y = x.abs().sum(1, keepdim=True)
loader = DataLoader(TensorDataset(x, y), batch_size=40, shuffle=True, drop_last=True)
model = nn.Sequential(nn.Linear(5, 20), nn.ReLU(), nn.Linear(20, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
samples = 0
for epoch in range(20):
    mae = 0.0
    for a, b in loader:
        assert a.shape == (40, 5)
        out = model(a)
        loss = nn.functional.huber_loss(out, b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        samples += a.shape[0]
        mae += (out.detach() - b).abs().mean().item()
    print(f"epoch {epoch} samples {samples} mae {mae / len(loader):.5f}")
torch.save({"model": model.state_dict(), "samples": samples}, "model.pt")
