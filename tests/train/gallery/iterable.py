"""A stream of lines as an IterableDataset, batched by the DataLoader."""

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Lines(IterableDataset):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        g = torch.Generator().manual_seed(0)
        w = torch.randn(6, generator=g)
        for _ in range(self.count):
            x = torch.randn(6, generator=g)
            yield x, (x @ w).tanh()


torch.manual_seed(0)
loader = DataLoader(Lines(320), batch_size=32)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for epoch in range(16):
    running = 0.0
    for i, (x, y) in enumerate(loader, 1):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x).squeeze(1), y)
        loss.backward()
        optimizer.step()
        running += (loss.item() - running) / i
    print(f"epoch {epoch} loss {running:.5f}")
torch.save(model.state_dict(), "model.pt")
