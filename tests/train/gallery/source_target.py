"""Domain adaptation: a loop over the source's batches; the target's begin again at their end."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(12)
source_x = torch.randn(360, 5)
source_y = source_x[:, :2].sum(1, keepdim=True).sin()
target_x = 0.7 * torch.randn(130, 5) + 0.4
source = DataLoader(TensorDataset(source_x, source_y), batch_size=24, shuffle=True)
target = DataLoader(TensorDataset(target_x), batch_size=24, shuffle=True)
features, head = nn.Sequential(nn.Linear(5, 20), nn.Tanh()), nn.Linear(20, 1)
optimizer = torch.optim.Adam([*features.parameters(), *head.parameters()], lr=4e-3)
for epoch in range(9):
    target_iter, total = iter(target), 0.0
    for a, b in source:
        try:
            (t,) = next(target_iter)
        except StopIteration:
            target_iter = iter(target)
            (t,) = next(target_iter)
        of_source, of_target = features(a), features(t)
        apart = (of_source.mean(0) - of_target.mean(0)).pow(2).sum()
        loss = nn.functional.mse_loss(head(of_source), b) + 0.1 * apart
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    print(f"epoch {epoch} loss {total / len(source):.5f} apart {apart.item():.5f}")
torch.save({"features": features.state_dict(), "head": head.state_dict()}, "adapted.pt")
