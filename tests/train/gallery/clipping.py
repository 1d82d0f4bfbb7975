"""Clipping by norm and then by value; the norms before clipping are kept in a list that is printed."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(51)
x = torch.randn(300, 10, 4)
y = x.cumsum(1).amax(1).sum(1, keepdim=True)
loader = DataLoader(TensorDataset(x, y), batch_size=30, shuffle=True)


class GRUNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru, self.out = nn.GRU(4, 12, batch_first=True), nn.Linear(12, 1)

    def forward(self, x):
        return self.out(self.gru(x)[0][:, -1])


model = GRUNet()
optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3)
norms = []
for epoch in range(14):
    for a, b in loader:
        optimizer.zero_grad()
        loss = nn.functional.l1_loss(model(a), b)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.2)
        optimizer.step()
        norms.append(norm.item())
    print(f"epoch {epoch} loss {loss.item():.4f} mean norm {sum(norms[-10:]) / 10:.4f} max {max(norms):.4f}")
torch.save({"model": model.state_dict(), "norms": torch.tensor(norms)}, "clipped.pt")
