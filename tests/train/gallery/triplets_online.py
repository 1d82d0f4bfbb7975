"""The hardest triplets of each batch, mined in the batch (FaceNet, "batch hard")."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)


def batch_hard_triplet_loss(labels, embeddings, margin):
    dist = torch.cdist(embeddings, embeddings)
    same = labels.unsqueeze(0) == labels.unsqueeze(1)
    positives = same & ~torch.eye(len(labels), dtype=torch.bool)
    hardest_positive = (dist * positives).max(dim=1)[0]
    hardest_negative = (dist + dist.max().detach() * same).min(dim=1)[0]
    return F.relu(hardest_positive - hardest_negative + margin).mean()


torch.manual_seed(3)
y = torch.randint(0, 4, (360,))
x = torch.randn(4, 10)[y] + 0.6 * torch.randn(360, 10)
loader = DataLoader(TensorDataset(x, y), batch_size=36, shuffle=True)
net = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 4))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
for epoch in range(15):
    epoch_loss = 0.0
    for data, target in loader:
        optimizer.zero_grad()
        loss = batch_hard_triplet_loss(target, net(data), 0.5)
        loss.backward()
        optimizer.step()
        epoch_loss += loss.item()
    print(f"Epoch {epoch}: {epoch_loss / len(loader):.5f}")
torch.save(net.state_dict(), "triplets.pt")
