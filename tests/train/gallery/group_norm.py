"""Group norm in a small convolutional network, with weight standardisation by a parametrization."""

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.data import DataLoader, TensorDataset


class Standardize(nn.Module):
    def forward(self, w):
        return (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5)


torch.manual_seed(121)
y = torch.randint(0, 2, (240,))
x = torch.randn(240, 1, 8, 8) + 0.5 * y.view(-1, 1, 1, 1) * torch.eye(8)
loader = DataLoader(TensorDataset(x, y), batch_size=24, shuffle=True)
conv = parametrize.register_parametrization(
    nn.Conv2d(1, 8, 3, padding=1, bias=False), "weight", Standardize()
)
model = nn.Sequential(
    conv, nn.GroupNorm(4, 8), nn.GELU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 2)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
for epoch in range(14):
    total = 0.0
    for a, b in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(a), b)
        loss.backward()
        optimizer.step()
        total += loss.item()
    print(f"epoch {epoch} loss {total / len(loader):.5f}")
torch.save(model.state_dict(), "model.pt")
